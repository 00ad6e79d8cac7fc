"""A residual through any history of exchanges, steps and discarded gradients: nothing is lost or counted twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from topkube.collectives.error_feedback import Residual

LENGTH = 6
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("exchange"), st.integers(0, 10_000), st.sampled_from([1.0, 2.0**10, 2.0**-3])),
        st.tuples(st.just("not finite"), st.integers(0, 10_000), st.just(1.0)),
        st.tuples(st.sampled_from(["step", "discard"]), st.just(0), st.just(1.0)),
    ),
    max_size=30,
)


def exchange(residual: Residual, gradient: np.ndarray, scale: float, seed: int) -> np.ndarray:
    """Send some entries of residual + gradient, as a collective does. Return what was sent, in true units."""
    residual.prepare()
    residual.rescale(scale)
    np.add(residual.current, gradient * np.float32(scale), out=residual.pending)
    chosen = np.random.default_rng(seed).random(LENGTH) < 0.4
    sent = np.where(chosen, residual.pending, 0) / scale
    residual.clear(np.flatnonzero(chosen))
    return sent


@given(EVENTS)
def test_what_was_sent_and_the_residual_add_up_to_the_gradients_of_the_steps(
    events: list[tuple[str, int, float]],
) -> None:
    residual = Residual(LENGTH)
    committed_gradients, committed_sent = np.zeros(LENGTH), np.zeros(LENGTH)
    gradients, sent = np.zeros(LENGTH), np.zeros(LENGTH)  # since the last step or discard
    for event, seed, scale in events:
        if event == "exchange":
            gradient = np.random.default_rng(seed).integers(-8, 9, LENGTH).astype(np.float32)  # sums are exact
            sent += exchange(residual, gradient, scale, seed)
            gradients += gradient
            residual.accept()
        elif event == "not finite":
            before = residual.current.copy()
            exchange(residual, np.full(LENGTH, np.nan, np.float32), residual.loss_scale, seed)
            np.testing.assert_array_equal(residual.current, before)
        else:
            if event == "step":
                residual.commit()
                committed_gradients, committed_sent = committed_gradients + gradients, committed_sent + sent
            else:
                residual.discard()
            gradients, sent = np.zeros(LENGTH), np.zeros(LENGTH)
            assert not residual.is_tentative
        unsent = residual.committed[0] / residual.loss_scale
        np.testing.assert_array_equal(committed_sent + unsent, committed_gradients)
        if residual.is_tentative:
            unsent_now = residual.current / residual.loss_scale
            np.testing.assert_array_equal(committed_sent + sent + unsent_now, committed_gradients + gradients)


def test_one_exchange_per_step_holds_two_copies() -> None:
    residual = Residual(LENGTH)
    buffers = {id(residual.current), id(residual.pending)}
    for seed in range(5):
        exchange(residual, np.ones(LENGTH, np.float32), 1.0, seed)
        residual.accept()
        residual.commit()
        assert {id(residual.current), id(residual.pending)} == buffers


def test_discard_range_clears_residual_and_velocity_in_the_range() -> None:
    residual = Residual(LENGTH, momentum=0.5)
    residual.prepare()
    residual.arriving[:] = 1
    residual.accumulate()
    residual.accept()
    residual.discard_range(2, 4)
    residual.commit()
    assert residual.current.tolist() == [1, 1, 0, 0, 1, 1]
    assert residual.velocity.tolist() == [1, 1, 0, 0, 1, 1]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_momentum_counts_once_in_a_step_of_several_exchanges(micro_batches: list[int]) -> None:
    """A gradient that comes in parts leaves the same residual and velocity as the gradient in one exchange."""
    whole, in_parts = (Residual(LENGTH, momentum=0.5, gain=0.25) for _ in range(2))
    for count in micro_batches:
        for residual, exchanges in ((whole, 1), (in_parts, count)):
            for _ in range(exchanges):
                residual.prepare()
                residual.arriving[:] = 60 / exchanges
                residual.accumulate()
                residual.accept()
            residual.commit()
    np.testing.assert_allclose(in_parts.current, whole.current, rtol=1e-5)
    np.testing.assert_allclose(in_parts.velocity, whole.velocity, rtol=1e-5)
