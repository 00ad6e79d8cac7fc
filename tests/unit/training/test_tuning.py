"""The choices of `auto` and `dense` from measurements, and the changes of a choice: pure decisions, without ranks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import random
from collections.abc import Callable
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.algorithms import (
    BucketSize,
    Choice,
    Machines,
    find_algorithm,
    list_compressed_choices,
)
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.tuning import machines, step_times
from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS, Measurement
from topkube.training.exchange.tuning.trial import MOST_MEASUREMENTS, Side, Trial
from topkube.training.exchange.tuning.tuning import Tuning

GIGABIT = 125e6
BUCKETS = [BucketSize(5_000_000), BucketSize(2_000, small=True)]


def build_machines(link: float = GIGABIT, nodes: int = 2, nccl: float | None = None) -> Machines:
    return Machines(nodes, 2, link, memory=10e9 if nccl is None else 1e12, latency=50e-6, nccl_link=nccl)


def measure_and_choose(
    monkeypatch: Any, link: float, name: str = "auto", wire: str = "fp32", nodes: int = 2, nccl: float | None = None
) -> Tuning:
    """Return the tuning of a rank that measured a link of `link` bytes per second and has chosen."""
    world = SimpleNamespace(
        nodes=nodes, rank=1, shards=2, node_ranks=[(0, 1)] * nodes, cache={}, run_directory=None, size=2 * nodes
    )
    monkeypatch.setattr(machines, "_measure", lambda *_: build_machines(link, nodes, nccl))
    settings = AggregationSettings.from_settings(Settings(), algorithm=name, dense_wire=wire)
    tuned = Tuning(world, settings, None, is_on_device=nccl is not None)  # type: ignore[arg-type]
    tuned.choose(BUCKETS)
    return tuned


def read_prediction(tuned: Tuning) -> tuple[float, float]:
    assert tuned.choice is not None
    return tuned.choice.between, tuned.choice.inside


def decide(tuned: Tuning, step: float, between: float, inside: float, spread: float = 0.0) -> bool:
    """Let the ranks measure COUNTED_STEPS steps around `step`, whose interquartile range is about `spread`."""
    steps = [step + spread / 1.349 * NormalDist().inv_cdf((i + 0.5) / COUNTED_STEPS) for i in range(COUNTED_STEPS)]
    return tuned.decide([*steps, -between, -inside], BUCKETS)


def test_16_bits_need_permission_and_a_slow_link(monkeypatch: Any) -> None:
    for link, name, allowed, wire in [
        (GIGABIT, "auto", "fp32", "fp32"),
        (GIGABIT, "auto", "bf16", "bf16"),
        (1e12, "auto", "bf16", "fp32"),
        (1e12, "dense", "bf16", "bf16"),
    ]:
        tuned = measure_and_choose(monkeypatch, link, name, allowed)
        assert tuned.choice is not None
        assert (tuned.choice.algorithm.name, tuned.choice.dense_wire) == ("hierarchical", wire), (link, name, allowed)


def test_an_algorithm_that_is_named_and_a_single_node_measure_nothing(monkeypatch: Any) -> None:
    for name, nodes in (("hierarchical", 2), ("hitopk", 2), ("auto", 1), ("dense", 1)):
        tuned = measure_and_choose(monkeypatch, GIGABIT, name, nodes=nodes)
        assert (tuned.choice, tuned.save(), tuned.summary) == (None, None, "")
        assert all(tuned.note_step(float(step), (0.0, 0.0)) is None for step in range(100))


def test_a_comparison_is_due_once_after_the_first_steps(monkeypatch: Any) -> None:
    tuned, between, inside = measure_and_choose(monkeypatch, GIGABIT), 0.0, 0.0
    numbers = []
    for step in range(SKIPPED_STEPS + COUNTED_STEPS):
        slow = step == SKIPPED_STEPS  # a late rank once: the median does not see it
        between, inside = between + (9.0 if slow else 0.5), inside + 0.25
        numbers.append(tuned.note_step(float(step), (between, inside)))
    assert numbers == [None] * (SKIPPED_STEPS + COUNTED_STEPS - 1) + [[1.0] * COUNTED_STEPS + [-0.5, -0.25]]


def test_a_right_prediction_settles_the_choice(monkeypatch: Any) -> None:
    tuned = measure_and_choose(monkeypatch, GIGABIT)
    between, inside = read_prediction(tuned)
    assert not decide(tuned, 1.0, between * 1.05, inside)
    assert tuned.is_settled
    assert "confirmed" in tuned.summary


def test_a_link_that_is_slower_than_measured_changes_the_wire_and_a_faster_step_keeps_it(monkeypatch: Any) -> None:
    tuned = measure_and_choose(monkeypatch, 1e12, wire="bf16")
    between, inside = read_prediction(tuned)
    assert decide(tuned, 1.0, 0.2, inside), between
    assert tuned.choice is not None
    assert tuned.choice.dense_wire == "bf16"
    assert tuned.rate == pytest.approx(20_008_000 / 0.2, rel=0.01)  # 4 bytes for each of 5,002,000 elements
    assert not tuned.is_settled
    assert not decide(tuned, 0.8, 0.1, inside)
    assert (tuned.is_settled, tuned.choice.dense_wire) == (True, "bf16")
    assert "800 ms per step, 1e+03 ms before" in tuned.summary


@pytest.mark.parametrize(
    ("mpi", "nccl", "first", "second"),
    [(2e9, 3e9, "hierarchical-nccl", "hierarchical"), (3e9, 2e9, "hierarchical", "hierarchical-nccl")],
)
def test_on_gpus_the_transport_is_decided_by_the_steps(
    monkeypatch: Any, mpi: float, nccl: float, first: str, second: str
) -> None:
    for seconds, kept in ((0.8, second), (0.99, first)):
        tuned = measure_and_choose(monkeypatch, mpi, nccl=nccl)
        assert tuned.choice is not None
        assert tuned.choice.algorithm.name == first
        assert decide(tuned, 1.0, 0.0, 0.0)  # the host does not see the stages of a GPU
        assert tuned.choice.algorithm.name == second
        if decide(tuned, seconds, 0.0, 0.0):
            assert not decide(tuned, 1.0, 0.0, 0.0)
        assert (tuned.is_settled, tuned.choice.algorithm.name) == (True, kept)


def test_a_transport_that_is_far_slower_is_not_tried(monkeypatch: Any) -> None:
    tuned = measure_and_choose(monkeypatch, GIGABIT, nccl=100 * GIGABIT)
    assert not decide(tuned, 1.0, 0.0, 0.0)
    assert tuned.is_settled


def test_a_choice_that_does_not_make_steps_faster_is_taken_back(monkeypatch: Any) -> None:
    tuned = measure_and_choose(monkeypatch, 1e12, wire="bf16")
    rate = tuned.rate
    assert decide(tuned, 1.0, 0.2, 0.01)
    assert decide(tuned, 0.99, 0.1, 0.01)
    assert tuned.choice is not None
    assert (tuned.is_settled, tuned.choice.dense_wire, tuned.rate) == (False, "fp32", rate)
    assert not decide(tuned, 1.0, 0.2, 0.01)
    assert (tuned.is_settled, tuned.choice.dense_wire, tuned.rate) == (True, "fp32", rate)
    assert "restored" in tuned.summary


def test_another_rate_alone_plans_other_buckets(monkeypatch: Any) -> None:
    tuned = measure_and_choose(monkeypatch, GIGABIT)
    between, inside = read_prediction(tuned)
    assert decide(tuned, 1.0, between * 3, inside)
    assert tuned.rate == pytest.approx(GIGABIT / 3, rel=0.01)


def test_a_saved_choice_stays(monkeypatch: Any) -> None:
    tuned = measure_and_choose(monkeypatch, GIGABIT, wire="bf16")
    tuned.settle()
    state = json.loads(json.dumps(tuned.save()))
    resumed = measure_and_choose(monkeypatch, 1e12, wire="bf16")
    resumed.restore(state)
    resumed.choose(BUCKETS)
    assert resumed.choice == tuned.choice
    assert (resumed.machines, resumed.summary, resumed.is_settled) == (tuned.machines, tuned.summary, True)
    assert resumed.save() == tuned.save()


@pytest.mark.parametrize("change", ["nodes", "settings", "algorithm", "nothing saved"])
def test_a_saved_choice_of_another_job_is_made_again(monkeypatch: Any, change: str) -> None:
    state: dict[str, Any] | None = measure_and_choose(monkeypatch, GIGABIT).save()
    assert state is not None
    resumed = measure_and_choose(monkeypatch, 1e12)
    if change == "nodes":
        state["machines"]["nodes"] = 3
    elif change == "settings":
        state["settings"] = ["dense", "fp32"]
    elif change == "algorithm":
        state["algorithm"] = "from-a-later-version"
    else:
        state = None
    resumed.restore(state)
    assert (resumed.choice, resumed.machines, resumed.summary) == (None, None, "")
    resumed.choose(BUCKETS)
    assert resumed.choice is not None
    assert resumed.machines == build_machines(1e12)


def test_all_ranks_decide_alike(monkeypatch: Any) -> None:
    """Ranks that agree on the numbers have the same state after every decision."""
    ranks = [measure_and_choose(monkeypatch, 1e12, wire="bf16") for _ in range(3)]
    for numbers in ((1.0, 0.2, 0.01), (0.5, 0.1, 0.01)):
        assert len({decide(tuned, *numbers) for tuned in ranks}) == 1
        assert all(tuned.save() == ranks[0].save() for tuned in ranks)
        assert all(dataclasses.asdict(tuned.machines) == dataclasses.asdict(ranks[0].machines) for tuned in ranks)  # type: ignore[arg-type]


# ---- compression by auto


def build_compressing(
    monkeypatch: Any, link: float = GIGABIT, name: str = "auto", node_weights: str = "equal", **options: Any
) -> Tuning:
    """Return the tuning of a rank whose `auto` may also choose algorithms that compress."""
    tuned = measure_and_choose(monkeypatch, link, name, **options)
    tuned.compressed_choices = list_compressed_choices(node_weights)
    return tuned


def test_auto_begins_dense_and_tries_int4_if_it_saves_a_part_of_the_step(monkeypatch: Any) -> None:
    tuned = build_compressing(monkeypatch)
    tuned.choose(BUCKETS)
    between, inside = read_prediction(tuned)
    assert tuned.choice is not None
    assert not tuned.choice.algorithm.compresses
    assert decide(tuned, 0.3, between, inside)
    assert tuned.choice.algorithm.name == "int4"
    assert "on trial against hierarchical" in tuned.summary
    assert not tuned.is_settled


@pytest.mark.parametrize("second", [0.8, 0.99], ids=["NCCL is kept", "MPI is restored"])
@pytest.mark.parametrize(("third", "ends_at"), [(0.5, "int4"), (1.0, "dense")])
def test_on_gpus_compression_is_tried_after_the_other_transport(
    monkeypatch: Any, second: float, third: float, ends_at: str
) -> None:
    tuned = build_compressing(monkeypatch, GIGABIT, nccl=0.9 * GIGABIT)
    assert tuned.choice is not None
    assert tuned.choice.algorithm.name == "hierarchical"
    assert decide(tuned, 0.4, 0.0, 0.0)
    assert tuned.choice.algorithm.name == "hierarchical-nccl"
    assert decide(tuned, 0.4 * second, 0.0, 0.0)
    if second > 0.97:
        assert decide(tuned, 0.4, 0.0, 0.0)
    dense = "hierarchical-nccl" if second < 0.97 else "hierarchical"
    assert tuned.choice.algorithm.name == "int4"
    assert f"on trial against {dense}" in tuned.summary
    assert not tuned.is_settled
    if decide(tuned, 0.4 * third, 0.0, 0.0):
        assert not decide(tuned, 0.4 * min(second, 1.0), 0.0, 0.0)
    assert (tuned.is_settled, tuned.choice.algorithm.name) == (True, dense if ends_at == "dense" else "int4")


def test_on_gpus_compression_is_tried_if_the_other_transport_is_far_slower(monkeypatch: Any) -> None:
    tuned = build_compressing(monkeypatch, GIGABIT, nccl=0.1 * GIGABIT)
    assert decide(tuned, 0.5, 0.0, 0.0)
    assert tuned.choice is not None
    assert tuned.choice.algorithm.name == "int4"
    assert not decide(tuned, 0.3, 0.0, 0.0)
    assert (tuned.is_settled, tuned.choice.algorithm.name) == (True, "int4")


def test_auto_tries_int8_if_int4_would_gain_little_more(monkeypatch: Any) -> None:
    # 5 million elements take 40 ms with 8 bits and 20 ms with 4 bits: 20 ms are less than 3% of a step that takes 1 s
    # with dense, and 0.86 s with 4 bits.
    for step, name in ((0.5, "int4"), (1.0, "int8"), (2.0, "int8")):
        tuned = build_compressing(monkeypatch)
        assert decide(tuned, step, *read_prediction(tuned))
        assert tuned.choice is not None
        assert tuned.choice.algorithm.name == name, step


def test_int4_stays_if_steps_become_faster_and_dense_returns_otherwise(monkeypatch: Any) -> None:
    for step, name in ((0.290, "int4"), (0.292, "hierarchical")):
        tuned = build_compressing(monkeypatch)
        between, inside = read_prediction(tuned)
        assert decide(tuned, 0.3, between, inside)
        assert decide(tuned, step, 0.05, 0.01), "a gain below 10% is measured against dense once more"
        assert decide(tuned, 0.3, between, inside) == (name == "int4")
        assert tuned.choice is not None
        assert (tuned.choice.algorithm.name, tuned.is_settled) == (name, True)


@pytest.mark.parametrize("step", [5.0, 30.0])
def test_int4_is_not_tried_if_the_exchange_is_a_small_part_of_the_step(monkeypatch: Any, step: float) -> None:
    tuned = build_compressing(monkeypatch)
    between, inside = read_prediction(tuned)
    assert not decide(tuned, step, between, inside)
    assert (tuned.choice.algorithm.name, tuned.is_settled) == ("hierarchical", True)  # type: ignore[union-attr]


def test_int4_is_tried_although_waits_of_crowded_ranks_make_the_memory_look_slow(monkeypatch: Any) -> None:
    tuned = build_compressing(monkeypatch)
    between, inside = read_prediction(tuned)
    assert decide(tuned, 0.4, between, 20 * inside), "the fitted memory is 20 times slower than measured"
    assert "on trial against hierarchical" in tuned.summary
    assert decide(tuned, 0.4, between, 20 * inside)
    assert tuned.choice is not None
    assert tuned.choice.algorithm.name == "hierarchical"
    assert tuned.choice.inside == pytest.approx(20 * inside), "the prediction of the fitted memory"


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


DENSE = "hierarchical"


def test_a_trial_is_not_decided_by_a_machine_that_becomes_slower(monkeypatch: Any) -> None:
    """All steps become slower by a quarter after the first measurement."""
    names, is_settled, summary = run_trial(
        monkeypatch, *[(seconds, 0.0) for seconds in (0.30, 0.30, 0.375, 0.30, 0.375)]
    )
    assert (names, is_settled) == (["int4", DENSE, "int4", DENSE, "int4"], True)
    assert "kept: 300 ms per step, 350 ms before" in summary


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


def test_a_trial_ends_after_five_measurements(monkeypatch: Any) -> None:
    for spread, second, name in ((0.05, 0.27, "int4"), (0.05, 0.33, DENSE), (0.2, 0.27, DENSE)):
        measured = [(seconds, spread) for seconds in (0.30, 0.27, 0.30, second, 0.30)]
        names, is_settled, _ = run_trial(monkeypatch, *measured)
        assert (names, is_settled) == (["int4", DENSE, "int4", DENSE, name], True), "a gain has to exceed the noise"


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


def test_a_state_that_is_saved_in_a_trial_keeps_the_choice_in_force(monkeypatch: Any) -> None:
    tuned = build_compressing(monkeypatch)
    between, inside = read_prediction(tuned)
    assert decide(tuned, 0.3, between, inside, 0.1)
    assert decide(tuned, 0.28, between / 2, inside, 0.1)
    assert tuned.measured_seconds == pytest.approx(between), "the measurement of the choice in force"
    tuned.note_saved()
    assert tuned.choice is not None
    assert (tuned.choice.algorithm.name, tuned.is_settled, tuned.note_step(1.0, (0.0, 0.0))) == (DENSE, True, None)
    assert "kept: a state was saved during a trial" in tuned.summary


def test_a_state_that_is_saved_before_the_comparison_keeps_the_choice_and_says_why(monkeypatch: Any) -> None:
    tuned = build_compressing(monkeypatch)
    tuned.note_saved()
    assert tuned.is_settled
    assert "kept: a state was saved before the steps were compared" in tuned.summary


def test_steps_do_not_count_while_the_exchange_changes() -> None:
    times, changing = step_times.StepTimes(), 2 * SKIPPED_STEPS
    measured = [times.note_step(float(step), (0.0, 0.0), step < changing) for step in range(changing + COUNTED_STEPS)]
    assert [numbers is not None for numbers in measured] == [False] * (changing + COUNTED_STEPS - 1) + [True]


def test_dense_and_runs_that_may_not_compress_never_try_int4(monkeypatch: Any) -> None:
    for tuned in (build_compressing(monkeypatch, name="dense"), measure_and_choose(monkeypatch, GIGABIT)):
        between, inside = read_prediction(tuned)
        assert not decide(tuned, 0.2, between, inside)
        assert "int" not in tuned.summary


def test_a_choice_that_compresses_is_saved_and_restored(monkeypatch: Any) -> None:
    tuned = build_compressing(monkeypatch)
    assert decide(tuned, 0.3, *read_prediction(tuned))
    state = json.loads(json.dumps(tuned.save()))
    other = build_compressing(monkeypatch)
    other.restore(state)
    assert other.choice is not None
    assert (other.choice.algorithm.name, other.is_settled) == ("int4", True)
    dense_only = measure_and_choose(monkeypatch, GIGABIT)
    dense_only.restore(state)
    assert dense_only.choice is None, "the job forbids compression now"


def try_weights(
    monkeypatch: Any, link: float = GIGABIT, step: float = 0.3, tried: float = 0.26, node_weights: str = "own"
) -> Tuning:
    """Return the tuning after a dense step of `step` seconds and one that compresses gradients, of `tried` seconds."""
    tuned = build_compressing(monkeypatch, link, node_weights=node_weights)
    assert decide(tuned, step, *read_prediction(tuned))
    assert tuned.choice is not None
    assert tuned.choice.algorithm.name.startswith("int")
    decide(tuned, tried, 0.05, 0.01)
    return tuned


def test_auto_tries_onebit_only_if_nodes_may_have_weights_of_their_own(monkeypatch: Any) -> None:
    tuned = try_weights(monkeypatch, node_weights="equal")
    assert (tuned.choice and tuned.choice.algorithm.name, tuned.is_settled) == ("int4", True)
    tuned = try_weights(monkeypatch)
    assert "onebit" in tuned.summary
    assert not tuned.is_settled


@pytest.mark.parametrize(("weights", "kept"), [(0.2, "onebit"), (0.26, "int4")])
def test_onebit_is_compared_with_the_algorithm_that_compresses_gradients_best(
    monkeypatch: Any, weights: float, kept: str
) -> None:
    """`onebit` has the shorter exchange, but it begins after backward: only steps tell which is faster."""
    tuned = try_weights(monkeypatch)
    assert "on trial against int4" in tuned.summary
    assert tuned.choice is not None
    assert (tuned.choice.algorithm.name, tuned.is_sending_residuals) == ("hierarchical", True)
    tuned.end_residuals()
    assert (tuned.choice.algorithm.name, tuned.is_sending_residuals) == ("onebit", False)
    if decide(tuned, weights, 0.05, 0.01):
        assert (tuned.choice.algorithm.name, tuned.is_sending_residuals) == ("int4", False)
        assert not decide(tuned, 0.26, 0.05, 0.01)
    assert (tuned.choice.algorithm.name, tuned.is_settled) == (kept, True)


def test_onebit_that_is_measured_again_sends_residuals_again(monkeypatch: Any) -> None:
    tuned = try_weights(monkeypatch)
    tuned.end_residuals()
    assert decide(tuned, 0.24, 0.05, 0.01), "a gain below 10% is measured against int4 once more"
    assert tuned.choice is not None
    assert (tuned.choice.algorithm.name, tuned.is_sending_residuals) == ("int4", False)
    assert decide(tuned, 0.26, 0.05, 0.01)
    assert (tuned.choice.algorithm.name, tuned.is_sending_residuals) == ("hierarchical", True)
    assert tuned.is_settled
    tuned.end_residuals()
    assert tuned.choice.algorithm.name == "onebit"


def test_onebit_is_tried_against_dense_if_no_algorithm_for_gradients_saves_enough(monkeypatch: Any) -> None:
    tuned = build_compressing(monkeypatch, node_weights="own")
    tuned.compressed_choices = tuple(a for a in tuned.compressed_choices if a.in_weights)
    assert decide(tuned, 0.3, *read_prediction(tuned))
    assert tuned.choice is not None
    assert (tuned.choice.algorithm.name, tuned.is_sending_residuals) == ("onebit", False)
    assert "on trial against hierarchical" in tuned.summary


def test_onebit_is_tried_although_int4_was_not_faster(monkeypatch: Any) -> None:
    tuned = try_weights(monkeypatch, tried=0.3)
    assert tuned.choice is not None
    assert tuned.choice.algorithm.name == "hierarchical"
    decide(tuned, 0.3, 0.16, 0.01)
    assert tuned.choice.algorithm.name == "onebit"
    assert "on trial against hierarchical" in tuned.summary


def test_no_step_counts_that_sends_residuals(monkeypatch: Any) -> None:
    tuned = try_weights(monkeypatch)
    assert all(tuned.note_step(float(step), (0.0, 0.0)) is None for step in range(100))
    tuned.end_residuals()
    assert any(tuned.note_step(100.0 + step, (0.0, 0.0)) for step in range(SKIPPED_STEPS + COUNTED_STEPS))


@pytest.mark.parametrize("is_saved", [False, True], ids=["resumed", "continued"])
def test_a_state_that_is_saved_while_residuals_are_sent_keeps_onebit(monkeypatch: Any, is_saved: bool) -> None:
    tuned = try_weights(monkeypatch)
    state = json.loads(json.dumps(tuned.save()))
    if is_saved:
        tuned.note_saved()
    else:
        tuned = build_compressing(monkeypatch, node_weights="own")
        tuned.restore(state)
    assert tuned.choice is not None
    assert (tuned.choice.algorithm.name, tuned.is_sending_residuals, tuned.is_settled) == ("hierarchical", True, True)
    tuned.end_residuals()
    assert (tuned.choice.algorithm.name, tuned.is_settled) == ("onebit", True)


def test_auto_takes_no_signs_in_two_stages(monkeypatch: Any) -> None:
    for nodes, is_tried in ((3, True), (8, False)):
        tuned = build_compressing(monkeypatch, GIGABIT / 10, node_weights="own", nodes=nodes)
        assert decide(tuned, 2.0, *read_prediction(tuned))
        decide(tuned, 0.9, 0.1, 0.01)
        assert ("onebit" in tuned.summary) == is_tried


def test_a_saved_choice_of_own_weights_stays_with_another_number_of_nodes(monkeypatch: Any) -> None:
    """The state holds what nodes have not sent. The choice of int4 is made again: its residuals can be sent by any
    algorithm."""
    for node_weights, kept in (("own", "onebit"), ("equal", None)):
        tuned = try_weights(monkeypatch, node_weights=node_weights)
        tuned.end_residuals()
        other = build_compressing(monkeypatch, node_weights=node_weights, nodes=3)
        other.restore(json.loads(json.dumps(tuned.save())))
        assert (other.choice and other.choice.algorithm.name, other.machines) == (kept, None)
        assert other.is_settled
