"""The trial of a choice against the one before it: how steps are measured, by which optimizer, and what decides."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.algorithms import Choice, find_algorithm
from topkube.training.exchange.tuning import step_times
from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS, Measurement
from topkube.training.exchange.tuning.trial import MOST_MEASUREMENTS, Side, Trial
from unit.training.tuned import (
    DENSE,
    build_compressing,
    build_machines,
    decide,
    read_prediction,
)


def run_trial(monkeypatch: Any, *measured: tuple[float, float]) -> tuple[list[str], bool, str]:
    """Let `auto` measure (seconds per step, interquartile range) until nothing is left. Return the algorithms after
    each measurement, if the choice is final, and its summary."""
    tuned, names = build_compressing(monkeypatch), []
    between, inside = read_prediction(tuned)
    for step, spread in measured:
        assert not tuned.is_settled
        decide(tuned, step, between, inside, spread)
        assert tuned.choice is not None
        names.append(tuned.choice.algorithm.name)
    return names, tuned.is_settled, tuned.summary


def test_a_trial_is_not_decided_by_a_machine_that_becomes_slower(monkeypatch: Any) -> None:
    """All steps become slower by a quarter after the first measurement."""
    names, is_settled, summary = run_trial(
        monkeypatch, *[(seconds, 0.0) for seconds in (0.30, 0.30, 0.375, 0.30, 0.375, 0.30, 0.375)]
    )
    assert (names, is_settled) == ([*["int4", DENSE] * 3, "int4"], True)
    assert "kept: 300 ms per step, 356 ms before" in summary


@given(st.floats(-0.08, 0.08), st.sampled_from([0.0, 0.2]))
def test_a_steady_change_of_all_steps_does_not_decide_a_trial(drift: float, gain: float) -> None:
    choice = Choice(find_algorithm("int4"), "fp32", 1.0, 0.0, 1.0)
    trial = Trial(Side(choice, build_machines()), Side(choice, build_machines()))
    for number in range(MOST_MEASUREMENTS):
        side = (trial.earlier, trial.tried)[number % 2]
        side.measured.append(Measurement(((1 + drift * number) * (1 - gain * (number % 2)),) * COUNTED_STEPS, 0.1, 0.1))
        if number and (verdict := trial.judge()) is not None:
            break
    assert verdict == (gain > 0)


def test_a_trial_goes_on_as_long_as_the_noise_is_larger_than_the_difference(monkeypatch: Any) -> None:
    noisy, clear = 0.06, 0.02
    names, is_settled, _ = run_trial(monkeypatch, (0.30, noisy), (0.26, noisy))
    assert (names, is_settled) == (["int4", DENSE], False)
    names, is_settled, _ = run_trial(monkeypatch, (0.30, clear), (0.26, clear))
    assert (names, is_settled) == (["int4", "int4"], True)
    names, is_settled, _ = run_trial(monkeypatch, (0.30, noisy), (0.31, noisy), (0.30, noisy), (0.27, noisy))
    assert (names, is_settled) == (["int4", DENSE, "int4", DENSE], False)


def test_a_trial_ends_after_nine_measurements(monkeypatch: Any) -> None:
    for spread, second, name in ((0.05, 0.27, "int4"), (0.05, 0.33, DENSE), (0.2, 0.27, DENSE)):
        measured = [(seconds, spread) for seconds in (*(0.30, 0.27, 0.30, second) * 2, 0.30)]
        names, is_settled, _ = run_trial(monkeypatch, *measured)
        assert (names, is_settled) == ([*["int4", DENSE] * 4, name], True), "a gain has to exceed the noise"


def judge_trial(draw: Callable[[int], float], gain: float) -> bool:
    """Return what a trial decides if its steps take `draw(number)`, and with the tried choice less by `gain`."""
    choice, numbers = Choice(find_algorithm("int4"), "fp32", 1.0, 0.0, 1.0), itertools.count()
    trial = Trial(Side(choice, build_machines()), Side(choice, build_machines()))
    trial.in_force, verdict = trial.earlier, None
    while verdict is None:
        factor = 1 - gain if trial.in_force is trial.tried else 1.0
        steps = tuple(draw(next(numbers)) * factor for _ in range(COUNTED_STEPS))
        trial.in_force.measured.append(Measurement(steps, 0.1, 0.1))
        verdict = trial.judge() if trial.tried.measured else None
        trial.change_sides()
    return verdict


@pytest.mark.parametrize("every", [2, 3, 4, 5, 8])
def test_pauses_between_steps_hide_no_gain(every: int) -> None:
    """An evaluation, an image for a logger, or a loader that delivers in bursts, every few steps. Without the pauses,
    a step takes a quarter of the time."""
    for pause in (0.6, 5.0):
        draw: Callable[[int], float] = lambda number, pause=pause: 0.17 + pause * (number % every == 0)  # noqa: E731
        gain = 0.7 if every > 2 else 0.2
        assert judge_trial(draw, gain), pause
        assert not judge_trial(draw, 0.0), pause


def test_steps_of_different_lengths_decide_no_trial_by_chance() -> None:
    lengths: dict[str, Callable[[random.Random], float]] = {
        "two": lambda r: r.choice([1.0, 3.0]) * r.gauss(1, 0.02),
        "four": lambda r: r.choice([1.0, 2.0, 4.0, 8.0]) * r.gauss(1, 0.02),
        "normal": lambda r: r.gauss(1, 0.1),
    }
    for name, draw in lengths.items():
        generator = random.Random(7)
        for gain, low, high in ((0.0, 0.0, 0.06), (-0.2, 0.0, 0.02), (0.5, 0.6, 1.0)):
            kept = sum(judge_trial(lambda _: draw(generator), gain) for _ in range(200)) / 200  # noqa: B023
            assert low <= kept <= high, (name, gain, kept)


def test_a_gain_of_a_tenth_is_found_where_all_steps_of_a_measurement_may_be_slow() -> None:
    """Steps differ by 10%, and measurements by another 5%, as on a machine that others share."""
    generator, slowness = random.Random(7), 1.0

    def draw(number: int) -> float:
        nonlocal slowness
        if number % COUNTED_STEPS == 0:
            slowness = generator.gauss(1, 0.05)
        return slowness * generator.gauss(1, 0.1)

    for gain, low, high in ((0.0, 0.0, 0.15), (0.1, 0.75, 1.0), (0.2, 0.95, 1.0)):
        kept = sum(judge_trial(draw, gain) for _ in range(400)) / 400
        assert low <= kept <= high, (gain, kept)


def test_a_choice_with_a_period_is_measured_over_whole_periods() -> None:
    """The exchange of every fourth step takes a second."""
    for period, count in ((1, COUNTED_STEPS), (4, 2), (3, 3), (20, 2)):
        times, numbers = step_times.StepTimes(), itertools.count()
        measured, now = None, 0.0
        while measured is None:
            now += 1.0 + (next(numbers) % period == 0) * period
            measured = times.note_step(now, (now, 0.0), period=period)
        *steps, between, _ = measured
        assert steps == pytest.approx([2.0] * count), period
        assert between == pytest.approx(-2.0)


def test_steps_do_not_count_while_the_exchange_changes() -> None:
    times, changing = step_times.StepTimes(), 2 * SKIPPED_STEPS
    measured = [times.note_step(float(step), (0.0, 0.0), step < changing) for step in range(changing + COUNTED_STEPS)]
    assert [numbers is not None for numbers in measured] == [False] * (changing + COUNTED_STEPS - 1) + [True]


def test_one_optimizer_at_a_time_measures_its_choice(monkeypatch: Any) -> None:
    """The steps of a generator and a discriminator alternate: neither takes the other's gain for its own."""
    first = build_compressing(monkeypatch)
    second = build_compressing(monkeypatch)
    second._world = first._world
    for step in range(SKIPPED_STEPS + COUNTED_STEPS):
        measured = first.note_step(step, (0.0, 0.0))
        assert second.note_step(step + 0.5, (0.0, 0.0)) is None
    assert measured is not None
    first.settle()
    for step in range(100, 100 + SKIPPED_STEPS + COUNTED_STEPS):
        measured = second.note_step(step, (0.0, 0.0))
    assert measured is not None


