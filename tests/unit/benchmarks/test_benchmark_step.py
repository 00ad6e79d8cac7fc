"""benchmarks/step.py: which rows are kept, what is compared, and how the page shows them."""

from __future__ import annotations

import step
import step_report


def row(contender: str, ms: float, rate: str = "1gbit") -> step.Row:
    figures = {"ms_min": ms, "ms_max": ms, "main_cpu_ms": 1.0, "other_cpu_ms": 2.0, "wakeups": 3, "sent_mb": 4.0}
    return {"part": "2x1", "rate": rate, "contender": contender, "ms": ms, "steps": 1, **figures}


def test_speeds_are_relative_to_ddp_of_the_same_run() -> None:
    rows = [row("dense", 100.0), row("ddp", 150.0)]
    step.compare(rows)
    assert [r["against_ddp"] for r in rows] == [1.5, 1.0]
    alone = [row("dense", 100.0)]
    step.compare(alone)
    assert alone[0]["against_ddp"] is None


def test_a_row_that_is_measured_again_replaces_the_stored_row() -> None:
    stored = [row("dense", 1.0), row("dense", 2.0, "100mbit"), row("ddp", 3.0)]
    merged = step.merge(stored, [row("dense", 9.0)])
    assert sorted((r["contender"], r["rate"], r["ms"]) for r in merged) == [
        ("ddp", "1gbit", 3.0),
        ("dense", "100mbit", 2.0),
        ("dense", "1gbit", 9.0),
    ]


def test_the_page_shows_every_contender_fastest_first() -> None:
    rows = [row(contender, float(ms)) for ms, contender in enumerate((step.PLAIN, *step.OURS, *step.PEERS), 1)]
    step.compare(rows)
    text = step_report.section({"rows": rows[::-1], "facts": {"load": 0.1}})["TRAINING_STEP"]
    places = [text.index(f"| {step_report.NAMES[r['contender']]} |") for r in rows]
    assert places == sorted(places)
    assert "2 nodes × 1, 1 Gbit/s" in text
