"""The fit of the cost model to measured steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from topkube.algorithms import Choice, Machines
from topkube.training.exchange.tuning.step_times import Measurement

WRONG = 0.1
"""A prediction is wrong if it differs from the measurement by more than this share. A choice must be faster than the
present choice by this share."""


def is_wrong(predicted: Choice, measured: Measurement) -> bool:
    """Return True if the exchange took another time than the choice predicts."""
    seconds = predicted.between + predicted.inside
    return abs(measured.between + measured.inside - seconds) > WRONG * seconds


def find_same(ranked: Sequence[Choice], choice: Choice) -> Choice:
    """Return the choice of `ranked` with the algorithm and the format of `choice`, and with its own prediction."""
    return next(other for other in ranked if is_same(other, choice))


def is_same(choice: Choice, other: Choice) -> bool:
    """Return True if both are the same algorithm and format, whatever they predict."""
    return (choice.algorithm, choice.dense_wire) == (other.algorithm, other.dense_wire)


def fit_machines(
    machines: Machines, present: Choice, measured: Measurement, rank: Callable[[Machines], Sequence[Choice]]
) -> Machines:
    """Return machines for which the model predicts what was measured with the `present` choice. Values that were not
    measured stay. `rank` returns the choices with their predictions for given machines."""
    predicted = find_same(rank(machines), present)
    # The time between nodes has two parts: the latency, which an infinitely fast link has too, and the bytes.
    latency_seconds = find_same(rank(dataclasses.replace(machines, link=math.inf)), present).between
    predicted_bytes_seconds = predicted.between - latency_seconds
    measured_bytes_seconds = measured.between - latency_seconds
    link, memory = machines.link, machines.memory
    if predicted_bytes_seconds > 0 and measured.between > 0:  # at least a share WRONG of the time is that of the bytes
        link *= predicted_bytes_seconds / max(measured_bytes_seconds, WRONG * measured.between)
    if predicted.inside > 0 and measured.inside > 0:
        memory *= predicted.inside / measured.inside
    return dataclasses.replace(machines, link=link, memory=memory)
