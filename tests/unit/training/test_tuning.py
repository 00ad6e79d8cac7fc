"""The choices of `auto` and `dense` from measurements, and the changes of a choice: pure decisions, without ranks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS
from unit.training.tuned import (
    BUCKETS,
    DENSE,
    GIGABIT,
    build_compressing,
    build_machines,
    decide,
    measure_and_choose,
    read_prediction,
)


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
