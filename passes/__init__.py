"""Graph-to-graph passes over functional ATen graphs."""
