"""benchmarks/step.py: which rows are kept, what is compared, and how the page shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import step
import step_rank
import step_report


def build_row(contender: str, ms: float, rate: str = "1gbit") -> step.Row:
    figures = {"ms_min": ms, "ms_max": ms, "main_cpu_ms": 1.0, "other_cpu_ms": 2.0, "wakeups": 3, "sent_mb": 4.0}
    return {"part": "2x1", "rate": rate, "contender": contender, "ms": ms, "steps": 1, **figures}


def test_speeds_are_relative_to_ddp_of_the_same_run() -> None:
    rows = [build_row("dense", 100.0), build_row("ddp", 150.0)]
    step.compare(rows)
    assert [r["against_ddp"] for r in rows] == [1.5, 1.0]
    alone = [build_row("dense", 100.0)]
    step.compare(alone)
    assert alone[0]["against_ddp"] is None


def test_a_row_that_is_measured_again_replaces_the_stored_row() -> None:
    stored = [build_row("dense", 1.0), build_row("dense", 2.0, "100mbit"), build_row("ddp", 3.0)]
    merged = step.merge(stored, [build_row("dense", 9.0)])
    assert sorted((r["contender"], r["rate"], r["ms"]) for r in merged) == [
        ("ddp", "1gbit", 3.0),
        ("dense", "100mbit", 2.0),
        ("dense", "1gbit", 9.0),
    ]


def test_the_page_shows_every_contender_fastest_first() -> None:
    rows = [build_row(contender, float(ms)) for ms, contender in enumerate((step.PLAIN, *step.OURS, *step.PEERS), 1)]
    step.compare(rows)
    text = step_report.build_section({"rows": rows[::-1], "facts": {"load": 0.1}})["TRAINING_STEP"]
    places = [text.index(f"| {step_report.NAMES[r['contender']]} |") for r in rows]
    assert places == sorted(places)
    assert "2 nodes × 1, 1 Gbit/s" in text


def test_the_overview_shows_speeds_relative_to_ddp() -> None:
    times = {"ddp": 300.0, "auto": 150.0, "int4": 120.0, "dense": 200.0, "powersgd2": 100.0, "powersgd4": 110.0}
    rows = [build_row(contender, ms) for contender, ms in times.items()]
    step.compare(rows)
    alone = [build_row("dense", 1.0, "100mbit")]
    step.compare(alone)
    text = step_report.build_section({"rows": rows + alone, "facts": {}})["TRAINING_STEP_SPEEDS"]
    heading, _, row = text.splitlines()  # without DDP there is no row
    cells = dict(zip(heading.split(" | "), row.split(" | "), strict=True))
    assert (cells["`dense`"], cells["`auto`"], cells["DDP, PowerSGD"]) == ("1.50×", "2.00×", "3.00×")
    assert cells["`auto` / fixed |"] == "1.25 |"
    assert cells["no exchange"] == "–"


def test_an_interrupted_run_continues_with_the_turns_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.turns.json"
    turns = step.Turns(path, 5)
    turns.add({"seconds": [1.0]}, "2x1", "gpt", "1gbit", "dense")
    resumed = step.Turns(path, 5)
    assert resumed.find_samples("2x1", "gpt", "1gbit", "dense") == [{"seconds": [1.0]}]
    assert resumed.find_samples("2x1", "gpt", "1gbit", "ddp") == []
    assert step.Turns(path, 6).find_samples("2x1", "gpt", "1gbit", "dense") == []
    monkeypatch.setattr(step, "digest_sources", lambda: "other sources")
    assert step.Turns(path, 5).find_samples("2x1", "gpt", "1gbit", "dense") == []
    resumed.forget()
    assert not path.exists()


def test_only_missing_turns_are_measured_and_all_of_them_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Network:
        def shape(self, rate: str | None) -> None:
            assert rate == "1gbit"

    def sample(seconds: float) -> step.Row:
        return {"seconds": [seconds] * 5, "main_cpu": 0.1, "other_cpu": 0.1, "wakeups": 1, "sent": 2e6}

    turns, measured = step.Turns(None, 5), list[str]()
    turns.add(sample(1.0), "2x1", "gpt", "1gbit", "dense")
    bench = step.StepBench("2x1", "gpt", Path(), Network(), turns)  # type: ignore[arg-type]
    monkeypatch.setattr(bench, "_run_once", lambda contender, steps: (measured.append(contender), sample(3.0))[1])
    rows = {row["contender"]: row for row in bench.measure("1gbit", ["dense", "ddp"], 2, 5)}
    assert measured == ["ddp", "ddp", "dense"]
    assert (rows["dense"]["ms"], rows["dense"]["steps"]) == (2000.0, 10)
    assert (rows["dense"]["ms_low"], rows["dense"]["ms_high"]) == (1000.0, 3000.0)
    assert rows["dense"]["against_ddp"] == 1.5


def test_the_bounds_of_a_median_are_those_of_published_tables() -> None:
    """Places of the 95% interval by the binomial distribution, as in tables of the sign test."""
    for count, place in ((5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (30, 10)):
        assert step.bound_median([float(value) for value in range(count, 0, -1)]) == (place, count + 1 - place)


class Backend:
    """Trainings that note what happens to them. A choice is final after seven steps."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start_training(self, contender: str, model: str) -> step_rank.Training:
        steps: list[str] = []

        def make_step() -> None:
            steps.append(contender)
            self.events.append(f"{contender} {len(steps)}")

        def note(event: str) -> Callable[[], None]:
            return lambda: self.events.append(f"{event} {contender}")

        return step_rank.Training(make_step, note("resume"), note("pause"), note("end"), lambda: len(steps) >= 7)

    def barrier(self) -> None: ...

    def enter_link(self) -> None:
        self.events.append("link")

    def take_phases(self) -> dict[str, float]:
        return {}


def test_a_training_continues_in_its_next_turn() -> None:
    backend = Backend()
    trainings = step_rank.Trainings(backend)  # type: ignore[arg-type]
    order = {"do": "steps", "warm": 4, "entry": 1, "steps": 2}
    answers = [trainings.run_order({**order, "contender": contender}) for contender in ("a", "b", "a")]
    assert [answer["made"] for answer in answers] == [10, 10, 3]  # warm, entry, measured
    assert all(len(answer["times"]) == 3 for answer in answers)
    turns = ("a", range(1, 11)), ("b", range(1, 11)), ("a", range(11, 14))
    assert backend.events == [
        event for name, steps in turns for event in (f"resume {name}", *(f"{name} {i}" for i in steps), f"pause {name}")
    ]
    trainings.run_order({"do": "link"})
    assert sorted(backend.events[-3:-1]) == ["end a", "end b"]
    assert trainings.run_order({**order, "contender": "a"})["made"] == 10
