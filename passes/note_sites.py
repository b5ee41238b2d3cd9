"""Add notes to the sites whose picks come from a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch.fx as fx

from dsa_compile.passes.context import Recorder
from dsa_compile.passes.graph_tools import CASTS, is_view, op_name


def sites_of(node: fx.Node, recorder: Recorder) -> Iterator[int]:
    """Numbers of the sites that a selection op replaced."""
    made, stack = set(), [node]
    while stack:
        for user in stack.pop().users:
            if op_name(user) == "getitem" or is_view(user) or op_name(user) in CASTS:
                made.add(user.name)
                stack.append(user)
    return (pair.site for pair in recorder.pairs if pair.new_indices in made)


def add_note(node: fx.Node, note: str, recorder: Recorder) -> None:
    """Add a note to the sites that a selection op replaced."""
    for at in sites_of(node, recorder):
        site = recorder.sites[at]
        if note not in site.notes:
            recorder.sites[at] = replace(site, notes=(*site.notes, note))
