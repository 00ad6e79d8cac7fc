"""The choices that are worth a trial, from predictions: pure functions of numbers on which all ranks agreed."""

from __future__ import annotations

from collections.abc import Sequence

from topkube.algorithms import LEAST_GAIN, Algorithm, Choice, find_least_change
from topkube.training.exchange.tuning.fitted_machines import find_same

_WORTH_A_TRIAL = 2.0
"""The other transport is tried if its predicted exchange takes at most this many times as long."""


def find_fastest_dense(ranked: Sequence[Choice]) -> Choice:
    """Return the first choice of `ranked` that does not compress."""
    return next(choice for choice in ranked if not choice.algorithm.compresses)


def find_other_transport(present: Choice, ranked: Sequence[Choice]) -> Choice | None:
    """Return the best dense choice that NCCL carries if MPI carries the present choice, or the reverse; None if it is
    predicted to be far slower."""
    others = (choice for choice in ranked if choice.algorithm.needs_gpu != present.algorithm.needs_gpu)
    fastest = next((choice for choice in others if not choice.algorithm.compresses), None)
    return fastest if fastest is not None and fastest.seconds <= _WORTH_A_TRIAL * present.seconds else None


def find_compressed(
    present: Choice, step_seconds: float, ranked: Sequence[Choice], allowed: Sequence[Algorithm]
) -> Choice | None:
    """Return the best choice that compresses gradients, if it is predicted to save enough of a step, which takes
    `step_seconds` with the present dense choice. If several choices are about as fast, it is the one that changes
    values least. `allowed` begins with these."""
    compressed = {choice.algorithm: choice for choice in ranked if choice.algorithm.compresses}
    algorithms = [algorithm for algorithm in allowed if algorithm in compressed and not algorithm.in_weights]
    times = [compressed[algorithm].seconds for algorithm in algorithms]
    found = find_least_change(algorithms, times, find_same(ranked, present).seconds, step_seconds)
    return compressed[found] if found is not None else None


def find_weights(
    present: Choice, step_seconds: float, ranked: Sequence[Choice], allowed: Sequence[Algorithm]
) -> Choice | None:
    """Return the choice with which nodes have weights of their own, if they may have them, and if its exchange is
    predicted to be shorter by enough of a step, which takes `step_seconds` with the present choice."""
    weights = next((choice for choice in ranked if choice.algorithm.in_weights), None)
    if weights is None or weights.algorithm not in allowed:
        return None
    gain = find_same(ranked, present).seconds - weights.seconds
    return weights if gain >= LEAST_GAIN * step_seconds else None
