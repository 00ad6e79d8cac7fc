"""`auto` if nodes may have weights of their own: when it tries `onebit`, and what happens to residuals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from topkube.training.exchange.tuning.step_times import COUNTED_STEPS, SKIPPED_STEPS
from topkube.training.exchange.tuning.tuning import Tuning
from unit.training.tuned import (
    BUCKETS,
    GIGABIT,
    build_compressing,
    decide,
    read_prediction,
)


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


def test_own_weights_stay_at_the_next_resume_with_more_nodes_than_auto_would_take_them_for(monkeypatch: Any) -> None:
    tuned = try_weights(monkeypatch, node_weights="own")
    tuned.end_residuals()
    state = tuned.save()
    for has_measured in (False, True, True):  # saved before and after the first backward of a resumed run
        resumed = build_compressing(monkeypatch, node_weights="own", nodes=8)
        resumed.restore(json.loads(json.dumps(state)))
        assert resumed.choice is not None
        assert resumed.choice.algorithm.name == "onebit"
        if has_measured:
            resumed.choose(BUCKETS)
        assert resumed.choice.algorithm.name == "onebit"
        state = resumed.save()
