"""docs/benchmarks.md agrees with the measurements: text and pictures are those of the stored results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import report


def test_the_document_and_its_pictures_are_those_of_the_results() -> None:
    assert report.list_stale_files() == [], "run: python benchmarks/report.py"


def test_no_placeholder_is_left_and_every_picture_is_there() -> None:
    text = report.DOCUMENT.read_text()
    assert "{{" not in text
    for name in [part.partition(")")[0] for part in text.split("](images/")[1:]]:
        assert (report.IMAGES / name).exists(), name


def test_a_changed_figure_makes_the_document_and_its_picture_stale(tmp_path: Path) -> None:
    stored = report.load_result("allreduce")
    if stored is None:
        pytest.skip("benchmarks/results/allreduce.json is not there yet")
    for path in report.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    row = next(row for row in stored["rows"] if (row["part"], row["rate"]) == ("2x2", "1gbit"))
    row["ms"] *= 2
    (tmp_path / "allreduce.json").write_text(json.dumps(stored))
    assert {"docs/benchmarks.md", "docs/images/allreduce.png"} <= set(report.list_stale_files(tmp_path))


def test_a_missing_result_leaves_its_section_out(tmp_path: Path) -> None:
    text = report.render_page(tmp_path)
    assert "## Convergence" not in text
    assert "## Run it yourself" in text


def test_the_figures_of_the_readme_are_those_of_its_picture() -> None:
    rows = (report.load_result("allreduce") or {"rows": []})["rows"]
    rows = [row for row in rows if (row["part"], row["rate"], row["elements"]) == ("2x2", "1gbit", 25_557_032)]
    assert rows
    readme = (report.RESULTS.parents[1] / "README.md").read_text()
    by_name = {row["contender"]: row for row in rows}
    best = min(row["ms"] for row in rows if row["kind"] == "peer dense")
    dense, sparse = by_name["TopKube hierarchical"], by_name["TopKube hitopk 1%"]
    gathers = [row["ms"] for row in rows if row["contender"].startswith("torch.topk")]
    assert f"hitopk at 1% takes {sparse['ms']:.0f} ms, the best dense peer {best:.0f} ms" in readme
    assert f"sends 1% of the entries and takes {sparse['ms']:.0f} ms" in readme
    assert f"takes {best:.0f} ms, and torch.topk with an all-gather takes" in readme
    assert any(f"an all-gather takes {ms:,.0f} ms" in readme for ms in gathers)
    assert f"takes {dense['ms']:.0f} ms, which is {dense['of_bound']:.0f}% of what the link allows" in readme
