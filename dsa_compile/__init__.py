"""Finds, proves and rewrites DeepSeek Sparse Attention indexers in PyTorch models.

``optimize`` gives a module that runs the rewritten model, ``explain`` only says what would be
done, ``verify`` compares the two. Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_compile.config import Config
    from dsa_compile.errors import (
        CaptureError,
        ConfigError,
        DsaError,
        GradientError,
        InputError,
        NoMatchError,
        NoMatchWarning,
        PassError,
        ProviderError,
        SlowPathWarning,
        TrainingModeError,
    )
    from dsa_compile.explainer import explain
    from dsa_compile.optimized_module import OptimizedModule
    from dsa_compile.optimizer import optimize
    from dsa_compile.passes.sites import Site
    from dsa_compile.report import Report
    from dsa_compile.target import Target
    from dsa_compile.verifier import Verification, verify

_HOME = {
    "Config": "config",
    "CaptureError": "errors",
    "ConfigError": "errors",
    "DsaError": "errors",
    "GradientError": "errors",
    "InputError": "errors",
    "NoMatchError": "errors",
    "NoMatchWarning": "errors",
    "OptimizedModule": "optimized_module",
    "PassError": "errors",
    "ProviderError": "errors",
    "Report": "report",
    "Site": "passes.sites",
    "SlowPathWarning": "errors",
    "Target": "target",
    "TrainingModeError": "errors",
    "Verification": "verifier",
    "explain": "explainer",
    "optimize": "optimizer",
    "verify": "verifier",
}

__all__ = [
    "CaptureError",
    "Config",
    "ConfigError",
    "DsaError",
    "GradientError",
    "InputError",
    "NoMatchError",
    "NoMatchWarning",
    "OptimizedModule",
    "PassError",
    "ProviderError",
    "Report",
    "Site",
    "SlowPathWarning",
    "Target",
    "TrainingModeError",
    "Verification",
    "explain",
    "optimize",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
