"""CUDA graphs over an optimised graph, interrupted where something may not be captured."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from dsa_compile.errors import CaptureError, ConfigError, InputError
from dsa_compile.graph_buffers import RowBuffers
from dsa_compile.graph_capture import Capture, CudaCapture
from dsa_compile.graph_pieces import (
    Piece,
    Program,
    Rows,
    check_inputs,
    find_rows,
    split_at_marks,
)

# Far above rounding, far below what a wrong count of rows does.
_TOLERANCE = 1e-2


@dataclass
class _Recording:
    """One bucket: fixed inputs, steps, and results that each run of the steps writes anew."""

    inputs: list[Any]
    steps: list[Callable[[], None]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class BreakableCUDAGraph:
    """Runs a functional graph module as CUDA graphs, one set for each bucket of rows.

    The pieces between the marks of ``insert_graph_breaks`` are captured, once a bucket; marked
    calls run between the replays, their results copied into fixed buffers that the next piece
    reads. A call with ``n`` rows takes the smallest bucket that holds them. The rows beyond repeat
    the last one, so that every kernel sees valid lengths and ids; they are cut off from the
    results. That padding changes no real row is checked at the capture of each bucket, by running
    the graph with two paddings and with none.

    Inputs with rows are copied into fixed buffers. All others (weights, caches) are read where they
    lie: they must stay the same tensors. Results are new tensors, or copied into ``out``.

    Args:
        graph_module: functional, flat inputs, a tuple of results, as ``optimize`` makes them; one
            of its sizes is symbolic and counts the rows.
        buckets: numbers of rows to capture for, in any order.
        rows: position of an input -> its dim that holds the rows; may be left away where only one
            size is symbolic.
        capture: records and replays; CUDA graphs if left away.

    Raises:
        ConfigError: ``buckets`` is empty or holds something else than positive numbers, or fewer
            rows than the graph serves; or another argument is of the wrong type.
        CaptureError: the rows cannot be told; or an op writes into its inputs, or gives a number
            or a size that depends on data.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        buckets: Sequence[int],
        *,
        rows: Mapping[int, int] | None = None,
        capture: Capture | None = None,
    ) -> None:
        if not isinstance(graph_module, fx.GraphModule):
            raise ConfigError(
                f"graph_module must be a GraphModule, got {type(graph_module).__name__}; "
                "BreakableCUDAGraph runs captured graphs, not models"
            )
        self._module = graph_module
        self._inputs = graph_module.graph.find_nodes(op="placeholder")
        self._rows: Rows = find_rows(graph_module, rows)
        self.buckets = _checked(buckets, self._rows.least)
        self._program: Program = split_at_marks(graph_module)
        self._buffers = RowBuffers(graph_module, self._rows)
        self._capture: Capture | None = CudaCapture() if capture is None else capture
        self._recordings: dict[int, _Recording] = {}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What is captured (``reason`` is None) and what runs between, in order."""
        return self._program.pieces

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that have been captured so far."""
        return tuple(sorted(self._recordings))

    def __call__(
        self, *inputs: Any, out: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[Any, ...]:
        """Run the graph; the first call of a bucket captures it.

        Args:
            inputs: as the graph module takes them.
            out: per result a tensor that receives it, or None; results with rows go into the first
                rows.

        Raises:
            InputError: names the input or result that does not fit.
            CaptureError: called while a CUDA graph is being captured, or after ``free``, or a
                padded row would change a real one.
        """
        if self._capture is None:
            raise CaptureError("the captured graphs were freed; make a new BreakableCUDAGraph")
        if self._capture.active():
            raise CaptureError(
                "a BreakableCUDAGraph was called inside a capture; it captures by itself: call it "
                "outside, or the graph module alone inside"
            )
        check_inputs(self._inputs, inputs)
        count = self._buffers.count(inputs, self.buckets[-1])
        bucket = self.buckets[bisect.bisect_left(self.buckets, count)]
        with torch.no_grad():
            recording = self._recordings.get(bucket)
            if recording is None:
                recording = self._record(inputs, count, bucket, self._capture)
                self._recordings[bucket] = recording
            else:
                self._buffers.check(inputs, recording.inputs)
                self._buffers.fill(recording.inputs, inputs, count)
            for step in recording.steps:
                step()
            return self._results(recording.outputs, count, out)

    def free(self) -> None:
        """Free all captured graphs and their memory; the runner cannot be called again."""
        self._recordings.clear()
        if self._capture is not None:
            self._capture.free()
        self._capture = None

    def __enter__(self) -> BreakableCUDAGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def _record(
        self, inputs: Sequence[Any], count: int, bucket: int, capture: Capture
    ) -> _Recording:
        recording = _Recording(self._buffers.fixed(inputs, count, bucket))
        self._check_padding(recording.inputs, bucket, capture)
        program = self._program
        env: dict[fx.Node, Any] = dict(program.tensors)
        env.update(zip(program.placeholders, recording.inputs, strict=True))
        self._buffers.fill(recording.inputs, inputs, count)
        for piece in program.pieces:
            self._add(piece, env, recording, capture)
        recording.outputs = [
            self._read(env, node) if isinstance(node, fx.Node) else node for node in program.outputs
        ]
        return recording

    def _add(
        self, piece: Piece, env: dict[fx.Node, Any], recording: _Recording, capture: Capture
    ) -> None:
        given = [self._read(env, node) for node in piece.inputs]

        def run() -> Any:
            return piece.run(*given)

        warm = capture.warm_up(run)
        if piece.reason is None:
            del warm
            replay, result = capture.record(run)
            # Recording runs nothing on the device: later pieces need these results.
            replay()
            recording.steps.append(replay)
        else:
            result = pytree.tree_map_only(torch.Tensor, torch.clone, warm)
            recording.steps.append(lambda: _copy(run(), result))
        env[piece.output] = result

    def _read(self, env: dict[fx.Node, Any], node: fx.Node) -> Any:
        if node in self._program.unpack:
            source, index = self._program.unpack[node]
            return self._read(env, source)[index]
        return env[node]

    def _check_padding(self, fixed: list[Any], bucket: int, capture: Capture) -> None:
        """Run the graph with two paddings and with none: real rows must come out alike."""
        count = max(self._rows.least, bucket // 2)
        if count >= bucket:
            return
        real = [
            v.narrow(self._rows.inputs[i], 0, count).clone() if i in self._rows.inputs else v
            for i, v in enumerate(fixed)
        ]
        for i in self._rows.counts:
            real[i] = count
        results = []
        for pad in (-1, 0):
            self._buffers.fill(fixed, real, count, pad)
            made = capture.warm_up(lambda: self._module(*fixed))
            results.append(self._results(list(made), count, None))
        alone = capture.warm_up(lambda: self._module(*real))
        for number, (last, first, plain) in enumerate(zip(*results, alone, strict=True)):
            if not isinstance(last, torch.Tensor):
                continue
            if not torch.equal(_bits(last), _bits(first)):
                raise CaptureError(
                    f"result {number} of a real row depends on the rows that pad a bucket of "
                    f"{bucket}; give buckets of the very numbers of rows that are called"
                )
            if last.is_floating_point() and not torch.allclose(
                last, plain, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
            ):
                raise CaptureError(
                    f"result {number} depends on the number of rows, which padding to {bucket} "
                    "changes; give buckets of the very numbers of rows that are called"
                )

    def _results(
        self, outputs: list[Any], count: int, out: Sequence[torch.Tensor | None] | None
    ) -> tuple[Any, ...]:
        given = [None] * len(outputs) if out is None else list(out)
        if len(given) != len(outputs):
            raise InputError(f"out must have {len(outputs)} entries, got {len(given)}")
        results = []
        for number, (made, into) in enumerate(zip(outputs, given, strict=True)):
            dim = self._rows.outputs[number]
            if isinstance(made, torch.Tensor) and dim is not None:
                made = made.narrow(dim, 0, count)
            if not isinstance(made, torch.Tensor):
                results.append(made)
            elif into is None:
                results.append(made.clone())
            else:
                results.append(_into(made, into, dim, number))
        return tuple(results)


def _into(made: torch.Tensor, into: torch.Tensor, dim: int | None, number: int) -> torch.Tensor:
    if not isinstance(into, torch.Tensor):
        raise InputError(f"out[{number}] must be a tensor or None, got {into!r}")
    space = into
    if dim is not None and into.dim() == made.dim() and into.shape[dim] >= made.shape[dim]:
        space = into.narrow(dim, 0, made.shape[dim])
    if (space.shape, space.dtype, space.device) != (made.shape, made.dtype, made.device):
        raise InputError(
            f"out[{number}] is {into.dtype} {tuple(into.shape)} on {into.device} and the result is "
            f"{made.dtype} {tuple(made.shape)} on {made.device}"
        )
    return space.copy_(made)


def _checked(buckets: Sequence[int], least: int) -> tuple[int, ...]:
    if not isinstance(buckets, Sequence):
        raise ConfigError(f"buckets must be a sequence of numbers of rows, got {buckets!r}")
    bad = [b for b in buckets if not isinstance(b, int) or isinstance(b, bool) or b < least]
    if not buckets or bad:
        raise ConfigError(
            f"buckets must be numbers of rows from {least} on, which is the least that the graph "
            f"serves, got {list(buckets)!r}"
        )
    return tuple(sorted(set(buckets)))


def _copy(made: Any, fixed: Any) -> None:
    for new, old in zip(pytree.tree_leaves(made), pytree.tree_leaves(fixed), strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with NaNs that compare equal."""
    return tensor.nan_to_num(nan=0.0) if tensor.is_floating_point() else tensor
