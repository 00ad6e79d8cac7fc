"""The exchange of a bucket as tasks of the simulation: the work of the communication thread, the link, the latency."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from topkube.algorithms import Algorithm, Route, all_gather_memory, find_small_algorithm, reduce_scatter_memory
from topkube.algorithms.cost import count_wider_bytes
from topkube.planning.buckets import MOST_PIECES, BucketLength
from topkube.planning.profile import HostCost, StepProfile
from topkube.planning.simulation import COMMUNICATION, DELIVERY, LATENCY, LINK, Task
from topkube.planning.situation import Situation


class TaskList(list[Task]):
    """The tasks of a dependency graph, in the order in which each lane runs them."""

    def add(self, name: str, lane: str, seconds: float, *after: Task, fills_gaps: bool = False) -> Task:
        """Add a task, and return it."""
        self.append(Task(name, lane, seconds, after, fills_gaps=fills_gaps))
        return self[-1]


@dataclass(frozen=True)
class ExchangeParts:
    """The seconds of a bucket's exchange: the work `before` its messages, `link` time, the `latency`, and the
    work `after` its messages. The exchange has `pieces` of equal length; each piece has the whole latency."""

    name: str
    before: float
    link: float
    latency: float
    after: float
    pieces: int

    def merge_pieces(self) -> ExchangeParts:
        """Return the exchange in a single piece."""
        return dataclasses.replace(self, pieces=1)

    def halve(self, route: Route) -> tuple[ExchangeParts, ExchangeParts]:
        """Return the halves of the exchange with DeAR. They are equal, with two exceptions. If nodes gather what each
        of them sends, the first half has no messages. If they send it to owners of segments, all work before the
        messages is in the first half."""
        if route is Route.ALL_GATHER:
            first = dataclasses.replace(self, link=0.0, latency=0.0, after=0.0)
            return first, dataclasses.replace(self, before=0.0)
        if route is Route.SPLIT:
            parts = {part: getattr(self, part) / 2 for part in ("link", "latency", "after")}
            return dataclasses.replace(self, **parts), dataclasses.replace(self, **parts, before=0.0)
        parts = {part: getattr(self, part) / 2 for part in ("before", "link", "latency", "after")}
        half = dataclasses.replace(self, **parts)
        return half, half


def add_exchanges(
    tasks: TaskList, exchanges: Sequence[ExchangeParts], starts: Sequence[Task], window: int, is_prompt: bool
) -> list[Task]:
    """Add the exchanges in their order, and return the tasks that end their pieces, in this order. Up to `window`
    further pieces start before the messages of a piece have arrived. `is_prompt` pieces are finished as soon as their
    messages have arrived; the others when the thread has started `window` further pieces."""
    pieces = [
        (exchange, start) for exchange, start in zip(exchanges, starts, strict=True) for _ in range(exchange.pieces)
    ]
    sent: list[Task] = []
    finished: list[Task] = []

    def add_finish(number: int) -> None:
        exchange = pieces[number][0]
        lane = DELIVERY if is_prompt else COMMUNICATION
        finished.append(tasks.add(f"finish {exchange.name}", lane, exchange.after / exchange.pieces, sent[number]))

    for number, (exchange, start) in enumerate(pieces):
        waits = (finished[number - window - 1],) if is_prompt and number > window else ()
        before = tasks.add(f"start {exchange.name}", COMMUNICATION, exchange.before / exchange.pieces, start, *waits)
        link = tasks.add(f"send {exchange.name}", LINK, exchange.link / exchange.pieces, before)
        sent.append(tasks.add(f"latency of {exchange.name}", LATENCY, exchange.latency, link))
        if is_prompt:
            add_finish(number)
        elif number >= window:
            add_finish(number - window)
    if not is_prompt:
        for number in range(max(0, len(pieces) - window), len(pieces)):
            add_finish(number)
    return finished


def add_gather(tasks: TaskList, half: ExchangeParts, reduced: Task) -> Task:
    """Add the gather of a piece of `half` after its reduce-scatter, `reduced`. It fills gaps. Return its last task."""
    name = f"gather of {half.name}"
    start = tasks.add(f"start {name}", COMMUNICATION, half.before / half.pieces, reduced, fills_gaps=True)
    link = tasks.add(f"send {name}", LINK, half.link / half.pieces, start, fills_gaps=True)
    latency = tasks.add(f"latency of {name}", LATENCY, half.latency, link)
    return tasks.add(f"finish {name}", DELIVERY, half.after / half.pieces, latency, fills_gaps=True)


def add_agreement(tasks: TaskList, situation: Situation, *after: Task) -> Task:
    """Add the messages by which all ranks agree whether the step was finite."""
    rounds = 2 * math.ceil(math.log2(situation.ranks))
    return tasks.add("agreement", LATENCY, rounds * situation.machines.latency, *after)


def count_window(profile: StepProfile, algorithm: Algorithm, nodes: int) -> int:
    """Return how many further pieces the runtime starts before it finishes one."""
    from topkube.collectives.overlapped import UNDER_WAY

    if not profile.on_cpu:
        from topkube.collectives.device.pipeline import MOST_TRAVELLING

        return MOST_TRAVELLING if nodes > 1 and not algorithm.needs_gpu else 1
    return UNDER_WAY if algorithm.overlaps_buckets(nodes) else 0


def count_weights_window(
    profile: StepProfile, algorithm: Algorithm, nodes: int, exchanges: Sequence[ExchangeParts]
) -> int:
    """Return how many further pieces of weights the runtime starts before it finishes one: those of two chunks, or as
    many chunks as a device exchanges at a time. With two stages in host memory, a chunk is finished first."""
    if not profile.on_cpu and _packs_on_device(algorithm):
        from topkube.training.node_weights.device_chunk import DEVICE_LANES

        return DEVICE_LANES - 1
    if algorithm.has_two_stages(nodes):
        return 0
    return 2 * max((exchange.pieces for exchange in exchanges), default=0)


def _packs_on_device(algorithm: Algorithm) -> bool:
    """Return True if weights on a device are packed there, and not in host memory (node_weights/exchange.py)."""
    from topkube.collectives.all_reduce import load
    from topkube.collectives.codec_all_reduce import CodecAllReduce

    implementation = load(algorithm)
    if algorithm.has_outer_step or not isinstance(implementation, CodecAllReduce):
        return False
    return implementation.codec([], 0, "fp32").works_on_device


def estimate_exchanges(
    buckets: Sequence[BucketLength], profile: StepProfile, situation: Situation, algorithm: Algorithm
) -> list[ExchangeParts]:
    """Return the parts of the exchange of each bucket. Buckets of equal layers are estimated once."""
    estimates: dict[object, ExchangeParts] = {}
    exchanges = []
    for bucket in buckets:
        kind = (bucket.elements, bucket.itemsize, bucket.is_always_dense, bucket.pieces, bucket.tensors)
        if kind not in estimates:
            estimates[kind] = estimate_exchange(bucket, profile, situation, algorithm)
        exchanges.append(dataclasses.replace(estimates[kind], name=bucket.name))
    return exchanges


def estimate_exchange(
    bucket: BucketLength, profile: StepProfile, situation: Situation, algorithm: Algorithm
) -> ExchangeParts:
    """Return the parts of a bucket's exchange, from the declared costs, or from those that a trace has measured."""
    machines = situation.machines
    used_algorithm = choose_algorithm(bucket, algorithm)
    is_exact = bucket.is_always_dense or bucket.itemsize != 4
    exchange = situation.estimate_cost(used_algorithm, bucket.elements, is_exact)
    scale = bucket.itemsize / 4  # the catalogue counts float32
    traffic = used_algorithm.traffic(situation.build_workload(used_algorithm, bucket.elements, is_exact))
    messages = traffic.messages if machines.nodes > 1 else 0
    latency = messages * machines.latency
    link = exchange.between - latency
    if scale < 1 and not used_algorithm.compresses:
        wider = count_wider_bytes(bucket.itemsize, bucket.elements, machines.nodes)
        link = link * scale + wider / machines.link_of(used_algorithm)
    inside, share = exchange.inside * scale, _estimate_share_before(used_algorithm, situation, bucket.elements)
    if host := profile.host.get(used_algorithm.name):
        inside = _correct_measurement(host, used_algorithm, situation, bucket.elements, exchange.inside)
        share = host.before
    pieces = _count_pieces(bucket, used_algorithm, machines.nodes, machines.slots) if profile.on_cpu else 1
    return ExchangeParts(bucket.name, inside * share, link, latency, inside * (1 - share), pieces)


