"""Every choice alone on the default is found, proven and rewritten, in both hosts."""

from __future__ import annotations

from functools import cache

import pytest

from .cover import PACKS
from .hosts import Run, check_site, describe, hosts_of, run_case
from .oracle import Case, case_of, check_layer

PLACES = {name: (pack, 1 + i) for pack in range(len(PACKS)) for i, name in enumerate(PACKS[pack])}
RUNS = [(pack, host) for pack in range(len(PACKS)) for host in hosts_of(pack, len(PACKS[pack]) > 1)]


def case(pack: int) -> Case:
    """A source with one consumer for each choice of the pack."""
    spellings = list(PACKS[pack].values())
    return case_of(spellings[0], *spellings)


@cache
def outcome(pack: int, host: str) -> Run | Exception:
    """One capture serves all choices of a pack; its failure fails them all."""
    try:
        return run_case(case(pack), host)
    except Exception as error:
        return error


def optimised(pack: int, host: str) -> Run:
    got = outcome(pack, host)
    if isinstance(got, Exception):
        raise got
    return got


@pytest.mark.parametrize(
    ("name", "host"), [(name, host) for pack, host in RUNS for name in PACKS[pack]]
)
def test_the_consumer_is_rewritten(name: str, host: str) -> None:
    pack, layer = PLACES[name]
    got, wanted = optimised(pack, host), case(pack)
    check_layer(wanted, got.outputs, layer)
    assert len(got.sites) == len(wanted.model.spellings), describe(got.sites)
    check_site(got.sites[layer], "consumer", PACKS[pack][name])


@pytest.mark.parametrize(("pack", "host"), RUNS)
def test_the_source_is_fused(pack: int, host: str) -> None:
    got, wanted = optimised(pack, host), case(pack)
    check_layer(wanted, got.outputs, 0)
    check_site(got.sites[0], "source", wanted.model.spelling)
