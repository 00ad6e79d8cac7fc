"""Recommendations for a cluster: the batch size, the number of workers, the link above which compression is useless.

They follow Zou et al., "Distributed training large-scale deep architectures" (2017): memory bounds the batch of a rank,
the smallest batch that reaches the wanted efficiency is enough, and the overhead that does not shrink with more ranks
bounds their number (lemma 1). Their formulas take the overhead as given; here the simulation supplies it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from topkube.algorithms import Algorithm
from topkube.planning.profile import StepProfile
from topkube.planning.situation import Situation
from topkube.planning.step import Prediction, predict_step

NODES = tuple(2**power for power in range(1, 13))
"""The numbers of nodes in tables and pictures: 2 to 4,096."""
_LARGEST_FACTOR = 1 << 12
_LINK_BOUNDS = (1e5, 1e13)
"""Bytes per second between which a break-even link is searched."""
LEAST_SAVING = 0.02
"""The share of the step that an algorithm must save to be worth its state and its effect on training."""
_OPTIMIZER_BYTES = 16
"""Bytes per parameter of weight, gradient and the two moments of Adam, in float32."""


def change_nodes(situation: Situation, nodes: int) -> Situation:
    """Return the situation with another number of nodes."""
    return dataclasses.replace(situation, machines=dataclasses.replace(situation.machines, nodes=nodes))


def change_link(situation: Situation, link: float) -> Situation:
    """Return the situation with links of `link` bytes per second."""
    return dataclasses.replace(situation, machines=dataclasses.replace(situation.machines, link=link))


def predict_nodes(
    profile: StepProfile, situation: Situation, algorithms: list[Algorithm], nodes: int
) -> list[Prediction]:
    """Return the predictions of all algorithms for a number of nodes, without their tasks, which need much memory."""
    changed = change_nodes(situation, nodes)
    return [dataclasses.replace(predict_step(profile, changed, algorithm), tasks=()) for algorithm in algorithms]


def find_most_nodes(profile: StepProfile, situation: Situation, algorithm: Algorithm, efficiency: float) -> int:
    """Return the largest of NODES up to which the efficiency stays at least `efficiency`, with the same batch per rank;
    1 if it is lower with two nodes already."""
    most = 1
    for nodes in NODES:
        if predict_step(profile, change_nodes(situation, nodes), algorithm).efficiency < efficiency:
            break
        most = nodes
    return most


def count_ranks_of_fixed_batch(prediction: Prediction, ranks: int, efficiency: float) -> int:
    """Return how many ranks can share the batch of `ranks` ranks at an efficiency of `efficiency`, at least 1.

    Lemma 1 of Zou et al.: with the overhead ratio R of one rank that computes the whole batch, G ranks reach the
    efficiency (1 + R) / (1 + G R). The overhead is the part of the step that is not forward or backward.
    """
    computed = prediction.compute * ranks
    overhead = max(prediction.step - prediction.compute, 0.0)
    if not overhead:
        return 1 << 31
    ratio = overhead / computed
    return max(1, math.floor((1 + ratio - efficiency) / (efficiency * ratio) + 1e-9))


def find_batch_factor(
    profile: StepProfile, situation: Situation, algorithm: Algorithm, efficiency: float
) -> float | None:
    """Return the factor by which the batch of `profile` must grow for the wanted efficiency; below 1 if the batch can
    shrink; None if no batch reaches the efficiency. Forward and backward take time in proportion to the batch."""
    return _find_smallest(
        lambda factor: predict_step(profile.scale_batch(factor), situation, algorithm).efficiency >= efficiency,
        1 / _LARGEST_FACTOR,
        _LARGEST_FACTOR,
    )


def count_most_samples(
    memory: float, parameters: int, activations: float, algorithm: Algorithm, situation: Situation
) -> int:
    """Return the largest batch of a rank with `memory` bytes. Weights, gradients and Adam's moments need 16 bytes per
    parameter, the algorithm its state and a copy of it, and each sample `activations` bytes."""
    workload = situation.build_workload(algorithm, parameters)
    left_bytes = memory - _OPTIMIZER_BYTES * parameters - 2 * algorithm.state_bytes(workload)
    return max(0, math.floor(left_bytes / activations))


@dataclass(frozen=True)
class BreakEven:
    """The link up to which an algorithm saves at least LEAST_SAVING of the dense step, in bytes per second. `link` is
    None if the algorithm saves that much on every link (then `is_faster` is True) or on no link."""

    link: float | None
    is_faster: bool


class BreakEvenSearch:
    """The search for the break-even links of algorithms against `dense` on a cluster. All searches begin with the same
    links, so the steps of `dense` are kept."""

    def __init__(self, profile: StepProfile, situation: Situation, dense: Algorithm) -> None:
        self._profile, self._situation, self._dense = profile, situation, dense
        self._dense_seconds: dict[float, float] = {}
        """The step of `dense` by the link in bytes per second."""

    def find(self, algorithm: Algorithm) -> BreakEven:
        """Return the break-even link of `algorithm`."""
        slow, fast = _LINK_BOUNDS
        link = _find_smallest(lambda link: self._is_dense_better(algorithm, link), slow, fast)
        if link == slow:
            return BreakEven(None, False)
        return BreakEven(link, link is None)

    def _is_dense_better(self, algorithm: Algorithm, link: float) -> bool:
        changed = change_link(self._situation, link)
        if link not in self._dense_seconds:
            self._dense_seconds[link] = predict_step(self._profile, changed, self._dense).step
        least = self._dense_seconds[link] * (1 - LEAST_SAVING)
        return least <= predict_step(self._profile, changed, algorithm).step


def _find_smallest(is_reached: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the smallest value of [low, high], to 1%, for which `is_reached` is True; `low` if it is True there,
    None if it is False at both ends. `is_reached` must be False below a value and True above it."""
    if is_reached(low):
        return low
    if not is_reached(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if is_reached(middle):
            high = middle
        else:
            low = middle
    return high
