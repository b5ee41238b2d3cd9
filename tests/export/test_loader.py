"""Calls of a loaded package, and metadata that cannot be believed. Nothing is compiled here."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import dsa_compile
from dsa_compile.loader import LoadedPackage
from dsa_compile.package_metadata import PackageMetadata

ROWS = {"name": "x", "dtype": "float32", "shape": [1, "s1", 4], "stride": ["4*s1", 4, 1]}
METADATA = PackageMetadata(
    version="1.0",
    torch="2.13.0",
    target="cpu",
    features=("avx2",),
    ops=("a::b", "c::d.e"),
    libraries=("dsa_compile.kernels",),
    arguments=("x", "state", "gain"),
    inputs=(
        ROWS,
        {"name": "state_k", "dtype": "float32", "shape": [3]},
        {"name": "state_v", "dtype": "float32", "shape": [3]},
    ),
    conditions=("L['x'].size()[1] < 9", "L['gain'] == 0.5"),
)


def packaged() -> LoadedPackage:
    """A package of ``forward(x, *, state, gain)`` that gives what it was called with."""
    example = ((0,), {"state": {"k": 0, "v": 0}, "gain": 0})
    spec = pytree.treespec_dumps(pytree.tree_flatten(example)[1])

    def model(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    model.loader = types.SimpleNamespace(get_call_spec=lambda: [spec, spec])  # type: ignore[attr-defined]
    return LoadedPackage(model, METADATA)


X, K, V = torch.zeros(1, 5, 4), torch.ones(3), torch.full((3,), 2.0)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {"state": {"k": K, "v": V}, "gain": 0.5}),
        ((X,), {"gain": 0.5, "state": {"v": V, "k": K}}),
        ((), {"gain": 0.5, "x": X, "state": {"v": V, "k": K}}),
        ((X, {"v": V, "k": K}, 0.5), {}),
    ],
)
def test_every_spelling_of_a_call_is_the_one_that_was_packaged(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    (x,), named = packaged()(*args, **kwargs)
    assert x is X and [*named] == ["state", "gain"]
    assert [*named["state"].items()] == [("k", K), ("v", V)]


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((X,), {}, "3 tensors in the arguments x, state, gain, got 1 in 1"),
        ((X, K, V, 0.5), {}, "got 3 in 4"),
        ((X,), {"state": {"k": K, "v": V}, "gian": 0.5}, "by name state, gian"),
        ((X,), {"state": {"k": K, "w": V}, "gain": 0.5}, "nested otherwise than packaged"),
        ((X,), {"state": [K, V], "gain": 0.5}, "nested otherwise than packaged"),
        ((X,), {"state": {"k": K, "v": 3}, "gain": 0.5}, "got 2"),
        ((X,), {"state": {"k": K, "v": V}, "gain": 0.7}, "only values where gain == 0.5"),
        (
            (X.to_sparse(),),
            {"state": {"k": K, "v": V}, "gain": 0.5},
            "x: .* plain tensors",
        ),
        ((X.to("meta"),), {"state": {"k": K, "v": V}, "gain": 0.5}, "on meta"),
        ((X[:, :0],), {"state": {"k": K, "v": V}, "gain": 0.5}, r"got \(1, 0, 4\)"),
        ((torch.zeros(1, 9, 4),), {"state": {"k": K, "v": V}, "gain": 0.5}, "only sizes where x.s"),
    ],
)
def test_a_call_that_is_not_served(
    args: tuple[Any, ...], kwargs: dict[str, Any], told: str
) -> None:
    with pytest.raises(dsa_compile.InputError, match=told):
        packaged()(*args, **kwargs)


@pytest.mark.parametrize(
    ("x", "strides"),
    [
        (torch.zeros(1, 4, 5).mT, r"\(20, 4, 1\), got \(20, 1, 5\)"),
        (torch.zeros(1, 6, 8)[:, :, ::2], r"\(24, 4, 1\), got \(48, 8, 2\)"),
        (torch.zeros(1, 1, 4).expand(1, 5, 4), r"\(20, 4, 1\), got \(4, 0, 1\)"),
    ],
)
def test_memory_that_is_laid_out_otherwise(x: Tensor, strides: str) -> None:
    """The compiled code would read other numbers."""
    run, named = packaged(), {"state": {"k": K, "v": V}, "gain": 0.5}
    with pytest.raises(dsa_compile.InputError, match=f"x: packaged with strides {strides}"):
        run(x, **named)
    run(x.contiguous(), **named)
    # Sizes of 1 have no stride to speak of.
    run(torch.zeros(4, 1, 1).permute(2, 1, 0), **named)


@pytest.mark.parametrize(
    "changes",
    [
        {"torch": 5},
        {"version": None},
        {"target": None},
        {"machine": 3},
        {"features": [3]},
        {"arguments": 3},
        {"inputs": "abc"},
        {"inputs": [{"name": "x", "dtype": "float32"}]},
        {"inputs": [{**ROWS, "shape": [None]}]},
        {"ops": [3]},
        {"ops": ["::"]},
        {"libraries": [""]},
        {"libraries": [".kernels"]},
        {"libraries": ["antigravity"]},
        {"conditions": ["1 +"]},
        {"conditions": [3]},
        {"provenance": []},
        {"provenance": "x"},
        {"provenance": {"format": 1, "version": None}},
    ],
)
def test_metadata_of_another_kind_is_an_error(changes: dict[str, Any]) -> None:
    assert PackageMetadata.from_json(METADATA.to_json()) == METADATA
    text = json.dumps({**METADATA.to_dict(), **changes})
    with pytest.raises(dsa_compile.PackageError, match="is damaged: .*again"):
        PackageMetadata.from_json(text)


@pytest.mark.parametrize("text", [b"", b"{,", b"[1]", b"null", b"\xff\xfe\x80"])
def test_metadata_that_is_no_metadata(text: bytes) -> None:
    with pytest.raises(dsa_compile.PackageError, match="metadata is damaged: .*again"):
        PackageMetadata.from_json(text)
