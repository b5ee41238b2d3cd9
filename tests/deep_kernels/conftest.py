"""A strict stand-in per test, bound in each of the ways that a package can be bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from dsa_compile.kernels import deep_dense, deep_package, deep_select
from dsa_compile.kernels.deep_binding import Package
from dsa_compile.kernels.deep_package import DeepGemm, bind_gemm

from .strict_deep_gemm import StrictDeepGemm, operators

_NAMES = itertools.count()

Binder = Callable[[StrictDeepGemm], DeepGemm]


@pytest.fixture(params=["python", "pybind", "operators"])
def binder(request: pytest.FixtureRequest) -> Iterator[Binder]:
    """Binds a process in one style; operators live as long as the test."""
    libraries: list[torch.library.Library] = []

    def bind(process: StrictDeepGemm) -> DeepGemm:
        if request.param == "operators":
            namespace, library = operators(process, f"strict_deep_gemm_{next(_NAMES)}")
            libraries.append(library)
            return bind_gemm(Package("deep_gemm", process.release, (namespace,)))
        module = process.module(request.param)
        return bind_gemm(Package("deep_gemm", process.release, (module,)))

    yield bind
    for library in libraries:
        library._destroy()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> StrictDeepGemm:
    """A process of the newest release whose stream and capture state our code sees."""
    strict = StrictDeepGemm()
    follow(strict, monkeypatch)
    return strict


def follow(strict: StrictDeepGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has our code see the streams and captures of a stand-in in place of CUDA's."""
    monkeypatch.setattr(deep_package, "current_stream", lambda device: strict.stream)
    monkeypatch.setattr(deep_package, "capturing", lambda: strict.capturing)


@pytest.fixture
def gemm(process: StrictDeepGemm) -> DeepGemm:
    """The process bound by its Python functions."""
    return bind_gemm(Package("deep_gemm", process.release, (process.module(),)))


@pytest.fixture
def installed(process: StrictDeepGemm, gemm: DeepGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages, as if they were installed on an SM100 machine."""
    from .test_select import StrictDeepSelect, bind

    select = bind(StrictDeepSelect())
    monkeypatch.setattr(deep_package, "find", lambda: gemm)
    monkeypatch.setattr(deep_select, "find", lambda: select)
    monkeypatch.setattr(deep_dense, "_capability", lambda device: process.capability)
