"""What the Triton kernels share: launches, tile sizes, sorting, and how scores rank.

Scores are ranked as signed 32-bit keys whose order is that of the scores: NaN above everything, the
two zeros equal. Nothing up to the key of -inf can be selected.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .validate import Size


def interpreted() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return bool(triton.knobs.runtime.interpret)


def wrap_triton(kernel: Any) -> Any:
    """The kernel, in a form that a tracer sees when one is at work.

    Outside of tracing the kernel is launched directly: the traceable form costs about a
    millisecond a launch. The name is the one by which PyTorch finds an op's kernels in its source.
    """
    if interpreted() or _get_current_dispatch_mode() is None:
        return kernel
    return torch.library.wrap_triton(kernel)


def cap_registers(count: int) -> dict[str, int]:
    """Launch option that caps the registers of a thread; none where a tracer, which knows no such
    option, is at work."""
    traced = _get_current_dispatch_mode() is not None
    return {} if interpreted() or traced else {"maxnreg": count}


def power_of_two(size: int, low: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``low``."""
    return max(low, 1 << max(0, size - 1).bit_length())


def bound(size: Size, limit: int) -> int:
    """The largest value that ``size`` can take, at most ``limit``; adds no guard to a graph."""
    if isinstance(size, int):
        return min(size, limit)
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return min(int(upper), limit) if upper.is_finite and upper.is_Integer else limit


def known_at_most(size: Size, limit: int) -> bool:
    """Whether ``size`` is known to be at most ``limit``; adds no guard to a graph."""
    return bound(size, limit + 1) <= limit


@lru_cache
def shared_memory(index: int | None) -> int:
    """Bytes of shared memory that one program may use on a CUDA device; 96 KiB if there is none."""
    if not torch.cuda.is_available():
        return 96 * 1024
    # CPU builds of PyTorch know no such attribute, and their type stubs neither.
    properties: Any = torch.cuda.get_device_properties(index or 0)
    return int(properties.shared_memory_per_block_optin)


@lru_cache
def processors(index: int | None) -> int:
    """Streaming multiprocessors of a CUDA device; 132 (an H100 or H200) if there is none."""
    if not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(index or 0).multi_processor_count)


def check_device(op: str, tensor: Tensor) -> None:
    """Raises unless Triton kernels can run on the tensor's device.

    Raises:
        ValueError: the tensor is not on a CUDA device of compute capability 8.0 or newer, and
            kernels are not interpreted.
    """
    if interpreted():
        return
    if tensor.device.type != "cuda":
        raise ValueError(
            f"{op}: the Triton kernels run on CUDA devices, got a tensor on {tensor.device}; "
            "move the model to the GPU, or use provider='cpu'"
        )
    if torch.cuda.is_available() and capability(tensor.device.index) < (8, 0):
        raise ValueError(
            f"{op}: the Triton kernels need compute capability 8.0 or newer, "
            f"{tensor.device} has {'.'.join(map(str, capability(tensor.device.index)))}"
        )


@lru_cache
def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index or 0)


def like_hopper(index: int | None) -> bool:
    """Whether what was measured on an H200 of programs on a multiprocessor is taken over.

    GPUs of sm_89 and sm_120 have less shared memory, and their products other registers.
    """
    return not torch.cuda.is_available() or capability(index)[0] in (9, 10)


def by_row(tensor: Tensor | None, batch: Size, rows: Size, stand_in: Tensor) -> tuple[Any, ...]:
    """Pointer and row strides of an argument [B|1, S|1, ...]; ``stand_in`` where there is none.

    The stand-in is a tensor that the kernel does not write to: compilers copy what is both read and
    written.
    """
    if tensor is None:
        return stand_in, 0, 0
    wide = tensor.expand(batch, rows, *tensor.shape[2:])
    return wide, wide.stride(0), wide.stride(1)


def require(op: str, name: str, got: Tensor | None, allowed: tuple[torch.dtype, ...]) -> None:
    """Raises ``TypeError`` unless the argument has one of the dtypes that the kernel takes."""
    if got is not None and got.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(
            f"{op}: the Triton kernels take {name} as {names}, got {got.dtype}; "
            "convert it, or use provider='reference'"
        )


def at_most(op: str, what: str, size: Size, limit: int) -> None:
    """Raises ``ValueError`` for a known size over a kernel's limit; a symbolic one gets a guard."""
    if isinstance(size, int) and size > limit:
        raise ValueError(f"{op}: {what} is {size}, the Triton kernels take at most {limit}")
    if not isinstance(size, int):
        torch._check(size <= limit, lambda: f"{op}: {what} is over {limit}")


