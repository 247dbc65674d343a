"""docs/RESULTS.md is what its tables say, and is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from selmodel.report.results import main, page
from selmodel.report.run import write_report
from tests.report.runs_on_disk import heads_sweep

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_committed_page_is_made_from_the_committed_tables():
    assert (DOCS / "RESULTS.md").read_text(encoding="utf-8") == page(DOCS / "results")


def test_without_tables_every_claim_is_open(tmp_path):
    text = page(tmp_path)
    assert text.count("## ") == 5
    assert text.count("ot run") >= 5


def test_claims_from_a_table(tmp_path):
    sweep = heads_sweep(tmp_path / "sweep")
    (csv, *_) = write_report("perplexity_vs_heads", sweep)
    tables = tmp_path / "results"
    tables.mkdir()
    (tables / csv.name).write_bytes(csv.read_bytes())
    text = page(tables)
    assert "selective is lower in 2 of 2 comparisons, and its worst seed below standard's best in 2" in text
    assert "| 1 | 57.47 ±2.87 | 21.12 | +1.0000 | 2, 1 |" in text
    assert "| 2 | 1 | 2 | 1.9 to 2.1 | 2.00 |" in text
    assert "| 2 | 2 | >4 | >4 to >4 | - |" in text
    main([str(tables), str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SystemExit, match="nowhere: no such folder"):
        main([str(tmp_path / "nowhere")])
