"""Predict the time of a training step on a cluster: the step's dependency graph, and its simulation.

Backward produces gradients; the rule of the runtime puts them into buckets (training/exchange/buckets.py). A bucket's
exchange has four parts: the work of the communication thread before its messages (reduce inside the node, select), the
link, the latency of messages that wait for each other, and the work after them (add, gather inside the node). The
catalogue of algorithms declares bytes and messages. A trace replaces its estimate of the thread's work by measurements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

from topkube import algorithms
from topkube.algorithms import DENSE, Algorithm, Cost, Machines, Workload, estimate_cost, reduce_scatter_memory
from topkube.errors import ArgumentError
from topkube.installation import install_command
from topkube.planning.profile import Gradient, HostCost, StepProfile
from topkube.planning.simulation import COMMUNICATION, COMPUTE, DELIVERY, INPUT, LATENCY, LINK, Task, simulate

_MANY_BUCKETS = 32
"""With more buckets, their pieces are not simulated one by one: the buckets overlap like pieces."""


@dataclass(frozen=True)
class Situation:
    """What a step is predicted for: the cluster, the settings of the aggregation, and what overlaps.

    `dense_wire` is the format of dense values between nodes. `period` is the number of steps from one exchange of
    weights to the next (the prediction is the mean step); None stands for the smallest period of each algorithm.
    `cores` are the processor cores of a node that its ranks share, infinite if a thread never waits for a core.
    `overlap` is False if exchanges begin after backward and follow one another. `is_input_pipelined` is False if the
    step waits until its batch is prepared.
    """

    machines: Machines
    density: float = 0.01
    wire: str = "bf16"
    cores: float = math.inf
    overlap: bool = True
    is_input_pipelined: bool = True
    dense_wire: str = "fp32"
    period: int | None = None

    @property
    def ranks(self) -> int:
        return self.machines.nodes * self.machines.slots

    def workload(self, algorithm: Algorithm, elements: int, small: bool = False) -> Workload:
        """Return the exchange of `elements` values with `algorithm`; values of a `small` bucket are never rounded."""
        period = algorithm.least_period if self.period is None else self.period
        machines, dense_wire = self.machines, "fp32" if small else self.dense_wire
        return Workload(machines.nodes, machines.slots, elements, self.density, self.wire, dense_wire, period)

    def estimate_cost(self, algorithm: Algorithm, elements: int, small: bool = False) -> Cost:
        """Return the cost of this exchange with `algorithm`."""
        load = self.workload(algorithm, elements, small)
        return estimate_cost(algorithm, self.machines, elements, load.density, load.wire, load.dense_wire, load.period)


@dataclass(frozen=True)
class Prediction:
    """A predicted step. Times are seconds. `alone` is the step of one rank that exchanges nothing, `compute` forward
    and backward of the slowest rank, `wire` the time in which the link is busy."""

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


def predict(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> Prediction:
    """Return the predicted step of `profile` with `algorithm`. Raises ArgumentError if torch is not installed, because
    the bucket rule is part of the training loop."""
    slow = slowest(profile.spread, situation.ranks)
    tasks = _step_tasks(profile, situation, algorithm, slow)
    step = simulate(tasks, situation.cores / situation.machines.slots)
    alone = profile.serial if situation.is_input_pipelined else profile.serial + profile.data
    return Prediction(
        algorithm,
        step,
        max(alone, profile.data),
        profile.compute * slow,
        sum(task.seconds for task in tasks if task.lane == LINK),
        tuple(tasks),
    )


def slowest(spread: float, ranks: int) -> float:
    """Return the expected compute time of the slowest of `ranks`, relative to the mean, if the times are normal with
    the relative standard deviation `spread` (Blom, "Statistical estimates and transformed beta-variables", 1958)."""
    if ranks <= 1 or not spread:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


# ---- the dependency graph


def _step_tasks(profile: StepProfile, situation: Situation, algorithm: Algorithm, slow: float) -> list[Task]:
    tasks: list[Task] = []

    def add(name: str, lane: str, seconds: float, *after: Task) -> Task:
        tasks.append(Task(name, lane, seconds, after))
        return tasks[-1]

    data = add("data", INPUT, profile.data)
    forward = add("forward", COMPUTE, profile.forward * slow, *(() if situation.is_input_pipelined else (data,)))
    ready: list[Task] = []
    rate = situation.machines.link if situation.machines.nodes > 1 else 0.0
    buckets = bucket_lengths(profile, algorithm, situation.ranks, rate) if situation.ranks > 1 else ()
    seconds, first, last = 0.0, 0, forward
    for bucket in buckets:
        segment = profile.gradients[first : bucket.last + 1]
        seconds = sum(gradient.seconds for gradient in segment) * slow
        last = add(f"backward to {segment[-1].name}" if segment else "backward", COMPUTE, seconds)
        ready.append(last)
        first = bucket.last + 1
    rest = sum(gradient.seconds for gradient in profile.gradients[first:]) * slow
    end = add("end of backward", COMPUTE, rest)
    done = end
    exchanges = [_exchange(bucket, profile, situation, algorithm) for bucket in buckets]
    if algorithm.in_weights:  # nodes exchange their weights in the optimizer's step
        update = add("update", COMPUTE, profile.update)
        done = _add_exchanges(add, exchanges, [update] * len(exchanges), 0, False) or update
    else:
        exchanged = exchanges if situation.overlap else [exchange.whole() for exchange in exchanges]
        window = _window(profile, algorithm) if situation.overlap else 0
        starts = ready if situation.overlap else [end] * len(exchanges)
        prompt = situation.machines.slots == 1 and window > 0
        done = _add_exchanges(add, exchanged, starts, window, prompt) or end
    if situation.machines.nodes > 1:
        rounds = 2 * math.ceil(math.log2(situation.ranks))
        done = add("agreement", LATENCY, rounds * situation.machines.latency, done, end)
    tail = profile.other if algorithm.in_weights else profile.update + profile.other
    add("update", COMPUTE, tail, done, end)
    return tasks


@dataclass(frozen=True)
class _Exchange:
    """The parts of a bucket's exchange, in seconds, in equal `pieces`."""

    name: str
    before: float
    link: float
    latency: float
    after: float
    pieces: int

    def whole(self) -> _Exchange:
        return _Exchange(self.name, self.before, self.link, self.latency, self.after, 1)