def _count_pieces(bucket: BucketLength, algorithm: Algorithm, nodes: int, slots: int) -> int:
    """Return in how many pieces the runtime sends a bucket, or a rank's shard of weights, between nodes. A piece
    of weights ends with the tensor in which it becomes large enough."""
    if not algorithm.in_weights:
        return bucket.pieces if algorithm.overlaps else 1
    if nodes == 1 or algorithm.has_two_stages(nodes):
        return 1
    from topkube.collectives.one_stage import PART_ELEMENTS

    pieces, elements = 0, 0
    for tensor in bucket.tensors:
        elements += tensor
        if elements >= PART_ELEMENTS * slots:
            pieces, elements = pieces + 1, 0
    return min(pieces + (elements > 0), MOST_PIECES)


def estimate_weight_exchange(
    bucket: BucketLength, profile: StepProfile, situation: Situation, algorithm: Algorithm
) -> tuple[float, ExchangeParts]:
    """Return the seconds in which the ranks of a node reduce the gradients of a bucket in each step, and the parts of
    one exchange of its weights between nodes, which happens once in a period."""
    mean = estimate_exchange(bucket, profile, situation, algorithm)
    workload = situation.build_workload(algorithm, bucket.elements)
    inside, scale = mean.before + mean.after, bucket.itemsize / 4
    gradient_seconds = (
        (reduce_scatter_memory(workload) + all_gather_memory(workload)) * scale / situation.machines.memory
    )
    gradient_seconds = min(gradient_seconds, inside)
    half = (inside - gradient_seconds) * workload.period / 2
    link, latency = mean.link * workload.period, mean.latency * workload.period
    return gradient_seconds, ExchangeParts(mean.name, half, link, latency, half, 1)


