"""Static sizes that are too large to run are proven on smaller ones that stand for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_models import (
    BLOCK,
    NEAR_MISSES,
    Decoding,
    Gelu,
    NearMisses,
    OtherNewest,
    Segments,
    Shifted,
    Window,
    tokens,
)
from paged_models import BLOCK as PAGED_BLOCK
from paged_models import DIM as PAGED_DIM
from paged_models import HEADS as PAGED_HEADS
from paged_models import Paged, by_index, by_slots, fused_fp8, shortened
from pass_models import calls, captured, same_sets
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_compile.passes.axis_labels import Labels
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.context import MatchOptions
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import op_name
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline
from dsa_compile.passes.restate_sizes import Member
from dsa_compile.passes.solve_extents import Marks, Unrestated

LONG = 1 << 20


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made for real."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor) and not isinstance(made, FakeTensor) and not made.is_meta:
                self.bytes = max(self.bytes, made.numel() * made.element_size())
        return out


def matched(graph_module: fx.GraphModule, options: MatchOptions | None = None) -> PipelineResult:
    """Run the passes; nothing large may be made for real on the way."""
    with Largest() as largest:
        result = run_pipeline(graph_module, options=options)
    assert largest.bytes < 32 << 20
    return result


def check_both(result: PipelineResult) -> None:
    found = [(s.kind, s.status, s.block_size) for s in result.sites]
    assert found == [("source", "fused", BLOCK), ("consumer", "rewritten", BLOCK)], result.sites
    for site in result.sites:
        assert any(note.startswith("proven on smaller sizes") for note in site.notes)


# Sizes that other extents have, too: rows as many as heads, as positions a block, as a block has.
@pytest.mark.parametrize(
    ("positions", "rows", "batch"),
    [(LONG, 1, 1), (LONG, 8, 1), (LONG, 64, 1), (1 << 17, 64, 2), (LONG - 3, 15, 1), (LONG, 1, 64)],
)
def test_a_long_static_cache_is_matched(positions: int, rows: int, batch: int) -> None:
    check_both(matched(captured(Decoding(positions, batch), tokens(rows, batch))))


def test_the_benchmark_of_decoding_is_matched() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "benchmarks"), str(root / "examples")]
    try:
        from decode import Decoder
        from two_level_indexer import ModelConfig
    finally:
        del sys.path[:2]
    with torch.device("meta"):
        model = Decoder(ModelConfig(layers=2), LONG).to(torch.bfloat16).eval()
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    host = aot_autograd(
        fw_compiler=keep,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=host, fullgraph=True)(
            torch.zeros(1, 64, dtype=torch.int64, device="meta")
        )
    check_both(matched(graphs[0]))


def test_rows_may_be_symbolic_beside_a_static_cache() -> None:
    graph_module = captured(Decoding(LONG), tokens(9), dynamic=True)
    check_both(matched(graph_module, MatchOptions(probe_memory_bytes=256 << 20)))


def test_another_activation_is_kept() -> None:
    result = matched(captured(Gelu(LONG), tokens(64)))
    assert {s.status for s in result.sites} == {"kept"}
    assert all(s.reason is not None and "gelu" in s.reason for s in result.sites)


def test_near_misses_of_any_size_are_kept() -> None:
    source, *others = matched(captured(NearMisses(LONG), tokens(64))).sites
    assert source.status == "fused"
    for site, (name, reason) in zip(others, NEAR_MISSES.items(), strict=True):
        assert (site.kind, site.status) == ("consumer", "kept"), name
        assert site.reason is not None and reason in site.reason, (name, site.reason)


def test_what_is_published_must_be_the_best_blocks() -> None:
    shifted = matched(captured(Shifted(LONG), tokens(64)))
    assert [s.status for s in shifted.sites] == ["kept", "rewritten"]
    assert shifted.sites[0].reason is not None and "not the maximum" in shifted.sites[0].reason
    other = matched(captured(OtherNewest(LONG), tokens(64)))
    assert not calls(other.graph_module, "indexer_publish")
    assert len(calls(other.graph_module, "indexer_block_max")) == 1


@pytest.mark.parametrize(
    ("window", "status"), [(6000, "fused"), (5998, "fused"), (16, "fused"), (3000, "kept")]
)
def test_what_is_matched_on_small_sizes_is_right_at_its_own(window: int, status: str) -> None:
    """Also where a constant is read as something that it was not meant to be."""
    model, x = Window(6000, window), tokens(24, device="cpu")
    model.blocks = 40
    graph_module = captured(model, x)
    result = run_pipeline(graph_module, options=MatchOptions(probe_memory_bytes=8 << 20))
    assert result.sites[0].status == status
    for site in result.sites:
        assert site.status == "kept" or any("smaller" in note for note in site.notes)
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))


def test_a_large_mask_is_read_at_the_candidates() -> None:
    result = matched(captured(Segments(LONG), tokens(64)))
    check_both(result)
    (logits,) = calls(result.graph_module, "sparse_mqa_logits")
    mask = logits.kwargs["mask"]
    assert isinstance(mask, fx.Node) and str(mask.target) == "aten.eq.Tensor"


@pytest.mark.parametrize("read", [by_index, by_slots, shortened, fused_fp8])
def test_a_large_paged_cache_is_read_where_it_lies(read: Any) -> None:
    fp8 = read is fused_fp8
    cache = torch.empty(
        1 << 15,
        64,
        PAGED_DIM + 4 if fp8 else PAGED_DIM,
        dtype=torch.uint8 if fp8 else torch.float32,
    )
    given = (
        torch.zeros(4, 2, PAGED_HEADS, PAGED_DIM),
        torch.zeros(4, 2, PAGED_HEADS),
        cache,
        torch.zeros(4, LONG // 64, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, 2, LONG // PAGED_BLOCK // 64, dtype=torch.int64),
    )
    result = run_pipeline(captured(Paged(read).eval(), *given))
    (site,) = result.sites
    assert (site.kind, site.status) == ("consumer", "rewritten")
    assert any("never gathered" in note for note in site.notes), site.notes


def follower_of(graph_module: fx.GraphModule) -> tuple[AxisFollower, list[fx.Node]]:
    follower = AxisFollower(Labels(Binding({})))
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    leaves = [n for n in graph_module.graph.nodes if n.op in ("placeholder", "get_attr")]
    follower.cover(nodes, leaves)
    return follower, nodes


@pytest.mark.parametrize("kind", [NearMisses, Segments])
def test_the_member_of_the_captured_sizes_is_the_captured_part(kind: type[Decoding]) -> None:
    follower, nodes = follower_of(captured(kind(LONG - 3), tokens(64)))
    marks = Marks(((LONG - 3, LONG - 3), ((LONG - 3) // BLOCK, (LONG - 3) // BLOCK)))
    member = Member(follower, [], marks)
    for node in nodes:
        if isinstance(node.meta["val"], Tensor):
            assert member.shape(node) == tuple(node.meta["val"].shape)
            args, kwargs = member.arguments(node)
            shape = list(node.meta["val"].shape)
            whole = op_name(node) in ("view", "reshape", "expand")
            plain = [shape if whole and isinstance(a, list) else a for a in node.args]
            assert list(args) == plain and kwargs == dict(node.kwargs), node.format_node()


def test_constants_keep_their_distance_from_an_extent() -> None:
    marks = Marks(((100_000, 160), (12_500, 20), (99_936, 144)))
    assert [marks.moved(n) for n in (100_000, 99_999, 12_501, -100_000)] == [160, 159, 21, -160]
    assert [marks.moved(n) for n in (99_937, 99_930)] == [145, 138]
    assert [marks.moved(n) for n in (0, 7, 5_000, 50_000, 100_009)] == [None] * 5
    assert [marks.number(n) for n in (True, 0.5, 100_000.0, float("inf"))] == [
        True,
        0.5,
        160.0,
        float("inf"),
    ]
    assert [marks.place(n, 64, 16) for n in (64, -64, 1 << 40)] == [16, -16, 1 << 40]


def test_extents_that_contradict_each_other_are_refused() -> None:
    follower, nodes = follower_of(captured(Decoding(LONG), tokens(64)))
    (keys,) = [n for n in nodes[0].graph.nodes if "keys" in n.name and n.op != "call_function"]
    positions = follower.labels.axes(keys)[1]
    member = Member(follower, [(positions, 1001)], Marks(((LONG, 1001),)))
    with pytest.raises(Unrestated):
        member.shape(keys)