def test_many_optimizers_do_not_take_the_turn_from_each_other(monkeypatch: Any) -> None:
    first, *others = (build_compressing(monkeypatch) for _ in range(60))
    for other in others:
        other._world = first._world
    for step in range(SKIPPED_STEPS + COUNTED_STEPS):
        measured = first.note_step(float(step), (0.0, 0.0))
        assert all(other.note_step(step + 0.5, (0.0, 0.0)) is None for other in others)
    assert measured is not None


def test_ranks_pass_the_turn_at_the_same_step_whenever_they_free_an_optimizer(monkeypatch: Any) -> None:
    """Python frees an optimizer at another time on each rank. A rank that measured alone would wait for the others."""
    measured_at = []
    for is_freed in (False, True):
        first, second = build_compressing(monkeypatch), build_compressing(monkeypatch)
        second._world, kept = first._world, [first]
        assert first.note_step(0.0, (0.0, 0.0)) is None
        del first
        if is_freed:
            kept.clear()
            gc.collect()
        measured_at.append([step for step in range(1, 100) if second.note_step(float(step), (0.0, 0.0))])
    assert measured_at[0] == measured_at[1] != []


def test_an_optimizer_that_makes_no_steps_keeps_no_other_from_measuring(monkeypatch: Any) -> None:
    first = build_compressing(monkeypatch)
    second = build_compressing(monkeypatch)
    second._world = first._world
    assert first.note_step(0.0, (0.0, 0.0)) is None
    assert any(second.note_step(float(step), (0.0, 0.0)) for step in range(1, 100))
