"""Combined choices come out right whatever is matched, and these are found and rewritten."""

from __future__ import annotations

import pytest

from .cover import COMBINED
from .hosts import check_sites, describe, hosts_of, run_case
from .oracle import case_of, check

RUNS = [(name, host) for i, name in enumerate(COMBINED) for host in hosts_of(i)]
# Must be matched in both layers; the others may be kept, with a reason.
MATCHED = set(
    "01 07 09 13 14 15 17 23 25 31 37 39 45 48 51 52 54 55 56 57 58".split()
)  # fmt: skip


@pytest.mark.parametrize(("name", "host"), RUNS)
def test_a_combination_is_right(name: str, host: str) -> None:
    case = case_of(COMBINED[name])
    got = run_case(case, host)
    check(case, got.outputs)
    if name in MATCHED:
        check_sites(got.sites, case.model.spellings)
    assert all(s.reason for s in got.sites if s.status == "kept"), describe(got.sites)
