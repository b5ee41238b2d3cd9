"""Combined choices come out right whatever is matched, and these are found and rewritten."""

from __future__ import annotations

import pytest

from .cover import COMBINED
from .hosts import check_sites, describe, hosts_of, run_case
from .oracle import case_of, check

RUNS = [(name, host) for i, name in enumerate(COMBINED) for host in hosts_of(i)]
# Must be matched in both layers; the others may be kept, with a reason.
MATCHED = set(
    (
        "01 03 07 08 09 13 14 15 17 18 19 20 23 25 27 28 29 31 32 34 "
        "37 39 41 43 45 46 48 49 51 52 53 54 55 56 57 58 59 "
    ).split()
)


@pytest.mark.parametrize(("name", "host"), RUNS)
def test_a_combination_is_right(name: str, host: str) -> None:
    case = case_of(COMBINED[name])
    got = run_case(case, host)
    check(case, got.outputs)
    if name in MATCHED:
        check_sites(got.sites, case.model.spellings)
    assert all(s.reason for s in got.sites if s.status == "kept"), describe(got.sites)