def choose_algorithm(bucket: BucketLength, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm that exchanges the bucket if large buckets are exchanged by `algorithm`."""
    return find_small_algorithm(algorithm) if bucket.is_always_dense else algorithm


def _estimate_share_before(algorithm: Algorithm, situation: Situation, elements: int) -> float:
    """Return the share of the work in memory that comes before the messages: the reduction inside the node, and half of
    the rest if the algorithm selects."""
    workload = situation.build_workload(algorithm, elements)
    whole = algorithm.traffic(workload).memory
    if not whole:
        return 0.5
    reduction = min(reduce_scatter_memory(workload), whole)
    return (reduction + (whole - reduction) / 2 if algorithm.compresses else reduction) / whole


def _correct_measurement(
    host: HostCost, algorithm: Algorithm, situation: Situation, elements: int, inside: float
) -> float:
    """Return the measured seconds of the communication thread, plus the difference that the catalogue declares between
    this cluster and the traced cluster."""
    workload = dataclasses.replace(situation.build_workload(algorithm, elements), nodes=host.nodes, slots=host.slots)
    traced_seconds = algorithm.traffic(workload).memory / situation.machines.memory
    measured = host.fixed + host.per_element * elements
    if not host.per_element:
        return host.fixed + inside
    return max(measured + inside - traced_seconds, measured / 4)
