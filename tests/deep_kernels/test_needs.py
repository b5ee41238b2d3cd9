"""What is asked ahead of any call: of the device, the package and the call, all in one list."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from dsa_compile.kernels import deep_binding, deep_gemm, deep_select
from dsa_compile.kernels.deep_binding import Package, compiler_needs, numbers, open_package
from dsa_compile.kernels.deep_needs import Need, topk_needs
from dsa_compile.kernels.deep_package import DeepGemm, bind_gemm, limits_of, provider_needs
from dsa_compile.kernels.deep_requests import (
    FP8,
    CacheRequest,
    GemmLimits,
    ScoreRequest,
    TopkRequest,
)

from .strict_deep_gemm import StrictDeepGemm

NONE: tuple[Need, ...] = ()


def request_for(**changes: object) -> ScoreRequest:
    fields: dict[str, object] = {
        "capability": (10, 0),
        "q_dtype": FP8,
        "k_dtype": FP8,
        "heads": 32,
        "head_dim": 128,
        "sparse_block": 8,
        "blocks": 2048,
    }
    return ScoreRequest(**{**fields, **changes})  # type: ignore[arg-type]


def bound(release: str = "2.8.2", capability: tuple[int, int] = (10, 0)) -> DeepGemm:
    module = StrictDeepGemm(release, capability).module()
    return bind_gemm(Package("deep_gemm", release, (module,)))


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_a_call_that_can_be_made_needs_nothing(capability: tuple[int, int]) -> None:
    request = request_for(capability=capability)
    assert deep_gemm.needs(request, bound(), unaligned=True, compiler=NONE) == ()
    cache = CacheRequest(128, 128 * 132)
    assert deep_gemm.needs(request, bound(), cache=cache, compiler=NONE) == ()
    dense = request_for(capability=(9, 0), sparse_block=None, heads=64, key_scale=torch.float32)
    assert deep_gemm.needs(dense, bound("2.5", (9, 0)), compiler=NONE) == ()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"capability": None}, "not for the CPU"),
        ({"capability": (9, 0)}, "not for sm90"),
        ({"capability": (12, 0)}, "not for sm120"),
        ({"q_dtype": torch.bfloat16}, "queries are bfloat16"),
        ({"heads": 64}, "64 heads"),
        ({"heads": 0}, "0 heads"),
        ({"head_dim": 64}, "head dim 64"),
        ({"sparse_block": 32}, "sparse blocks of 32"),
        ({"blocks": 5000}, "5000 sparse blocks"),
        ({"ordered": False}, "no order or not unique"),
        ({"key_scale": torch.float16}, "key scales are float16"),
    ],
)
def test_each_limit_is_a_need_with_its_mend(changes: dict[str, object], fault: str) -> None:
    (need,) = deep_gemm.needs(request_for(**changes), bound(), compiler=NONE)
    assert fault in need.what and need.mend


def test_needs_of_everything_come_together() -> None:
    missing = Need("package deep_gemm cannot be imported", "install it")
    request = request_for(capability=(9, 0), heads=64, blocks=None)
    found = deep_gemm.needs(request, missing, compiler=(Need("no nvcc", "install it"),))
    assert [need.what.split(";")[0] for need in found] == [
        "no nvcc",
        "package deep_gemm cannot be imported",
        "DeepGEMM has sparse scores for sm100 and sm103, not for sm90",
        "64 heads",
    ]


def test_pages_of_each_release() -> None:
    request, cache = request_for(), CacheRequest(64, 64 * 132 + 128)
    assert deep_gemm.needs(request, bound(), cache=CacheRequest(64, 8448), compiler=NONE) == ()
    (need,) = deep_gemm.needs(request, bound("2.8.0"), cache=cache, compiler=NONE)
    assert "8576 bytes" in need.what and "8704 bytes apart" in need.mend


def test_an_older_release_without_sparse_scores() -> None:
    found = deep_gemm.needs(request_for(), bound("2.5"), compiler=NONE)
    names = ("get_sparse_mqa_logits_metadata", "fp8_fp4_sparse_mqa_logits")
    assert [name in need.what for need, name in zip(found, names, strict=True)] == [True, True]


def test_a_release_without_unaligned_rows() -> None:
    package = ModuleType("deep_gemm")

    def get_sparse_mqa_logits_metadata(  # noqa: PLR0913
        ks: object,
        ke: object,
        num_kv_tokens: int,
        sparse_indices: object,
        qk_dtype: object,
        sparse_block_kv: int,
    ) -> None: ...

    def fp8_fp4_sparse_mqa_logits(
        q: object,
        kv: object,
        weights: object,
        metadata: object,
        num_max_sparse_blocks: int,
        sparse_block_kv: int,
    ) -> None: ...

    package.get_sparse_mqa_logits_metadata = get_sparse_mqa_logits_metadata  # type: ignore
    package.fp8_fp4_sparse_mqa_logits = fp8_fp4_sparse_mqa_logits  # type: ignore
    gemm = bind_gemm(Package("deep_gemm", "2.8.2", (package,)))
    assert deep_gemm.needs(request_for(), gemm, compiler=NONE) == ()
    (need,) = deep_gemm.needs(request_for(), gemm, unaligned=True, compiler=NONE)
    assert "multiple of 8 positions" in need.what


@pytest.mark.parametrize(
    ("doc", "fault"),
    [
        (
            "f(q, kv, weights, metadata, num_max_sparse_blocks, sparse_block_kv, twist) -> x",
            "twist",
        ),
        ("f(q, kv, weights, metadata, sparse_block_kv) -> x", "num_max_sparse_blocks"),
        (
            "f(q, kv, weights, metadata, num_max_sparse_blocks, sparse_block_kv, page_kv) -> x",
            "page",
        ),
        ("", "does not say what it takes"),
    ],
)
def test_an_unknown_signature_is_a_need(doc: str, fault: str) -> None:
    class Strange:
        __doc__ = doc

        def __call__(self, *args: object, **kwargs: object) -> None: ...

    module = StrictDeepGemm().module()
    module.fp8_fp4_sparse_mqa_logits = Strange()  # type: ignore[attr-defined]
    gemm = bind_gemm(Package("deep_gemm", "2.8.2", (module,)))
    (need,) = deep_gemm.needs(request_for(), gemm, compiler=NONE)
    assert "fp8_fp4_sparse_mqa_logits" in need.what and fault in need.what
    assert "triton" in need.mend


def test_defaults_in_annotations_are_not_defaults() -> None:
    class Documented:
        """f(a: tuple[int, str], b: Annotated[x, 'k=v'], c: int = (1, 2), d: str = 'x,y') -> None"""

        def __call__(self, *args: object, **kwargs: object) -> None: ...

    read = deep_binding.read_signature(Documented())
    assert read == [("a", True), ("b", True), ("c", False), ("d", False)]


def test_limits_of_releases() -> None:
    assert limits_of("2.8.2.post20261020") == limits_of("2.9.0") == GemmLimits()
    assert limits_of("2.8.0") == limits_of("0.2.5") == limits_of("unknown")
    assert limits_of("2.8.0") == GemmLimits(any_heads=False, page_alignment=512)
    assert numbers("2.8.2.post1") == (2, 8, 2)


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (TopkRequest((9, 0), torch.float32, 512), "sm90"),
        (TopkRequest((10, 0), torch.float64, 512), "float64"),
        (TopkRequest((10, 0), torch.float32, 4097), "4097"),
        (TopkRequest((10, 0), torch.float32, 1, 2**23), "8388608"),
    ],
)
def test_limits_of_top_k(request_: TopkRequest, fault: str) -> None:
    (need,) = topk_needs(request_)
    assert fault in need.what
    assert topk_needs(TopkRequest((10, 3), torch.bfloat16, 4096, 2**23 - 1)) == ()


def test_packages_that_are_not_there() -> None:
    for name in ("deep_gemm_that_is_not_there", "deep_select_that_is_not_there"):
        found = open_package(name)
        assert isinstance(found, Need) and name in found.what and "install" in found.mend


def test_what_a_machine_lacks() -> None:
    both = {"deep_gemm": "2.8.2", "deep_select": "1.0.0"}
    assert provider_needs((10, 0), both, NONE) == provider_needs((10, 3), both, NONE) == ()
    found = provider_needs((9, 0), {}, NONE)
    faults = ("not on sm90", "deep_gemm is not installed", "deep_select is not installed")
    assert all(fault in need.what for fault, need in zip(faults, found, strict=True))
    assert "not on the CPU" in provider_needs(None, both, NONE)[0].what


def test_a_call_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_select", None)
    monkeypatch.setattr(deep_select, "find", deep_select.find.__wrapped__)
    with pytest.raises(ImportError, match="install a build of deep_select"):
        deep_select.topk(torch.zeros(1, 1, 4), torch.zeros(1, 1), topk=2)


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_binding.shutil, "which", lambda name: "/usr/bin/nvcc")
    assert compiler_needs() == ()
    monkeypatch.setattr(deep_binding.shutil, "which", lambda name: None)
    monkeypatch.setattr(deep_binding.importlib.util, "find_spec", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (need,) = compiler_needs()
    assert "nvcc" in need.what


def test_importing_needs_no_package_and_calls_nothing() -> None:
    code = (
        "import sys; sys.modules['deep_gemm'] = sys.modules['deep_select'] = None; "
        "sys.modules['triton'] = None; "
        "from dsa_compile.kernels import deep_gemm, deep_select, deep_paged, deep_dense"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
