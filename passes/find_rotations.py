"""Propose which tensors of a model are the cosines and sines of a rotation, and what it turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dsa_compile.passes.arrange_angles import Angles, leads


def rotations(
    sides: Sequence[Any], complexes: Sequence[bool], rows: tuple[int, int], dim: int
) -> Iterator[tuple[tuple[Angles, Angles], str, int]]:
    """Cosines and sines that may be among some tensors, with the ``rope`` and its first dim.

    Args:
        sides: the tensors.
        complexes: which of them are complex.
        rows: batch and rows.
        dim: of what is rotated.
    """
    for pair, width, styles in _pairs(sides, complexes, rows):
        rotary = 2 * width
        if rotary > dim:
            continue
        for rope in styles:
            for start in dict.fromkeys((0, dim - rotary)):
                if rope != "interleaved" or start % 2 == 0:
                    yield pair, rope, start


def _pairs(
    sides: Sequence[Any], complexes: Sequence[bool], rows: tuple[int, int]
) -> Iterator[tuple[tuple[Angles, Angles], int, tuple[str, ...]]]:
    """Cosines and sines, how many there are, and the pairs of dims that they may turn."""
    readable = [
        (at, complexes[at], side.shape[-1], drop, lead)
        for at, side in enumerate(sides)
        if side.dim() > 0
        for drop, lead in leads(side.shape, *rows)
    ]
    for at, is_complex, width, drop, lead in readable:
        if is_complex:
            pair = (Angles(at, 0, "all", drop, lead), Angles(at, 1, "all", drop, lead))
            yield pair, width, ("interleaved", "half", "deinterleaved")
            continue
        for other, also, size, drop2, lead2 in readable:
            if also or other == at or size != width or lead2 != lead:
                continue
            for cut, styles in (
                ("all", ("half", "interleaved", "deinterleaved")),
                ("half", ("half",)),
                ("even", ("interleaved", "deinterleaved")),
            ):
                if cut != "all" and width % 2:
                    continue
                pair = (Angles(at, None, cut, drop, lead), Angles(other, None, cut, drop2, lead2))
                yield pair, width if cut == "all" else width // 2, styles
