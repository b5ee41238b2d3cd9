"""Canonical operators of a sparse attention indexer, and what runs them."""
