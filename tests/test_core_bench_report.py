"""What `make bench-core` writes: the tables and the page, from a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.core import report

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture
def record():
    return json.loads((DOCS / "records" / "core-bench.json").read_text())


def row(record, title):
    _, _, rows = report.tables(record)[0]
    return next(cells for cells in rows if cells[0] == title)


def test_page_in_docs_is_what_its_record_says(record):
    page = (DOCS / "benchmarks.md").read_text()
    assert report.page(record, page) == page


def test_page_keeps_what_lies_outside_its_marks(record):
    page = report.page(record, f"before {report.BEGIN} old {report.END} after")
    assert page.startswith(f"before {report.BEGIN}")
    assert page.endswith(f"{report.END} after")
    assert "old" not in page


def test_figure_of_a_peer_stands_beside_its_ratio_to_ours(record):
    record["ours, µs"]["allocate_free"] = 20.0
    record["peers"] = {"vllm": {"version": "1.2", "µs": {"allocate_free": 110.0}, "notes": {}}}
    assert row(record, "allocate and free 512 blocks")[-1] == "110 (5.5×)"


def test_peer_that_did_not_run_leaves_figures_measured_elsewhere_and_the_reason(record):
    record["peers"] = {"lmdeploy": {"missing": "no wheel for this Python"}}
    assert row(record, "allocate and free 512 blocks")[-1] == "~ 32"
    assert "lmdeploy did not run here: no wheel for this Python." in report.remarks(record)


def test_work_that_a_peer_says_it_has_not_is_a_dash(record):
    record["peers"] = {"vllm": {"version": "1.2", "µs": {}, "notes": {"fork": "has none any more"}}}
    assert row(record, "fork of 128 blocks")[-1] == "–"
