"""Finds, proves and rewrites DeepSeek Sparse Attention indexers in PyTorch models.

``optimize`` gives a module that runs the rewritten model, ``explain`` only says what would be
done, ``verify`` compares the two; ``export``, ``package`` and ``load`` do it ahead of time. Names
are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_compile.adapters import register_adapter, registered_adapters, remove_adapter
    from dsa_compile.breakable import BreakableCUDAGraph
    from dsa_compile.compiled_reports import compiled_report
    from dsa_compile.config import Config
    from dsa_compile.errors import (
        CaptureError,
        ConfigError,
        DsaError,
        GradientError,
        InputError,
        NoMatchError,
        NoMatchWarning,
        PackageError,
        PassError,
        ProviderError,
        SlowPathWarning,
        TrainingModeError,
    )
    from dsa_compile.explainer import explain
    from dsa_compile.exporter import export
    from dsa_compile.inductor_hooks import inductor_passes
    from dsa_compile.loader import LoadedPackage, load
    from dsa_compile.optimized_module import OptimizedModule
    from dsa_compile.optimizer import optimize
    from dsa_compile.package_metadata import report_of
    from dsa_compile.packager import package
    from dsa_compile.passes.sites import Site
    from dsa_compile.report import Report
    from dsa_compile.target import Target
    from dsa_compile.verifier import Verification, verify

_HOME = {
    "BreakableCUDAGraph": "breakable",
    "Config": "config",
    "CaptureError": "errors",
    "ConfigError": "errors",
    "DsaError": "errors",
    "GradientError": "errors",
    "InputError": "errors",
    "LoadedPackage": "loader",
    "NoMatchError": "errors",
    "NoMatchWarning": "errors",
    "OptimizedModule": "optimized_module",
    "PackageError": "errors",
    "PassError": "errors",
    "ProviderError": "errors",
    "Report": "report",
    "Site": "passes.sites",
    "SlowPathWarning": "errors",
    "Target": "target",
    "TrainingModeError": "errors",
    "Verification": "verifier",
    "compiled_report": "compiled_reports",
    "explain": "explainer",
    "inductor_passes": "inductor_hooks",
    "export": "exporter",
    "load": "loader",
    "optimize": "optimizer",
    "package": "packager",
    "register_adapter": "adapters",
    "registered_adapters": "adapters",
    "remove_adapter": "adapters",
    "report_of": "package_metadata",
    "verify": "verifier",
}

__all__ = [
    "BreakableCUDAGraph",
    "CaptureError",
    "Config",
    "ConfigError",
    "DsaError",
    "GradientError",
    "InputError",
    "LoadedPackage",
    "NoMatchError",
    "NoMatchWarning",
    "OptimizedModule",
    "PackageError",
    "PassError",
    "ProviderError",
    "Report",
    "Site",
    "SlowPathWarning",
    "Target",
    "TrainingModeError",
    "Verification",
    "compiled_report",
    "explain",
    "inductor_passes",
    "export",
    "load",
    "optimize",
    "package",
    "register_adapter",
    "registered_adapters",
    "remove_adapter",
    "report_of",
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