def _add_exchanges(
    add: Any, exchanges: Sequence[_Exchange], starts: Sequence[Task], window: int, prompt: bool
) -> Task | None:
    """Add the exchanges in their order, and return the task that ends the last. Up to `window` further pieces start
    before the messages of a piece have arrived. `prompt` pieces are finished as soon as their messages have arrived;
    the others when the thread has started `window` further pieces."""
    pieces = [
        (exchange, start) for exchange, start in zip(exchanges, starts, strict=True) for _ in range(exchange.pieces)
    ]
    sent: list[Task] = []
    finished: list[Task] = []

    def finish(number: int) -> None:
        exchange = pieces[number][0]
        lane = DELIVERY if prompt else COMMUNICATION
        finished.append(add(f"finish {exchange.name}", lane, exchange.after / exchange.pieces, sent[number]))

    for number, (exchange, start) in enumerate(pieces):
        waits = (finished[number - window - 1],) if prompt and number > window else ()
        before = add(f"start {exchange.name}", COMMUNICATION, exchange.before / exchange.pieces, start, *waits)
        link = add(f"send {exchange.name}", LINK, exchange.link / exchange.pieces, before)
        sent.append(add(f"latency of {exchange.name}", LATENCY, exchange.latency, link))
        if prompt:
            finish(number)
        elif number >= window:
            finish(number - window)
    if not prompt:
        for number in range(max(0, len(pieces) - window), len(pieces)):
            finish(number)
    return finished[-1] if finished else None


def _window(profile: StepProfile, algorithm: Algorithm) -> int:
    """Return how many further pieces the runtime starts before it finishes one."""
    from topkube.collectives.overlapped import UNDER_WAY

    if not profile.on_cpu:
        return 1  # collectives/device/pipeline.py reduces two buckets at the same time
    return UNDER_WAY if algorithm.overlaps else 0


def _exchange(bucket: BucketLength, profile: StepProfile, situation: Situation, algorithm: Algorithm) -> _Exchange:
    machines = situation.machines
    own = _choose_algorithm(bucket, algorithm, machines.nodes, situation.density)
    is_exact = bucket.small or bucket.itemsize != 4
    exchange = situation.estimate_cost(own, bucket.elements, is_exact)
    scale = bucket.itemsize / 4  # the catalogue counts float32
    traffic = own.traffic(situation.workload(own, bucket.elements, is_exact))
    messages = traffic.messages if machines.nodes > 1 else 0
    latency = messages * machines.latency
    link = (exchange.between - latency) * (1.0 if own.compresses else scale)
    inside, share = exchange.inside * scale, _share_before(own, situation, bucket.elements)
    if host := profile.host.get(own.name):
        inside = _correct_measurement(host, own, situation, bucket.elements, exchange.inside)
        share = host.before
    pieces = bucket.pieces if own.overlaps and profile.on_cpu else 1
    return _Exchange(bucket.name, inside * share, link, latency, inside * (1 - share), pieces)


