"""``verify``: the original and the optimised model side by side, selection by selection."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from dsa_compile.call_inputs import clone_inputs
from dsa_compile.compare import Agreement, compare_selections, largest_difference
from dsa_compile.optimized_module import check_mode, engine_of, original_of
from dsa_compile.passes.sites import Site, SitePair
from dsa_compile.report import plain_table, render, short_place
from dsa_compile.session import CapturedGraph
from dsa_compile.state import ModelState

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class SiteAgreement:
    """How one selection of the optimised model agrees with the original's.

    Attributes:
        site: the selection.
        rows: rows compared.
        same_rows: rows that select the same set. Slots that found nothing do not count.
        largest_score_difference: over the rows that differ, the largest difference between the
            original's own scores of the two selections, each sorted; 0.0 if all rows agree.
    """

    site: Site
    rows: int
    same_rows: int
    largest_score_difference: float


@dataclass(frozen=True)
class Verification:
    """The comparison of one call; prints as a table.

    Attributes:
        sites: one entry a rewritten or fused selection that the call ran through.
        outputs: number of tensors the model returned.
        largest_output_difference: largest absolute difference of the model's floating outputs.
        differing_outputs: number of elements of the other outputs (indices, masks) that differ.
    """

    sites: tuple[SiteAgreement, ...]
    outputs: int
    largest_output_difference: float
    differing_outputs: int

    @property
    def rows(self) -> int:
        """Rows compared, over all selections."""
        return sum(site.rows for site in self.sites)

    @property
    def same_rows(self) -> int:
        """Rows that select the same set, over all selections."""
        return sum(site.same_rows for site in self.sites)

    @property
    def largest_score_difference(self) -> float:
        """Largest score difference at a disagreement, over all selections."""
        return max((site.largest_score_difference for site in self.sites), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        return render(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        numeric = ("graph", "same rows", "score difference")
        columns = ("graph", "where", "kind", "status", "same rows", "score difference")
        table = plain_table(columns, folded=("where",), numeric=numeric)
        for entry in self.sites:
            site = entry.site
            agreed = f"{entry.same_rows} of {entry.rows}"
            difference = f"{entry.largest_score_difference:.3g}"
            cells = (
                str(site.graph),
                short_place(site.where),
                site.kind,
                site.status,
                agreed,
                difference,
            )
            table.add_row(*map(Text, cells))
        if self.sites:
            yield table
        else:
            yield Text("no rewritten selection was run")
        text = f"largest difference of the model's outputs: {self.largest_output_difference:.3g}"
        if self.differing_outputs:
            text += f"; {self.differing_outputs} integer or boolean elements differ"
        yield Text(text)


def verify(model: nn.Module, optimized: nn.Module, /, *inputs: Any, **kwargs: Any) -> Verification:
    """Run a model and its optimised form on one call and compare them.

    Both run on copies of the inputs, so caches among them stay untouched, and both modules'
    buffers and attributes are put back. Inside the optimised form each captured graph runs twice,
    as captured and as rewritten, on the same inputs; scores are the captured graph's.

    Args:
        model: the original module, in eval mode.
        optimized: what ``optimize`` gave for it, or for a copy of it.
        inputs, kwargs: the arguments of the call.

    Raises:
        TypeError: ``model`` is not a module, or ``optimized`` not an optimised one.
        TrainingModeError: one of them is in training mode.
    """
    original = original_of(model)
    engine = engine_of(optimized) if isinstance(optimized, nn.Module) else None
    if engine is None:
        raise TypeError(
            f"optimized must come from dsa_compile.optimize, got {type(optimized).__name__}"
        )
    check_mode(original)
    with torch.no_grad(), ModelState(original).kept():
        args, named = clone_inputs(inputs, kwargs, original)
        expected = _tensors(original(*args, **named))
    tally = _Tally()
    with torch.no_grad(), ModelState(engine.model).kept():
        args, named = clone_inputs(inputs, kwargs, engine.model)
        engine.session.observer = tally.observe
        try:
            got = _tensors(optimized(*args, **named))
        finally:
            engine.session.observer = None
    if len(got) != len(expected):
        raise RuntimeError(
            f"the original returned {len(expected)} tensors and the optimised model {len(got)}"
        )
    worst, differing = 0.0, 0
    for a, b in zip(expected, got, strict=True):
        if a.is_floating_point() or a.is_complex():
            worst = max(worst, largest_difference(a, b))
        else:
            differing += int((a != b).sum()) if a.shape == b.shape else max(a.numel(), b.numel())
    return Verification(tally.sites(), len(expected), worst, differing)


def _tensors(result: Any) -> list[torch.Tensor]:
    # Copied, since the state that a result may alias is put back.
    leaves = pytree.tree_leaves(result)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Reader(fx.Interpreter):
    """Runs a graph and keeps the values of some of its nodes."""

    def __init__(self, module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names = names
        self.kept: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names:
            self.kept[n.name] = value
        return value


class _Tally:
    """Agreements by graph and site, summed over the runs of a graph within one call."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[Site, Agreement]] = {}

    def observe(self, graph: CapturedGraph, inputs: tuple[Any, ...]) -> Any:
        """Run both forms of a graph, compare them, and give the rewritten form's outputs."""
        pairs: tuple[SitePair, ...] = graph.result.pairs
        before = _Reader(graph.original, {n for p in pairs for n in (p.scores, p.indices)})
        after = _Reader(graph.result.graph_module, {p.new_indices for p in pairs})
        before.run(*inputs)
        outputs = after.run(*inputs)
        for pair in pairs:
            agreement = compare_selections(
                before.kept[pair.scores], before.kept[pair.indices], after.kept[pair.new_indices]
            )
            key = (graph.index, pair.site)
            if key in self._found:
                agreement = self._found[key][1].joined(agreement)
            self._found[key] = (graph.sites[pair.site], agreement)
        return outputs

    def sites(self) -> tuple[SiteAgreement, ...]:
        """The agreements, in the order of graphs and sites."""
        return tuple(
            SiteAgreement(site, found.rows, found.same_rows, found.largest_score_difference)
            for _, (site, found) in sorted(self._found.items())
        )
