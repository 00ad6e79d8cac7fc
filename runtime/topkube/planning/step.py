"""Predict the time of a training step on a cluster: the step's dependency graph, and its simulation.

Backward produces gradients; the rule of the runtime puts them into buckets (training/exchange/buckets/). A bucket's
exchange has four parts: the work of the communication thread before its messages (reduce inside the node, select), the
link, the latency of messages that wait for each other, and the work after them (add, gather inside the node). The
catalogue of algorithms declares bytes and messages. A trace replaces its estimate of the thread's work by measurements.

With DeAR (training/exchange/late/), an exchange has two halves (`ExchangeParts.halve`). The reduce-scatters overlap
with backward. Gathers run while the link would idle in backward, and overlap with the next forward. Forward waits at
the first use of a bucket's parameters, and updates them.

With a delay (training/node_weights/), nodes exchange the weights that a step has left while the next step computes its
gradients. That step adds the result before its update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from topkube.algorithms import DELAY, OVERLAP, Algorithm, count_times_fewer_bytes
from topkube.planning.buckets import BucketLength, plan_bucket_lengths
from topkube.planning.exchange_tasks import (
    TaskList,
    add_agreement,
    add_exchanges,
    add_gather,
    choose_algorithm,
    count_weights_window,
    count_window,
    estimate_exchanges,
    estimate_weight_exchange,
)
from topkube.planning.profile import StepProfile
from topkube.planning.simulation import COMMUNICATION, COMPUTE, INPUT, LATENCY, LINK, Task, simulate
from topkube.planning.situation import Situation


@dataclass(frozen=True)
class Prediction:
    """A predicted step. Times are seconds. `alone` is the step of one rank that exchanges nothing, `compute` forward
    and backward of the slowest rank, `wire` the time in which the link is busy. `tasks` are those of a step with an
    exchange."""

    algorithm: Algorithm
    step: float
    alone: float
    compute: float
    wire: float
    tasks: tuple[Task, ...]

    @property
    def efficiency(self) -> float:
        """The share of linear scaling that is reached."""
        return self.alone / self.step if self.step else 1.0


def predict_step(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> Prediction:
    """Return the predicted step of `profile` with `algorithm`. Raises ArgumentError if torch is not installed, because
    the bucket rule is part of the training loop."""
    slowdown, slots = estimate_slowest(profile.spread, situation.ranks), situation.machines.slots
    cores_of_rank = situation.cores / slots, situation.network_cores / slots
    steps_per_exchange = 1
    if situation.delay and can_delay(situation, algorithm):
        tasks, tasks_without_exchange = (
            _list_delayed_tasks(profile, situation, algorithm, slowdown, has_exchange) for has_exchange in (True, False)
        )
        steps_per_exchange = situation.build_workload(algorithm, profile.elements).period
        seconds_between_exchanges = (steps_per_exchange - 1) * simulate(tasks_without_exchange, *cores_of_rank)
        step = (simulate(tasks, *cores_of_rank) + seconds_between_exchanges) / steps_per_exchange
    else:
        is_decoupled = situation.is_decoupled and can_decouple(profile, situation, algorithm)
        tasks = (_list_decoupled_tasks if is_decoupled else _list_tasks)(profile, situation, algorithm, slowdown)
        step = simulate(tasks, *cores_of_rank)
    alone = profile.serial if situation.is_input_pipelined else profile.serial + profile.data
    return Prediction(
        algorithm,
        step,
        max(alone, profile.data),
        profile.compute * slowdown,
        sum(task.seconds for task in tasks if task.lane == LINK) / steps_per_exchange,
        tuple(tasks),
    )


def can_decouple(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> bool:
    """Return True if DeAR has an effect: it needs several nodes, gradients in host memory, and an algorithm that
    supports it."""
    return profile.on_cpu and situation.overlap and situation.machines.nodes > 1 and OVERLAP in algorithm.parameters


def can_delay(situation: Situation, algorithm: Algorithm) -> bool:
    """Return True if a delay has an effect: it needs several nodes, and an algorithm that supports it."""
    return situation.overlap and situation.machines.nodes > 1 and DELAY in algorithm.parameters


def estimate_slowest(spread: float, ranks: int) -> float:
    """Return the expected compute time of the slowest of `ranks`, relative to the mean, if the times are normal with
    the relative standard deviation `spread` (Blom, "Statistical estimates and transformed beta-variables", 1958)."""
    if ranks <= 1 or not spread:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


# ---- the dependency graph


def _list_tasks(profile: StepProfile, situation: Situation, algorithm: Algorithm, slowdown: float) -> TaskList:
    """Return the tasks of a step without a delay and without DeAR."""
    tasks = TaskList()
    data = tasks.add("data", INPUT, profile.data)
    tasks.add("forward", COMPUTE, profile.forward * slowdown, *(() if situation.is_input_pipelined else (data,)))
    buckets = _plan_buckets(profile, situation, algorithm)
    ready, end = _add_backward(tasks, profile, buckets, slowdown)
    exchanges = estimate_exchanges(buckets, profile, situation, algorithm)
    if not situation.overlap:
        exchanges = [exchange.merge_pieces() for exchange in exchanges]
    if algorithm.in_weights:  # nodes exchange their weights in the optimizer's step
        update = tasks.add("update", COMPUTE, profile.update)
        window = (
            count_weights_window(profile, algorithm, situation.machines.nodes, exchanges) if situation.overlap else 0
        )
        finished = add_exchanges(tasks, exchanges, [update] * len(exchanges), window, False) or [update]
    else:
        window = count_window(profile, algorithm, situation.machines.nodes) if situation.overlap else 0
        starts = ready if situation.overlap else [end] * len(exchanges)
        is_prompt = situation.machines.slots == 1 and window > 0
        finished = add_exchanges(tasks, exchanges, starts, window, is_prompt) or [end]
    last = finished[-1]
    if situation.machines.nodes > 1:
        last = add_agreement(tasks, situation, last, end)
    seconds_left = profile.other if algorithm.in_weights else profile.update + profile.other
    tasks.add("update", COMPUTE, seconds_left, last, end)
    return tasks


def _plan_buckets(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> Sequence[BucketLength]:
    if situation.ranks == 1:
        return ()
    machines = situation.machines
    if machines.nodes == 1:
        return plan_bucket_lengths(profile, algorithm, 1, situation.ranks, dense_wire=situation.dense_wire)
    times = count_times_fewer_bytes(algorithm, machines.nodes, machines.slots, situation.dense_wire)
    crowding = machines.slots / situation.cores
    rate = machines.link * times
    return plan_bucket_lengths(
        profile, algorithm, machines.nodes, situation.ranks, rate, crowding, situation.dense_wire
    )


def _add_backward(
    tasks: TaskList, profile: StepProfile, buckets: Sequence[BucketLength], slowdown: float
) -> tuple[list[Task], Task]:
    """Add backward. Return the tasks that complete the buckets, and the last task."""
    ready: list[Task] = []
    first = 0
    for bucket in buckets:
        segment = profile.gradients[first : bucket.last + 1]
        seconds = sum(gradient.seconds for gradient in segment) * slowdown
        ready.append(tasks.add(f"backward to {segment[-1].name}" if segment else "backward", COMPUTE, seconds))
        first = bucket.last + 1
    seconds_left = sum(gradient.seconds for gradient in profile.gradients[first:]) * slowdown
    return ready, tasks.add("end of backward", COMPUTE, seconds_left)


# ---- with a delay


def _list_delayed_tasks(
    profile: StepProfile, situation: Situation, algorithm: Algorithm, slowdown: float, has_exchange: bool
) -> TaskList:
    """Return the tasks of a step with a delay. If it `has_exchange`, the weights of the step before travel during it,
    and it adds what has arrived when all ranks have agreed on its gradients. All steps with an exchange have the same
    tasks."""
    tasks = TaskList()
    buckets = _plan_buckets(profile, situation, algorithm)
    costs = [estimate_weight_exchange(bucket, profile, situation, algorithm) for bucket in buckets]
    arrived: list[Task] = []
    for _, exchange in costs if has_exchange else ():
        before = tasks.add(f"start {exchange.name}", COMMUNICATION, exchange.before)
        link = tasks.add(f"send {exchange.name}", LINK, exchange.link, before)
        arrived.append(tasks.add(f"latency of {exchange.name}", LATENCY, exchange.latency, link))
    data = tasks.add("data", INPUT, profile.data)
    tasks.add("forward", COMPUTE, profile.forward * slowdown, *(() if situation.is_input_pipelined else (data,)))
    ready, end = _add_backward(tasks, profile, buckets, slowdown)
    reduced = [
        tasks.add(f"reduce {bucket.name}", COMMUNICATION, seconds, gradient)
        for bucket, (seconds, _), gradient in zip(buckets, costs, ready, strict=True)
    ]
    agreed = add_agreement(tasks, situation, end, *reduced[-1:])
    for (_, exchange), last in zip(costs, arrived, strict=False):  # `arrived` is empty without an exchange
        tasks.add(f"finish {exchange.name}", COMPUTE, exchange.after, agreed, last)
    tasks.add("update", COMPUTE, profile.update + profile.other, agreed)
    return tasks


# ---- with DeAR


def _list_decoupled_tasks(
    profile: StepProfile, situation: Situation, algorithm: Algorithm, slowdown: float
) -> TaskList:
    """Return the tasks of a step that begins with backward and ends with the next forward. Gathers fill gaps, and the
    piece that was reduced last is gathered first. All gathers end before forward does, so all steps have the same
    tasks."""
    from topkube.collectives.overlapped import UNDER_WAY

    buckets = _plan_buckets(profile, situation, algorithm)
    exchanges = estimate_exchanges(buckets, profile, situation, algorithm)
    is_halved = [bucket.itemsize < 8 for bucket in buckets]  # float64 is exchanged as a whole, in backward
    used = [choose_algorithm(bucket, algorithm) for bucket in buckets]
    halves = [exchange.halve(each.route) for exchange, each in zip(exchanges, used, strict=True)]
    firsts = [
        first if half else exchange for exchange, (first, _), half in zip(exchanges, halves, is_halved, strict=True)
    ]
    tasks = TaskList()
    ready, end = _add_backward(tasks, profile, buckets, slowdown)
    reduced = add_exchanges(tasks, firsts, ready, UNDER_WAY, is_prompt=True)
    owners = [number for number, first in enumerate(firsts) for _ in range(first.pieces)]
    gathers: dict[int, list[Task]] = {number: [] for number, half in enumerate(is_halved) if half}
    for number, piece in zip(owners, reduced, strict=True):
        if number in gathers:
            gathers[number].append(add_gather(tasks, halves[number][1], piece))
    agreement = add_agreement(tasks, situation, *reduced[-1:], end)
    data = tasks.add("data", INPUT, profile.data, *(() if situation.is_input_pipelined else (agreement,)))
    tasks.add("other", COMPUTE, profile.other, agreement, *(() if situation.is_input_pipelined else (data,)))
    _add_forward(tasks, profile, buckets, gathers, slowdown)
    return tasks


def _add_forward(
    tasks: TaskList,
    profile: StepProfile,
    buckets: Sequence[BucketLength],
    gathered: Mapping[int, Sequence[Task]],
    slowdown: float,
) -> None:
    """Add forward in the reverse order of backward. `gathered` has the gathers of a bucket by the number of the bucket.
    Forward uses the parameter whose gradient completes a bucket before the other parameters of the bucket. At this use,
    it waits for the gathers and updates the bucket. The optimizer's step updates the parameters of other buckets."""
    seconds, first, elements = profile.forward_seconds, len(profile.gradients), max(profile.elements, 1)
    late_elements = sum(bucket.elements for number, bucket in enumerate(buckets) if number in gathered)
    tasks.add("update", COMPUTE, profile.update * (1 - late_elements / elements))
    for number in sorted(gathered, reverse=True):
        bucket = buckets[number]
        tasks.add("forward", COMPUTE, sum(seconds[bucket.last + 1 : first]) * slowdown)
        tasks.add(f"update {bucket.name}", COMPUTE, profile.update * bucket.elements / elements, *gathered[number])
        first = bucket.last + 1
    tasks.add("forward", COMPUTE, sum(seconds[:first]) * slowdown)
