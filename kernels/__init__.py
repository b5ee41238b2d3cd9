"""Canonical ops of the lightning indexer and their CPU implementation.

Importing registers ``torch.ops.dsa.*`` (the plain PyTorch reference, on every device) and
``torch.ops.dsa_cpu.*`` (the same ops, fast, on the CPU); nothing runs. The package knows nothing of
graphs or passes and can be used alone.
"""

from __future__ import annotations

from . import cpu as cpu
from . import cpu_serving as cpu_serving
from . import ops as ops
