"""Canonical ops of the lightning indexer and their CPU implementation.

Importing registers ``torch.ops.dsa.*`` (the plain PyTorch reference) and nothing runs. The package
knows nothing of graphs or passes and can be used alone.
"""

from __future__ import annotations

from . import ops as ops
