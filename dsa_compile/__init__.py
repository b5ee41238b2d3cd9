"""Finds, proves and rewrites DeepSeek Sparse Attention indexers in PyTorch models."""