def result(out: Tensor | None, name: str, like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    """A new tensor, or the caller's ``out`` after a check that the result fits into it.

    Raises:
        ValueError: ``out`` has another shape, dtype or device, or is not contiguous.
    """
    if out is None:
        return like.new_empty(shape, dtype=dtype)
    if out.shape != torch.Size(shape) or out.dtype != dtype or out.device != like.device:
        raise ValueError(
            f"{name}: out must be {tuple(shape)} {dtype} on {like.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"{name}: out must be contiguous")
    return out


@triton.jit
def order_key(score):
    """Signed key [int32] of fp32 scores; keeps -inf apart from everything else."""
    # Adding 0.0 makes 0.0 of -0.0, in one instruction.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FC00000, key)


@triton.jit
def key_score(key):
    """The fp32 score of a key; a NaN comes back as the default NaN, -0.0 as 0.0."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def middle(low, high):
    """The integer halfway between two, rounded down; never overflows."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def single(number):
    """A kernel's argument that is a plain number, as fp32.

    Inductor hands over numbers as fp64, which would make everything that they touch fp64.
    """
    return tl.cast(number, tl.float32)


@triton.jit
def candidate(score, column):
    """A score (bits, high half) and its column (low half) as int64."""
    return (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | column.to(tl.int64)


@triton.jit
def candidate_score(stored):
    return (stored >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def candidate_column(stored):
    """Columns int32; -1 where there is no candidate."""
    return (stored & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def no_candidate(SIZE: tl.constexpr):
    """What fills unused places: a score of -inf, and no column."""
    return tl.full([SIZE], -36028792723996673, tl.int64)


@triton.jit
def pack(score, column):
    """What ranks candidates, as int64: the larger is the better, no two are equal."""
    packed = (order_key(score).to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))
    return tl.where(column < 0, -(2**63), packed)


@triton.jit
def packed_key(packed):
    return (packed >> 32).to(tl.int32)


@triton.jit
def packed_column(packed):
    return (0xFFFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)


@triton.constexpr_function
def _axis(bit, log_n, log_warps):
    """Axis of a hypercube [2] * log_n on which bit ``bit`` of the sorted order lies.

    A vector's last two axes lie within a thread, the next five across lanes, then come warps; what
    is left is within a thread again. Bit j takes part in log_n - j rounds: so the highest bits are
    given to warps, the next to lanes.
    """
    across = min(5 + log_warps, max(log_n - 2, 0))
    if bit < min(2, log_n):
        return log_n - 1 - bit
    if bit >= log_n - across:
        return log_n - 3 - (bit - (log_n - across))
    return bit - 2


@triton.constexpr_function
def _shape_of_bit(bit, log_n, log_warps):
    axis = _axis(bit, log_n, log_warps)
    return [2 if i == axis else 1 for i in range(log_n)]


@triton.jit
def _exchange(cube, flip, BIT: tl.constexpr, LOG_N: tl.constexpr, LOG_WARPS: tl.constexpr):
    axis: tl.constexpr = _axis(BIT, LOG_N, LOG_WARPS)
    right = tl.reshape(tl.arange(0, 2), _shape_of_bit(BIT, LOG_N, LOG_WARPS))
    upper = (flip ^ right) != 0
    if BIT < LOG_N - 5 - LOG_WARPS and cube.dtype == tl.int32:
        small = tl.min(cube, axis, keep_dims=True)
        large = tl.max(cube, axis, keep_dims=True)
        result = tl.where(upper, large, small)
    else:
        # Sums of pairs wrap around, and give back the partner with one exchange.
        partner = tl.sum(cube, axis, keep_dims=True) - cube
        if cube.dtype == tl.int32:
            result = tl.where(upper, tl.maximum(cube, partner), tl.minimum(cube, partner))
        else:
            result = tl.where((cube > partner) != upper, partner, cube)
    return result


@triton.jit
def _merge(
    cube, STAGE: tl.constexpr, LOG_N: tl.constexpr, LOG_WARPS: tl.constexpr, ORDER: tl.constexpr
):
    # ORDER: 0 ascending, 1 descending, 2 alternating every 2**STAGE elements.
    if ORDER == 2:
        flip = tl.reshape(tl.arange(0, 2), _shape_of_bit(STAGE, LOG_N, LOG_WARPS))
    else:
        flip = ORDER
    for i in tl.static_range(STAGE):
        cube = _exchange(cube, flip, STAGE - 1 - i, LOG_N, LOG_WARPS)
    return cube


@triton.jit
def sort(x, LOG_N: tl.constexpr, LOG_WARPS: tl.constexpr, DESCENDING: tl.constexpr):
    """Bitonic sort of a vector of ``2**LOG_N`` integers by ``2**LOG_WARPS`` warps.

    Returns:
        The integers, not moved into their places, and the place [int32] of each.
    """
    cube = tl.reshape(x, [2] * LOG_N)
    for stage in tl.static_range(1, LOG_N + 1):
        cube = _merge(cube, stage, LOG_N, LOG_WARPS, 2 if stage < LOG_N else DESCENDING)
    place = tl.zeros([2] * LOG_N, tl.int32)
    for bit in tl.static_range(LOG_N):
        place += tl.reshape(tl.arange(0, 2), _shape_of_bit(bit, LOG_N, LOG_WARPS)) << bit
    return tl.reshape(cube, [2**LOG_N]), tl.reshape(place, [2**LOG_N])
