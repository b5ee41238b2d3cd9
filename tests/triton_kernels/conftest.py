"""Runs the kernels on the GPU where there is one, and in Triton's interpreter where there is not.

Triton reads ``TRITON_INTERPRET`` when a kernel is defined, so it is set before any is imported.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def _teach_interpreter() -> None:
    """Lets interpreted loops run to tensors: NumPy 2.4 has no int() of 1-element arrays."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


try:
    import triton  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]
    _MISSING = True
else:
    _MISSING = False
    if not ON_GPU:
        _teach_interpreter()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    where = (
        "not at all: Triton is not installed"
        if _MISSING
        else "on the GPU"
        if ON_GPU
        else ("in Triton's interpreter")
    )
    terminalreporter.write_line(f"Triton kernels were tested {where}")


@pytest.fixture(scope="session")
def device() -> str:
    """Where test tensors live."""
    return "cuda" if ON_GPU else "cpu"