def _choose_algorithm(bucket: BucketLength, algorithm: Algorithm, nodes: int, density: float) -> Algorithm:
    if bucket.small and algorithm.compresses:
        return algorithms.resolve(DENSE, nodes, bucket.elements, density)
    return algorithm


def _share_before(algorithm: Algorithm, situation: Situation, elements: int) -> float:
    """Return the share of the work in memory that comes before the messages: the reduction inside the node, and half of
    the rest if the algorithm selects."""
    load = situation.workload(algorithm, elements)
    whole = algorithm.traffic(load).memory
    if not whole:
        return 0.5
    first = min(reduce_scatter_memory(load), whole)
    return (first + (whole - first) / 2 if algorithm.compresses else first) / whole


def _correct_measurement(
    host: HostCost, algorithm: Algorithm, situation: Situation, elements: int, inside: float
) -> float:
    """Return the measured seconds of the communication thread, corrected by what the catalogue declares to differ
    between the traced cluster and this cluster."""
    load = dataclasses.replace(situation.workload(algorithm, elements), nodes=host.nodes, slots=host.slots)
    there = algorithm.traffic(load).memory / situation.machines.memory
    measured = host.fixed + host.per_element * elements
    if not host.per_element:
        return host.fixed + inside
    return max(measured + inside - there, measured / 4)


# ---- buckets


@dataclass(frozen=True)
class BucketLength:
    """A bucket: `last` is the position of the gradient that completes it."""

    name: str
    elements: int
    itemsize: int
    small: bool
    last: int
    pieces: int


def bucket_lengths(
    profile: StepProfile, algorithm: Algorithm, ranks: int, rate: float = 0.0
) -> tuple[BucketLength, ...]:
    """Return the buckets that the runtime plans for the gradients of `profile`, in the order of their exchanges. `rate`
    is the bytes per second that a node sends to other nodes (0: unknown)."""
    largest = _largest(profile, algorithm.compresses, ranks)
    return _plan_buckets(profile.gradients, largest, rate if largest is None else 0.0)


def _largest(profile: StepProfile, compresses: bool, ranks: int) -> int | None:
    try:
        from topkube.training.exchange.buckets import largest_bucket
    except ImportError as error:
        raise ArgumentError(
            f"a step cannot be predicted: {error}",
            cause="torch is not installed; the rule that makes buckets is part of the training loop",
            next_step=install_command("train"),
        ) from error
    return profile.bucket_bytes or largest_bucket(compresses, profile.on_cpu, ranks)


@functools.lru_cache(maxsize=64)
def _plan_buckets(gradients: tuple[Gradient, ...], largest: int | None, rate: float) -> tuple[BucketLength, ...]:
    import torch

    from topkube.training.exchange.buckets import SMALL_ELEMENTS, plan_sizes

    types = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    parameters: list[Any] = [
        SimpleNamespace(
            position=position,
            length=gradient.elements,
            dtype=types[gradient.itemsize],
            small=gradient.small or gradient.elements < SMALL_ELEMENTS or gradient.itemsize == 8,
            has_rows=False,
        )
        for position, gradient in enumerate(gradients)
    ]
    planned = plan_sizes(parameters, largest, rate)
    latest, lengths = -1, []
    for number, bucket in enumerate(planned):
        members: list[Any] = bucket.parameters
        latest = max(latest, *(member.position for member in members))
        pieces = _pieces(bucket.length * bucket.dtype.itemsize) if len(planned) <= _MANY_BUCKETS else 1
        lengths.append(
            BucketLength(f"bucket {number}", bucket.length, bucket.dtype.itemsize, bucket.small, latest, pieces)
        )
    return tuple(lengths)


def _pieces(nbytes: int) -> int:
    """Return in how many pieces a dense bucket of `nbytes` bytes travels."""
    import numpy as np

    from topkube.collectives.overlapped import split

    return len(split(np.empty(nbytes, np.uint8)))  # no page of it is touched
