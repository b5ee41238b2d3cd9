"""Quantised values as numbers again, in plain ops, for scorers that read numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from dsa_compile.kernels.quantise import GROUP
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import aten, op_name, value

WIDENED = "dsa_widened"
"""Key of ``meta``: the nodes (values, scales) that a node holds the numbers of."""


def widen_fp8(emit: Emitter, values: fx.Node, dtype: torch.dtype) -> fx.Node:
    """fp8 values as ``dtype``, exactly, without their scale."""
    return emit(aten._to_copy.default, values, dtype=dtype)


def widen_mxfp4(
    emit: Emitter,
    values: fx.Node,
    scales: fx.Node,
    lead: Sequence[fx.Node | int],
    dtype: torch.dtype,
) -> fx.Node:
    """Numbers [*lead, D] of packed values uint8 [*lead, D/2] and scales uint8 [*lead, D/32].

    An e2m1 magnitude is m / 2 for the codes m = 0 and 1, and (2 + m % 2) * 2**(m // 2 - 2) for the
    others. The numbers fit bf16.
    """
    groups = value(scales).shape[-1]
    pair = [emit(aten.bitwise_and.Scalar, values, 15), emit(aten.__rshift__.Scalar, values, 4)]
    codes = emit(aten._to_copy.default, emit(aten.stack.default, pair, -1), dtype=torch.int32)
    codes = emit(aten.reshape.default, codes, [*lead, groups, GROUP])
    size = emit(aten.bitwise_and.Scalar, codes, 7)
    power = emit(aten.sub.Tensor, emit(aten.__rshift__.Scalar, size, 1), 1)
    power = emit(aten.clamp.default, power, 0)
    odd = emit(aten.add.Tensor, emit(aten.bitwise_and.Scalar, size, 1), 2)
    large = emit(aten.__lshift__.Tensor, odd, power)
    twice = emit(aten.where.self, emit(aten.lt.Scalar, size, 2), size, large)
    sign = emit(aten.__rshift__.Scalar, codes, 3)
    sign = emit(aten.add.Tensor, emit(aten.mul.Tensor, sign, -1.0), 0.5)
    numbers = emit(aten.mul.Tensor, twice, sign)
    scale = emit(aten.view.dtype, scales, torch.float8_e8m0fnu)
    scale = emit(aten._to_copy.default, scale, dtype=torch.float32)
    numbers = emit(aten.mul.Tensor, numbers, emit(aten.unsqueeze.default, scale, -1))
    numbers = emit(aten.reshape.default, numbers, [*lead, groups * GROUP])
    if dtype != torch.float32:
        numbers = emit(aten._to_copy.default, numbers, dtype=dtype)
    numbers.meta[WIDENED] = (values, scales)
    return numbers


def packed_of(node: object) -> tuple[fx.Node, fx.Node] | None:
    """Packed values and scales of widened MXFP4 numbers; None for other nodes."""
    return node.meta.get(WIDENED) if isinstance(node, fx.Node) else None


def fp8_of(node: object) -> fx.Node | None:
    """The fp8 tensor that a node only widens; None for other nodes."""
    if not isinstance(node, fx.Node) or op_name(node) != "_to_copy":
        return None
    source = node.args[0]
    held = value(source)
    if isinstance(source, fx.Node) and getattr(held, "dtype", None) == torch.float8_e4m3fn:
        return source
    return None
