"""What the passes say about each selection node they looked at."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("consumer", "source", "single")
STATUSES = ("rewritten", "fused", "kept")


@dataclass(frozen=True)
class Site:
    """One selection (a top-k or a sort) of a graph, and what became of it.

    Attributes:
        kind: ``"consumer"`` (selects inside published candidate blocks), ``"source"`` (publishes
            candidate blocks) or ``"single"`` (everything else).
        status: ``"rewritten"`` (scored sparsely), ``"fused"`` (scored densely, in one op that never
            holds ``[rows, heads, positions]``) or ``"kept"`` (left as it was).
        where: ``file:line`` of the selection in the model, or the node's name where unknown.
        heads: number of indexer heads, if an indexer was recognised.
        head_dim: dimension of query and key, if an indexer was recognised.
        block_size: positions per candidate block of a consumer or source.
        k: positions kept per row; for ``min(k, T)`` the constant part.
        provider: name of the provider whose ops run, None where kept.
        reason: why the site was kept, else None.
        counterexample: the probe that told it apart from an indexer, else None.
        graph: number of the captured graph that the site belongs to.
        notes: facts a user should know, for instance what fills slots that found nothing.
        progress: how far the recognition got (0 to 9), to name the nearest miss.
    """

    kind: str
    status: str
    where: str
    heads: int | None = None
    head_dim: int | None = None
    block_size: int | None = None
    k: int | None = None
    provider: str | None = None
    reason: str | None = None
    counterexample: str | None = None
    graph: int = 0
    notes: tuple[str, ...] = ()
    progress: int = 0


@dataclass(frozen=True)
class SitePair:
    """Node names by which a site can be compared before and after.

    Attributes:
        site: index into the sites of the same pipeline run.
        scores: node of the original graph holding the masked scores ``[..., positions]``.
        indices: node of the original graph holding the selected positions.
        new_indices: node of the rewritten graph holding the selected positions.
    """

    site: int
    scores: str
    indices: str
    new_indices: str
