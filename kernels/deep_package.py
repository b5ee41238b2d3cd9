"""The functions of an installed DeepGEMM, bound once, and the state that its kernels keep."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import torch

from .deep_binding import Bound, Package, Spec, bind, compiler_needs, numbers, open_package
from .deep_needs import (
    SELECT_CAPABILITIES,
    Need,
    Needs,
    dense_needs,
    paged_needs,
    sparse_needs,
)
from .deep_requests import CacheRequest, GemmLimits, ScoreRequest

SPARSE_METADATA = Spec(
    ("get_sparse_mqa_logits_metadata",),
    ("ks", "ke", "num_kv_tokens", "sparse_indices", "qk_dtype", "sparse_block_kv"),
)
SPARSE_LOGITS = Spec(
    ("fp8_fp4_sparse_mqa_logits",),
    ("q", "kv", "weights", "metadata", "num_max_sparse_blocks", "sparse_block_kv"),
)
PAGED_METADATA = Spec(
    ("get_paged_sparse_mqa_logits_metadata",),
    (
        "context_lens",
        "block_table",
        "indices",
        "page_kv",
        "sparse_indices",
        "qk_dtype",
        "sparse_block_kv",
    ),
)
PAGED_LOGITS = Spec(
    ("fp8_fp4_paged_sparse_mqa_logits",),
    ("q", "kv_cache", "weights", "metadata", "num_max_sparse_blocks", "sparse_block_kv"),
)
DENSE_LOGITS = Spec(
    ("fp8_fp4_mqa_logits", "fp8_mqa_logits"),
    ("q", "kv", "weights", "ks", "ke"),
    options=("max_seqlen_k",),
    plain_q=("fp8_mqa_logits",),
)


@dataclass(frozen=True)
class DeepGemm:
    """What an installed DeepGEMM offers; a function that is missing or unknown is a need.

    Attributes:
        version: as the package says it; rebuilds count on their own.
        limits: what its kernels take.
        warmed: streams that have the sparse kernels' workspace, and kernels that were called.
    """

    version: str
    limits: GemmLimits
    sparse_metadata: Bound | Need
    sparse_logits: Bound | Need
    paged_metadata: Bound | Need
    paged_logits: Bound | Need
    dense_logits: Bound | Need
    warmed: set[Hashable] = field(default_factory=set, compare=False, repr=False)

    @property
    def compact_dense(self) -> bool:
        """Whether column j of a dense row is position ``ks + j`` (2.8.2) and not j (before)."""
        roles = self.dense_logits.roles if isinstance(self.dense_logits, Bound) else frozenset()
        return "max_seqlen_k" in roles and "clean_logits" not in roles

    @property
    def unaligned(self) -> bool:
        """Whether rows may begin at positions that are no multiple of the sparse block."""
        bounds = (self.sparse_metadata, self.sparse_logits)
        return all(isinstance(b, Bound) and "use_unaligned_ks" in b.roles for b in bounds)


def limits_of(version: str) -> GemmLimits:
    """Limits of a release: those of 2.8.2 from there on, else the narrowest that were published.

    Rebuilds with version numbers of their own (``0.2.5``) count as old, which is always legal.
    """
    if numbers(version) >= (2, 8, 2):
        return GemmLimits()
    return GemmLimits(any_heads=False, page_alignment=512)


def bind_gemm(package: Package) -> DeepGemm:
    """Binds the functions of an opened package; nothing of it runs."""

    def one(spec: Spec) -> Bound | Need:
        return bind("DeepGEMM", spec, package.sources)

    return DeepGemm(
        package.version,
        limits_of(package.version),
        sparse_metadata=one(SPARSE_METADATA),
        sparse_logits=one(SPARSE_LOGITS),
        paged_metadata=one(PAGED_METADATA),
        paged_logits=one(PAGED_LOGITS),
        dense_logits=one(DENSE_LOGITS),
    )


@cache
def find(module: ModuleType | None = None) -> DeepGemm | Need:
    """The installed DeepGEMM, imported and bound once, or why there is none.

    Args:
        module: the package, where it goes by another name than ``deep_gemm``.
    """
    package = open_package("deep_gemm", module, operator=DENSE_LOGITS.names[0])
    return package if isinstance(package, Need) else bind_gemm(package)


def require(package: DeepGemm | None) -> DeepGemm:
    """``package``, or the installed one.

    Raises:
        ImportError: there is none; the message has the mend.
    """
    found = find() if package is None else package
    if isinstance(found, Need):
        raise ImportError(f"{found.what}; {found.mend}")
    return found


def bound(function: Bound | Need) -> Bound:
    """The function itself.

    Raises:
        NotImplementedError: it could not be bound; the message has the mend.
    """
    if isinstance(function, Need):
        raise NotImplementedError(f"{function.what}; {function.mend}")
    return function


def needs(
    request: ScoreRequest,
    package: DeepGemm | Need | None = None,
    *,
    cache: CacheRequest | None = None,
    unaligned: bool = False,
    compiler: Needs | None = None,
) -> Needs:
    """Every unmet need of a call of DeepGEMM, each with its mend; empty when it can be made.

    Args:
        request: the call; without ``sparse_block`` it is the dense form.
        package: the bound package; the installed one when None.
        cache: the key cache of a paged call.
        unaligned: rows may begin at no multiple of the sparse block.
        compiler: what the run-time compiler lacks; looked for when None.
    """
    found = find() if package is None else package
    unmet = list(compiler_needs() if compiler is None else compiler)
    limits = GemmLimits()
    functions: tuple[Bound | Need, ...] = ()
    if isinstance(found, Need):
        unmet.append(found)
    else:
        limits = found.limits
        if request.sparse_block is None:
            functions = (found.dense_logits,)
        elif cache is None:
            functions = (found.sparse_metadata, found.sparse_logits)
        else:
            functions = (found.paged_metadata, found.paged_logits)
        unmet += [function for function in functions if isinstance(function, Need)]
        bindings = not any(isinstance(function, Need) for function in functions)
        if unaligned and bindings and cache is None and not found.unaligned:
            unmet.append(
                Need(
                    f"DeepGEMM {found.version} takes only rows that begin at a multiple of "
                    f"{request.sparse_block} positions",
                    "install 2.8.2 or newer, or pack sequences at such multiples",
                )
            )
    if request.sparse_block is None:
        compact = isinstance(found, Need) or found.compact_dense
        return (*unmet, *dense_needs(request, compact))
    if cache is None:
        return (*unmet, *sparse_needs(request, limits))
    return (*unmet, *paged_needs(request, cache, limits))


def provider_needs(
    capability: tuple[int, int] | None, packages: Mapping[str, str], compiler: Needs | None = None
) -> Needs:
    """What a machine lacks for the SM100 provider, whatever the model; nothing is imported.

    Args:
        capability: CUDA compute capability; None is the CPU.
        packages: version of each installed package by the name that it is imported by.
        compiler: what the run-time compiler lacks; looked for when None.
    """
    unmet = []
    if capability not in SELECT_CAPABILITIES:
        have = "the CPU" if capability is None else "sm{}{}".format(*capability)
        unmet.append(
            Need(
                f"DeepGEMM's sparse scores and DeepSelect run on sm100 and sm103, not on {have}",
                "use provider='triton' on other GPUs, 'cpu' on the CPU",
            )
        )
    builds = {"deep_gemm": "tokenspeed-deepgemm 2.8.2", "deep_select": "tokenspeed-deepselect 1.0"}
    for name, build in builds.items():
        if name not in packages:
            unmet.append(
                Need(
                    f"package {name} is not installed",
                    f"install a build of it for this PyTorch, such as {build} from PyPI",
                )
            )
    return (*unmet, *(compiler_needs() if compiler is None else compiler))


def current_stream(device: torch.device) -> Hashable:
    """The stream that kernels go to now; the device itself where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else device


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def check_compiled(package: DeepGemm, kernel: Hashable) -> None:
    """Refuses the first call of a kernel inside a capture, and notes the kernel otherwise.

    Args:
        kernel: what the kernel is compiled for.

    Raises:
        RuntimeError: the current stream is capturing, and the call would compile.
    """
    if kernel in package.warmed:
        return
    if capturing():
        raise RuntimeError(
            f"DeepGEMM compiles a kernel in its first call ({kernel}), which must come before a "
            "CUDA-graph capture: make the call once ahead of it"
        )
    package.warmed.add(kernel)


def check_warm(package: DeepGemm, device: torch.device, kernel: Hashable) -> None:
    """Refuses what a first sparse call does inside a capture, and notes that it was done otherwise.

    The first call on a stream makes and zeroes the metadata kernel's workspace (captured, the
    zeroing would be replayed); the first call of a kernel compiles it.

    Raises:
        RuntimeError: the current stream is capturing and has no workspace, or the call would
            compile.
    """
    stream = ("stream", current_stream(device))
    if stream not in package.warmed and capturing():
        raise RuntimeError(
            "DeepGEMM makes its workspace in the first sparse call on a stream, which must come "
            "before a CUDA-graph capture: call kernels.deep_gemm.warm_up(device) on that stream"
        )
    package.warmed.add(stream)
    check_compiled(package, kernel)
