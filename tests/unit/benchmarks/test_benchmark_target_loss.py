"""benchmarks/target_loss.py: steps and seconds to a target loss, the fastest peer, and how the page shows them."""

from __future__ import annotations

import pytest

import target_loss
import target_loss_report

QUANTILE_OF_TWO_VALUES = 12.706
"""The 97.5% quantile of Student's t for the mean of two values."""


def build_run(contender: str, evaluations: list[list[float]], seed: int = 0) -> target_loss.Row:
    figures = {"model": "char_gpt", "optimizer": "adamw", "steps": 100}
    return {"contender": contender, "seed": seed, "evaluations": evaluations, **figures}


def build_times(contender: str, *turns_ms: float) -> target_loss.Row:
    figures = {"model": "char_gpt", "sent_kb": 1.0, "date": "2026-01-01", "load": 0.5}
    return {"contender": contender, "optimizer": "adamw", "rate": "100mbit", "turns_ms": list(turns_ms), **figures}


def find_row(rows: list[target_loss.Row], contender: str, margin: float) -> target_loss.Row:
    return next(row for row in rows if (row["contender"], row["margin_percent"]) == (contender, margin))


@pytest.mark.parametrize(
    ("evaluations", "steps"),
    [
        ([[10, 3.0], [20, 2.0], [30, 1.0]], 15.0),
        ([[10, 3.0], [20, 2.5]], 20.0),
        ([[10, 2.0], [20, 1.0]], 10.0),
        ([[10, 3.0], [20, 2.4], [30, 2.9], [40, 1.0]], 10 + 10 * 0.5 / 0.6),
        ([[10, 3.0], [20, 2.51]], None),
    ],
    ids=["between two evaluations", "at the last", "at the first", "the first time", "never"],
)
def test_steps_lie_on_a_line_between_evaluations(evaluations: list[list[float]], steps: float | None) -> None:
    assert target_loss.find_steps_to_target(evaluations, 2.5) == (None if steps is None else pytest.approx(steps))


def test_dense_steps_at_the_beginning_have_a_time_of_their_own() -> None:
    def compute_seconds(steps: int, dense_steps: int) -> float:
        return target_loss.compute_seconds_to_target(steps, ms=20.0, dense_steps=dense_steps, dense_ms=50.0)

    assert compute_seconds(steps=100, dense_steps=0) == pytest.approx(100 * 0.020)
    assert compute_seconds(steps=100, dense_steps=10) == pytest.approx(10 * 0.050 + 90 * 0.020)
    assert compute_seconds(steps=5, dense_steps=10) == pytest.approx(5 * 0.050)


def test_a_contender_is_compared_with_the_fastest_peer_that_reaches_the_target() -> None:
    """DDP ends at 2.0, so the targets are 2.02 and 2.1. PowerSGD has the shortest step and reaches only 2.1."""
    runs = [
        build_run("ddp", [[50, 2.12], [100, 2.0]]),
        build_run("powersgd4", [[50, 2.2], [100, 2.1]]),
        build_run("onebit", [[50, 2.22], [100, 2.02]]),
    ]
    rows = target_loss.compare(
        runs, [build_times("ddp", 40.0), build_times("powersgd4", 10.0), build_times("onebit", 20.0)]
    )
    ddp, onebit = find_row(rows, "ddp", 1.0), find_row(rows, "onebit", 1.0)
    assert ddp["steps"] == pytest.approx(50 + 50 * (2.12 - 2.02) / (2.12 - 2.0))  # on a line between evaluations
    assert ddp["against_best"] == pytest.approx(1.0)
    assert onebit["seconds"] == pytest.approx(100 * 0.020)
    assert onebit["against_best"] == pytest.approx(ddp["seconds"] / onebit["seconds"])
    assert find_row(rows, "powersgd4", 1.0)["seconds"] is None
    powersgd = find_row(rows, "powersgd4", 5.0)
    assert powersgd["seconds"] == pytest.approx(10 * 0.040 + 90 * 0.010)  # the first tenth of the run is dense
    onebit_seconds = 0.020 * (50 + 50 * (2.22 - 2.1) / (2.22 - 2.02))
    assert find_row(rows, "onebit", 5.0)["against_best"] == pytest.approx(powersgd["seconds"] / onebit_seconds)


def test_a_run_that_misses_the_target_leaves_the_contender_without_a_time() -> None:
    runs = [build_run(name, [[100, 2.0]], seed) for name in ("ddp", "onebit") for seed in (0, 1)]
    runs[-1]["evaluations"] = [[100, 2.03]]
    rows = target_loss.compare(runs, [build_times("ddp", 40.0), build_times("onebit", 20.0)])
    missed = find_row(rows, "onebit", 1.0)
    assert (missed["seeds"], missed["reached"], missed["seconds"]) == (2, 1, None)
    assert find_row(rows, "onebit", 5.0)["reached"] == 2


def test_the_range_spans_all_seeds_and_turns() -> None:
    runs = [build_run(name, [[100, 2.0]], seed) for name in ("ddp", "onebit") for seed in (0, 1)]
    rows = target_loss.compare(runs, [build_times("ddp", 40.0, 60.0, 50.0), build_times("onebit", 20.0, 20.0, 10.0)])
    onebit = find_row(rows, "onebit", 1.0)
    assert onebit["against_best"] == pytest.approx(2.5)
    assert onebit["range"] == pytest.approx([2.0, 5.0])


