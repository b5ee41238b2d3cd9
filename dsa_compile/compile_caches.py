"""What makes compiled artefacts of the passes findable again: their identity, and their report.

PyTorch keeps compiled graphs under keys that hold ``uuid()`` of every custom pass. A graph that
comes out of such a cache was compiled without a run of the passes here, so that its report is kept
beside it: as a file below Inductor's cache folder, and among the artefacts of
``torch.compiler.save_cache_artifacts``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

import dsa_compile
from dsa_compile import kernels, passes
from dsa_compile.adapters import adapters_text
from dsa_compile.config import Config
from dsa_compile.passes.graph_tools import SELECTIONS, op_name, where_in_model
from dsa_compile.report import Report
from dsa_compile.target import Target

# An artefact of this kind is a JSON value and a path below the cache folder, which is just what a
# report is. A kind of our own would make a whole bundle unreadable in a process that loads it
# before it imports this package.
_ARTIFACT = "autotune"
_FOLDER = "dsa_compile"


@cache
def source_digest() -> str:
    """Digest of the sources of API, passes and kernels: an edit of any gives another one."""
    digest = hashlib.sha256()
    for package in (dsa_compile, passes, kernels):
        for folder in package.__path__:
            for file in sorted(Path(folder).glob("*.py")):
                digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def pass_uuid(config: Config) -> str:
    """Stable identity of the passes under a configuration.

    Holds the sources, the configuration, the versions of the packages that bring kernels, the
    device, on which the choice of kernels depends, and the registered adapters.
    """
    target = Target.detect()
    parts = (
        source_digest(),
        sorted((k, repr(v)) for k, v in dataclasses.asdict(config).items()),
        sorted(target.packages.items()),
        target.name,
        target.device,
        os.environ.get("TRITON_INTERPRET", ""),
        adapters_text(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def graph_key(graph_module: fx.GraphModule, example_inputs: Sequence[Any], uuid: str) -> str:
    """Name of the report on a graph of Dynamo under passes with this identity.

    Holds everything that the passes see of the graph, and the lines of the model that a report
    shows. Names of nodes do not matter.
    """
    number: dict[fx.Node, int] = {}
    digest = hashlib.sha256(uuid.encode())
    state = (
        torch.is_grad_enabled(),
        [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        [str(torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        torch.get_default_dtype(),
    )
    digest.update(repr(state).encode())
    for value in example_inputs:
        digest.update(repr(_described(value)).encode())
    for node in graph_module.graph.nodes:
        number[node] = len(number)
        row = [node.op, "" if node.op == "placeholder" else _target(graph_module, node)]
        numbered = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        row.append("" if node.op == "placeholder" else repr(numbered))
        if op_name(node) in SELECTIONS or str(node.target) in SELECTIONS:
            row.append(where_in_model(node))
        digest.update(repr(row).encode())
    return digest.hexdigest()


def _target(graph_module: fx.GraphModule, node: fx.Node) -> str:
    target = node.target
    if node.op == "get_attr":
        held: Any = graph_module
        for part in str(target).split("."):
            held = getattr(held, part)
        if isinstance(held, torch.Tensor) and held.device.type == "cpu" and held.numel() < 1 << 16:
            return repr((_described(held), held.tolist()))
        return repr(_described(held))
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", "")
    return f"{getattr(target, '__module__', '')}.{name or target}"


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [str(s) for s in value.shape]
        strides = [str(s) for s in value.stride()]
        return (str(value.dtype), str(value.device), sizes, strides, value.requires_grad)
    return (type(value).__name__, str(value))


def enabled() -> bool:
    """Whether PyTorch keeps compiled graphs at all."""
    from torch._inductor import config

    return bool(config.fx_graph_cache and not config.force_disable_caches)


def keeps_failures() -> bool:
    """Whether a cache keeps the graph that a failed pass left.

    PyTorch's bundled caches ask for ``uuid()`` before the passes run, and never again.
    """
    from torch._functorch._aot_autograd.autograd_cache import should_bundle_autograd_cache

    return enabled() and should_bundle_autograd_cache()


def store(key: str, report: Report) -> None:
    """Keep a report for the next process that finds its graph in a cache."""
    from torch._inductor.codecache import write_atomic

    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(str(path), report.to_json(indent=None))
    _record(key, report)


def restore(key: str) -> Report | None:
    """The report kept under ``key``; None where there is none, or none that can be read."""
    try:
        report = Report.from_json(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    _record(key, report)
    return report


def _path(key: str) -> Path:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir()) / _relative(key)


def _relative(key: str) -> str:
    return f"{_FOLDER}/{key[:2]}/{key}.json"


def _record(key: str, report: Report) -> None:
    from torch._inductor.runtime import autotune_cache  # noqa: F401 - makes the kind known
    from torch.compiler._cache import CacheArtifactManager

    data = json.loads(report.to_json(indent=None))
    CacheArtifactManager.record_artifact(_ARTIFACT, _relative(key), data)
