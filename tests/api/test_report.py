"""The report's fixed shape, its round trip, and its three faces: text, JSON, HTML."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from dsa_compile import Report, Site

CONSUMER = Site(
    "consumer",
    "rewritten",
    "model.py:10",
    32,
    128,
    8,
    512,
    "cpu",
    notes=("slots are told by value",),
)
SOURCE = Site("source", "fused", "model.py:20", 32, 128, 8, 512, "cpu")
FAR = Site("single", "kept", "router.py:3", reason="no relu", progress=1)
NEAR = Site(
    "consumer",
    "kept",
    "model.py:30",
    reason="leaks <positions>",
    counterexample="row 3",
    progress=7,
)
REPORT = Report(
    sites=(CONSUMER, SOURCE, FAR, NEAR),
    op_counts_before={"<built-in function mul>": 2, "aten.bmm.default": 3, "aten.topk.default": 4},
    op_counts_after={"aten.bmm.default": 1, "aten.topk.default": 4, "dsa_cpu.topk.default": 1},
    provider="cpu",
    graphs=1,
    notes=("could not make dimension 1 of x dynamic: the model needs x.shape[1] == 29",),
)


def test_plain_data_has_the_fields_that_tools_read() -> None:
    data = REPORT.to_dict()
    fields = {"kind", "status", "where", "heads", "head_dim", "block_size", "k", "provider"}
    for site in data["sites"]:
        assert fields | {"reason", "counterexample", "graph"} <= set(site)
    assert data["sites"][0]["kind"] == "consumer" and data["sites"][0]["heads"] == 32
    assert data["sites"][0]["reason"] is None and data["sites"][0]["counterexample"] is None


def test_the_report_survives_json(tmp_path: Path) -> None:
    text = REPORT.to_json(tmp_path / "report.json")
    assert Report.from_json(text) == REPORT
    assert json.loads((tmp_path / "report.json").read_text()) == REPORT.to_dict()
    assert Report.from_dict(Report().to_dict()) == Report()


def test_matched_and_nearest_miss() -> None:
    assert REPORT.matched == (CONSUMER, SOURCE)
    assert REPORT.nearest_miss == NEAR
    assert "model.py:30" in REPORT.explain_miss() and "row 3" in REPORT.explain_miss()
    assert Report().nearest_miss is None and "no graph" in Report().explain_miss()
    assert "no top-k" in Report(graphs=1).explain_miss()


def test_only_changed_ops_are_listed() -> None:
    assert REPORT.op_changes() == {"aten.bmm.default": (3, 1), "dsa_cpu.topk.default": (0, 1)}


def test_text_shows_sites_reasons_ops_and_notes() -> None:
    for text in (str(REPORT), _printed(REPORT)):
        flat = "".join(text.split())
        for part in ("model.py:10", "32x128", "512", "leaks<positions>", "dsa_cpu.topk.default"):
            assert part in flat
        assert "4 selections in 1 graph: 1 rewritten, 1 fused, 2 kept" in text
        assert "couldnotmakedimension1ofx" in flat


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_narrow_console_has_room(width: int) -> None:
    lines = _printed(REPORT, width).splitlines()
    assert any(line.split()[2:4] == ["model.py:10", "consumer"] for line in lines)
    assert all(len(line) <= width for line in lines)


def test_folders_are_left_out_of_the_text() -> None:
    site = Site("single", "kept", "/usr/lib/python/site-packages/models/modeling.py:7", reason="r")
    text = str(Report((site,)))
    assert "modeling.py:7: r" in text
    assert "site-packages" in Report((site,)).explain_miss()


def test_markup_in_a_reason_is_shown_as_it_is() -> None:
    report = Report((Site("single", "kept", "a.py:1", reason="reads [bold]weights[/bold]"),))
    assert "[bold]" in str(report)


def test_layers_that_are_alike_share_a_row() -> None:
    text = str(Report((CONSUMER,) * 61, graphs=1))
    assert text.count("consumer") == 1 and "61" in text


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    text = REPORT.html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == text
    page = _Page()
    page.feed(text)
    page.close()
    assert not page.open and not page.links and "url(" not in text
    assert "model.py:10" in page.cells and any("leaks <positions>" in c for c in page.cells)


@pytest.mark.parametrize("missing", ["sites", "notes", "provider"])
def test_plain_data_without_a_part_is_refused(missing: str) -> None:
    data = REPORT.to_dict()
    del data[missing]
    with pytest.raises(KeyError, match=missing):
        Report.from_dict(data)


def _printed(report: Report, width: int = 120) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(report)
    return console.export_text()