def test_times_that_are_measured_again_replace_the_stored_times() -> None:
    stored = [build_times("ddp", 1.0), build_times("onebit", 2.0)]
    merged = target_loss.merge_times(stored, [build_times("onebit", 9.0)])
    assert [(row["contender"], row["turns_ms"]) for row in merged] == [("ddp", [1.0]), ("onebit", [9.0])]


def test_the_page_shows_who_misses_the_target() -> None:
    runs = [
        build_run("ddp", [[50, 3.0], [100, 2.0]]),
        build_run("powersgd4", [[100, 2.05]]),
        build_run("onebit", [[100, 2.0]]),
    ]
    measured = [build_times("ddp", 40.0), build_times("powersgd4", 10.0), build_times("onebit", 20.0)]
    stored = {"facts": {}, "runs": runs, "times": measured}
    stored |= {"compared": target_loss.compare(runs, measured), "losses": target_loss.compare_losses(runs)}
    tables = target_loss_report.build_section(stored)
    lines = tables["TARGET_LOSS"].splitlines()
    assert [line.split(" | ")[0] for line in lines[4:]] == [
        "| DDP with PowerSGD rank 4",
        "| **TopKube onebit**",
        "| DDP",
    ]
    assert "not reached | – | –" in lines[4]
    assert "100 | 2 | 1.98 (1.98–1.98)" in lines[5]
    row = "| 120,000 parameters, AdamW, 100 steps, DDP with PowerSGD rank 4 | 1 | 2.0000 | 2.0500 | +2.50% | – |"
    assert row in tables["LAST_LOSSES"]


def test_last_losses_are_compared_with_ddp_of_the_same_seed() -> None:
    ends = {("ddp", 0): 2.0, ("ddp", 1): 4.0, ("onebit", 0): 2.02, ("onebit", 1): 4.12, ("onebit", 2): 9.0}
    runs = [build_run(name, [[100, loss]], seed) for (name, seed), loss in ends.items()]
    (onebit,) = target_loss.compare_losses(runs)
    assert onebit["each_seed"] == pytest.approx([1.0, 3.0])
    assert onebit["difference_percent"] == pytest.approx(2.0)
    standard_error = 1.0  # of the mean of 1 and 3
    half = QUANTILE_OF_TWO_VALUES * standard_error
    assert onebit["interval_percent"] == pytest.approx([2.0 - half, 2.0 + half], abs=1e-3)


def test_runs_of_another_length_are_compared_separately() -> None:
    runs = [build_run("ddp", [[100, 2.0]]), build_run("onebit", [[100, 3.0]])]
    longer = [{**build_run(name, [[200, 1.0]]), "steps": 200} for name in ("ddp", "onebit")]
    rows = target_loss.compare(runs + longer, [build_times("ddp", 40.0), build_times("onebit", 20.0)])
    reached = {row["length"]: row["reached"] for row in rows if row["contender"] == "onebit"}
    assert reached == {100: 0, 200: 1}
    assert [row["difference_percent"] for row in target_loss.compare_losses(runs + longer)] == pytest.approx([50, 0])


def test_models_are_compared_apart() -> None:
    runs = [build_run("ddp", [[100, 2.0]]), build_run("onebit", [[100, 2.0]])]
    runs += [{**run, "model": "char_gpt_800k", "evaluations": [[100, 1.0]]} for run in runs]
    times = [build_times("ddp", 40.0), build_times("onebit", 20.0)]
    times += [{**row, "model": "char_gpt_800k", "turns_ms": [4 * row["turns_ms"][0]]} for row in times]
    seconds = {row["model"]: row["seconds"] for row in target_loss.compare(runs, times) if row["contender"] == "onebit"}
    assert seconds == pytest.approx({"char_gpt": 2.0, "char_gpt_800k": 8.0})
    assert [row["model"] for row in target_loss.compare_losses(runs)] == ["char_gpt", "char_gpt_800k"]


def test_an_interrupted_benchmark_continues_with_what_is_missing() -> None:
    runs = [build_run("ddp", [[100, 2.0]])]
    assert target_loss.find_missing_runs(runs, ["ddp", "onebit"], "char_gpt", ["adamw"], seeds=2, steps=100) == [
        ("onebit", "adamw", 0, 100),
        ("ddp", "adamw", 1, 100),
        ("onebit", "adamw", 1, 100),
    ]
    measured, names, gpt = [build_times("ddp", 1.0)], ["ddp", "onebit"], "char_gpt"
    assert target_loss.find_missing_times(measured, ["ddp"], gpt, "adamw", "100mbit", again=False) == []
    assert target_loss.find_missing_times(measured, ["ddp"], gpt, "adamw", "100mbit", again=True) == ["ddp"]
    assert target_loss.find_missing_times(measured, ["ddp"], gpt, "adamw", "1gbit", again=False) == ["ddp"]
    assert target_loss.find_missing_times(measured, names, gpt, "adamw", "100mbit", again=False) == names
