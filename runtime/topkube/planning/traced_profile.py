"""Read the profile of a step from a trace that `topkube run --trace` wrote."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

from topkube.algorithms import OWN, Family, Workload
from topkube.planning.profile import Gradient, HostCost, StepProfile
from topkube.telemetry import trace
from topkube.telemetry.trace_files import TraceError


def read_traced_profile(content: Mapping[str, Any], name: str = "trace") -> StepProfile:
    """Return the medians over all steps and ranks of a trace that `trace_files.read_trace` returned.

    Times are processor times of the thread if it computes alone, because these do not contain waits for other
    processes; with a GPU or several threads, they are wall times. Raises TraceError if the trace has no whole step, or
    if its events or its numbers are not those of TopKube.
    """
    try:
        profile = _read_events(content, name)
        _check_numbers(profile)
        return profile
    except TraceError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise TraceError(
            f"{name} cannot be used: {type(error).__name__}: {error}",
            cause="another program or another version of TopKube wrote it",
            next_step="write a trace: topkube run --trace FILE train.py",
        ) from error


def _read_events(content: Mapping[str, Any], name: str) -> StepProfile:
    facts, events = content.get("otherData", {}), content["traceEvents"]
    # "tdur" is the processor time of an event, "dur" its wall time, both in microseconds.
    clock = "tdur" if facts.get("device", "cpu") == "cpu" and facts.get("threads", 1) == 1 else "dur"
    steps = [step for rank in _group_by_rank(events).values() for step in _list_steps(rank)]
    if not steps:
        raise TraceError(
            f"{name} has no whole training step",
            cause="it was not written by TopKube, or the run was too short",
            next_step="write a trace: topkube run --trace FILE train.py",
        )
    forward = median(
        max(_sum_seconds(step, trace.FORWARD, "forward", clock) - _sum_late_updates(step, clock), 0.0)
        + _sum_earlier_backward(step, clock)
        for step in steps
    )
    update = median(_sum_seconds(step, trace.OPTIMIZER, None, clock) for step in steps)
    gradients = _read_gradients(steps, clock)
    computed = sum(gradient.seconds for gradient in gradients) + forward + update
    whole_thread = median(_find_step_event(step)["args"]["compute_cpu_ms"] / 1e3 for step in steps)
    other = max(0.0, whole_thread - computed) if clock == "tdur" else 0.0
    compute_ms_of_ranks = [
        median(_find_step_event(step)["args"]["compute_cpu_ms"] for step in _list_steps(rank))
        for rank in _group_by_rank(events).values()
    ]
    nodes, slots = int(facts.get("nodes", 1)), max(facts.get("ranksPerNode", [1]))
    return StepProfile(
        name=name,
        forward=forward,
        gradients=gradients,
        update=update,
        other=other,
        spread=pstdev(compute_ms_of_ranks) / fmean(compute_ms_of_ranks)
        if len(compute_ms_of_ranks) > 1 and clock == "tdur"
        else 0.0,
        host=_measure_host_costs(steps, nodes, slots, _find_weight_exchange(facts, nodes), gradients),
        latency=facts.get("latencySeconds") or _fit_latency(steps, nodes, slots, facts.get("overlap") == "dear"),
        on_cpu=facts.get("device", "cpu") == "cpu",
        cores=facts.get("cores") if clock == "tdur" else None,
        bucket_bytes=facts.get("bucketBytes"),
    )


def _check_numbers(profile: StepProfile) -> None:
    """Raise ValueError or TypeError for a number that no step has: a file may contain NaN, negative times, or text."""
    numbers = [profile.forward, profile.update, profile.other, profile.spread]
    numbers += [g.seconds for g in profile.gradients]
    numbers += [g.forward for g in profile.gradients if g.forward is not None]
    numbers += [n for host in profile.host.values() for n in (host.fixed, host.per_element, host.before)]
    counts = [n for n in (profile.cores, profile.bucket_bytes) if n is not None]
    counts += [n for host in profile.host.values() for n in (host.nodes, host.slots)]
    if profile.latency is not None:
        numbers.append(profile.latency)
    if not all(0 <= number <= _MOST for number in numbers):
        raise ValueError("a time is negative, infinite or not a number")
    if not all(1 <= count <= _MOST for count in counts):
        raise ValueError("a number of nodes, ranks, cores or bytes is out of range")
    if not all(isinstance(g.elements, int) and 0 <= g.elements <= _MOST for g in profile.gradients):
        raise ValueError("a number of elements is out of range")
    if not all(g.itemsize in _ITEM_SIZES for g in profile.gradients):
        raise ValueError(f"elements have {', '.join(map(str, _ITEM_SIZES))} bytes only")
    if not profile.compute:
        raise ValueError("forward and backward take no time")


def add_host_costs(profile: StepProfile, others: Iterable[StepProfile]) -> StepProfile:
    """Return `profile` with the host costs that other traces of the same training add. Costs that were measured with
    large buckets take precedence. Raises TraceError if the model of a trace has another number of parameters."""
    host = dict(profile.host)
    for other in others:
        if other.elements != profile.elements:
            raise TraceError(
                f"{profile.name} has {profile.elements:,} parameters, and {other.name} has {other.elements:,}",
                cause="the traces are of different models",
                next_step="pass traces of one model with different algorithms",
            )
        for algorithm, measured in other.host.items():
            if algorithm not in host or not host[algorithm].per_element:
                host[algorithm] = measured
    return dataclasses.replace(profile, host=host)


Event = Mapping[str, Any]
_MOST = 1 << 60
"""The bound of all numbers of a trace."""
_ITEM_SIZES = (1, 2, 4, 8)
"""The bytes of an element of a gradient."""
_LARGE_ELEMENTS = 1 << 16
"""A bucket with fewer elements shows the fixed cost of a bucket only."""
_MOST_LATENCY_BYTES = 1 << 16
"""An exchange of more bytes does not show the latency: the bytes take most of its time."""


def _group_by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    ranks: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if "ts" in event and "cat" in event:
            ranks[event["pid"]].append(event)
    return ranks


def _list_steps(events: list[Event]) -> list[list[Event]]:
    """Return the events of each step of a rank, in order of time."""
    ordered = sorted(events, key=lambda event: event["ts"])
    bounds = [(e["ts"], e["ts"] + e["dur"]) for e in ordered if e["cat"] == trace.STEP]
    if not all(start < end for start, end in bounds):
        raise ValueError("a step takes no time")
    return [[event for event in ordered if start <= event["ts"] < end] for start, end in bounds]


def _find_step_event(step: list[Event]) -> Event:
    return next(event for event in step if event["cat"] == trace.STEP)


def _sum_seconds(step: list[Event], category: str, name: str | None, clock: str) -> float:
    events = (e for e in step if e["cat"] == category and e["ph"] == "X" and (name is None or e["name"] == name))
    return sum(float(e.get(clock, e["dur"])) for e in events) / 1e6


def _sum_late_updates(step: list[Event], clock: str) -> float:
    """Return the seconds of updates that DeAR made during forward."""
    forwards = [e for e in step if e["cat"] == trace.FORWARD and e["name"] == "forward"]
    return sum(
        float(e.get(clock, e["dur"])) / 1e6
        for e in step
        if e["cat"] == trace.OPTIMIZER and any(f["ts"] <= e["ts"] < f["ts"] + f["dur"] for f in forwards)
    )


def _list_starts_of_backward(step: list[Event]) -> list[float]:
    """Return the start of each backward of a step, in order of time. A step that accumulates gradients has several."""
    return [e["ts"] for e in step if e["cat"] == trace.BACKWARD and e["name"] == "backward"]


def _keep_last_backward(step: list[Event]) -> list[Event]:
    """Return the events of a step from the start of its last backward on. Only this one overlaps with exchanges."""
    start = max(_list_starts_of_backward(step), default=-math.inf)
    return [event for event in step if event["ts"] >= start]


def _split_at_first_backward(step: list[Event]) -> tuple[list[Event], list[Event]]:
    """Return the events before and after the start of a step's first backward, if it has several; otherwise all events,
    and none."""
    starts = _list_starts_of_backward(step)
    first = min(starts) if len(starts) > 1 else math.inf
    return [e for e in step if e["ts"] < first], [e for e in step if e["ts"] >= first]


def _sum_earlier_backward(step: list[Event], clock: str) -> float:
    """Return the seconds of all layers in the backwards before the last."""
    last = max(_list_starts_of_backward(step), default=-math.inf)
    return sum(_sum_backward((e for e in step if e["ts"] < last), clock).values())


def _is_layer(event: Event, category: str, *others: str) -> bool:
    """Return True if the event is a layer in forward or backward. `others` are the names of events that are not."""
    return event["cat"] == category and event["ph"] == "X" and event["name"] not in others


def _sum_backward(events: Iterable[Event], clock: str) -> dict[str, float]:
    """Return the seconds of backward of each layer."""
    layers: dict[str, float] = defaultdict(float)
    for event in events:
        if _is_layer(event, trace.BACKWARD, "backward", "wait for exchanges"):
            layers[event["name"]] += event.get(clock, event["dur"]) / 1e6
    return layers


def _sum_forward(step: list[Event], clock: str) -> dict[str, float]:
    """Return the seconds of forward with each layer. A layer that is used again, such as an embedding whose matrix is
    that of the head too, waits for no parameter then: this time counts for the last layer that was new."""
    layers: dict[str, float] = defaultdict(float)
    newest = ""
    for event in step:
        if _is_layer(event, trace.FORWARD, "forward"):
            newest = newest if event["name"] in layers else event["name"]
            layers[newest] += event.get(clock, event["dur"]) / 1e6
    return layers


def _find_medians(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each layer over all steps."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for layers in sums:
        for layer, value in layers.items():
            seconds[layer].append(value)
    return {layer: median(values) for layer, values in seconds.items()}


def _read_gradients(steps: list[list[Event]], clock: str) -> tuple[Gradient, ...]:
    """Return the gradients in the order of the first step, with median times. A layer's times are those of its backward
    and forward events; its gradients share them by their elements. If a step accumulates gradients, the times are those
    of its last backward and of its first forward, in which DeAR updates parameters."""
    last_backward = [_keep_last_backward(step) for step in steps]
    order: list[Event] = []
    names: set[str] = set()
    for event in (*last_backward[0], *steps[0]):  # a parameter may have its gradient in an earlier backward only
        if event["cat"] == trace.GRADIENT and event["args"]["parameter"] not in names:
            order.append(event)
            names.add(event["args"]["parameter"])
    if not order:
        raise TraceError(
            "the trace contains no gradients",
            cause="the traced steps ran no backward, for example because they accumulate gradients",
            next_step="trace steps that call backward() and optimizer.step()",
        )
    backward = _find_medians(_sum_backward(step, clock) for step in last_backward)
    parts = [_split_at_first_backward(step) for step in steps]
    forward = _find_medians(_sum_forward(first, clock) for first, _ in parts)
    accumulated = median(
        _sum_seconds(rest, trace.FORWARD, "forward", clock) + _sum_earlier_backward(rest, clock) for _, rest in parts
    )
    sizes: dict[str, int] = defaultdict(int)
    for event in order:
        sizes[_name_layer(event)] += event["args"]["elements"]
    gradients: list[Gradient] = []
    for event in order:
        args, layer = event["args"], _name_layer(event)
        share = args["elements"] / sizes[layer] if sizes[layer] else 0.0
        gradients.append(
            Gradient(
                args["parameter"],
                args["elements"],
                backward.get(layer, 0.0) * share,
                args["itemsize"],
                bool(args["small"]),
                forward.get(layer, 0.0) * share if forward else None,
            )
        )
    if forward and accumulated:  # the first forward has used all parameters before the passes that follow
        last_layer = gradients[0]
        gradients[0] = dataclasses.replace(last_layer, forward=(last_layer.forward or 0.0) + accumulated)
    return tuple(gradients)


def _name_layer(event: Event) -> str:
    name: str = event["args"]["parameter"]
    return name.rpartition(".")[0] or name


def _find_weight_exchange(facts: Mapping[str, Any], nodes: int) -> str | None:
    """Return the algorithm of the trace if its nodes exchanged weights in steps, else None."""
    name = facts.get("algorithm")
    return name if nodes > 1 and any(algorithm.in_weights for algorithm in OWN if algorithm.name == name) else None


def _measure_host_costs(
    steps: list[list[Event]], nodes: int, slots: int, weight_exchange: str | None, gradients: Sequence[Gradient]
) -> dict[str, HostCost]:
    """Return the cost of a bucket by algorithm. The processor time of the communication thread in a step is divided
    among its buckets in proportion to the times that were measured per bucket. With a `weight_exchange`, the whole time
    is the cost of that algorithm, because nodes exchange all weights together, without buckets."""
    if weight_exchange is not None:
        elements = sum(gradient.elements for gradient in gradients)
        total = fmean(_find_step_event(step)["args"]["communication_cpu_ms"] for step in steps) / 1e3
        return {weight_exchange: HostCost(nodes, slots, 0.0, total / elements, 0.5)}
    costs_of_buckets: dict[str, list[_BucketCost]] = defaultdict(list)
    for step in steps:
        for cost in _measure_bucket_costs(step):
            costs_of_buckets[cost.algorithm].append(cost)
    host_costs = {}
    for algorithm, costs in costs_of_buckets.items():
        fixed, per_element = _fit_line([(cost.elements, cost.seconds) for cost in costs])
        total = sum(cost.seconds for cost in costs)
        before = sum(cost.seconds_before for cost in costs) / total if total else 0.5
        host_costs[algorithm] = HostCost(nodes, slots, fixed, per_element, before)
    return host_costs


class _BucketCost(NamedTuple):
    """The processor time of the communication thread for one bucket in one step: in total, and before its messages."""

    algorithm: str
    elements: int
    seconds: float
    seconds_before: float


def _measure_bucket_costs(step: list[Event]) -> Iterator[_BucketCost]:
    """Yield the cost of each bucket of a step; nothing if the trace does not have the processor times of buckets."""
    buckets = {e["args"]["bucket"]: e for e in step if e["cat"] == trace.BUCKET and e["ph"] == "X"}
    if not buckets or any("tdur" not in bucket for bucket in buckets.values()):
        return
    stages: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # microseconds by bucket and name
    for event in step:
        if event["cat"] == trace.STAGE and "bucket" in event["args"]:
            stages[event["args"]["bucket"]][event["name"]] += event.get("tdur", 0.0)
    outside = {  # microseconds of the stages of each bucket outside its own event
        number: sum(
            e.get("tdur", 0.0)
            for e in step
            if e["cat"] == trace.STAGE
            and e["args"].get("bucket") == number
            and not bucket["ts"] <= e["ts"] < bucket["ts"] + bucket["dur"]
        )
        for number, bucket in buckets.items()
    }
    foreign = {  # of the stages of other buckets that ran in the event of each bucket
        number: sum(
            e.get("tdur", 0.0)
            for e in step
            if e["cat"] == trace.STAGE
            and e["args"].get("bucket", number) != number
            and bucket["ts"] <= e["ts"] < bucket["ts"] + bucket["dur"]
        )
        for number, bucket in buckets.items()
    }
    measured = {n: max(0.0, bucket["tdur"] - foreign[n]) + outside[n] for n, bucket in buckets.items()}
    thread = _find_step_event(step)["args"]["communication_cpu_ms"] * 1e3
    factor = max(1.0, thread / sum(measured.values())) if sum(measured.values()) else 1.0
    for number, bucket in buckets.items():
        after_messages = sum(stages[number][name] for name in (trace.GATHER, "add entries"))
        seconds = measured[number] * factor / 1e6
        seconds_after = min(seconds, after_messages / 1e6)
        args = bucket["args"]
        yield _BucketCost(args["algorithm"], args["elements"], seconds, seconds - seconds_after)


def _fit_line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return (intercept, slope) of the median seconds over sizes, both at least 0, by least squares."""
    sizes = sorted({size for size, _ in points})
    medians = [median(seconds for length, seconds in points if length == size) for size in sizes]
    if len(sizes) == 1:
        return (0.0, medians[0] / sizes[0]) if sizes[0] >= _LARGE_ELEMENTS else (medians[0], 0.0)
    x, y = fmean(sizes), fmean(medians)
    slope = sum((a - x) * (b - y) for a, b in zip(sizes, medians, strict=True)) / sum((a - x) ** 2 for a in sizes)
    slope = max(0.0, slope)
    intercept = max(0.0, y - slope * x)
    return intercept, slope if intercept else sum(medians) / sum(sizes)


def _fit_latency(steps: list[list[Event]], nodes: int, slots: int, is_decoupled: bool) -> float | None:
    """Return the seconds of a short message between nodes, from the exchanges of dense buckets; None if all of them
    are too large to show it.

    An exchange takes its rounds times the latency, plus its bytes divided by the rate of the link. The shortest
    exchange of a bucket counts, over all ranks and steps, because the others contain waits for late ranks. The rate is
    the highest that the difference between the smallest bucket and another one shows.
    """
    fewest_seconds: dict[tuple[float, int], float] = {}  # of the bytes and the rounds of an exchange
    for step in steps:
        for exchange in _measure_dense_exchanges(step, nodes, slots, is_decoupled):
            kind = exchange.nbytes, exchange.rounds
            fewest_seconds[kind] = min(exchange.seconds, fewest_seconds.get(kind, math.inf))
    smallest, rounds = min(fewest_seconds, default=(math.inf, 0))
    if smallest > _MOST_LATENCY_BYTES or not rounds:
        return None
    seconds = fewest_seconds[smallest, rounds]
    per_byte = [
        max(0.0, other_seconds - seconds) / (nbytes - smallest)
        for (nbytes, other_rounds), other_seconds in fewest_seconds.items()
        if nbytes > smallest and other_rounds == rounds
    ]
    latency = (seconds - smallest * min(per_byte, default=0.0)) / rounds
    return latency if latency > 0 else None


class _Exchange(NamedTuple):
    """An exchange of `nbytes` bytes of values on one rank, in which `rounds` messages wait for one another."""

    nbytes: float
    rounds: int
    seconds: float


def _measure_dense_exchanges(step: list[Event], nodes: int, slots: int, is_decoupled: bool) -> Iterator[_Exchange]:
    """Yield the exchange of each dense bucket of a step: the mean of its pieces. With DeAR, an exchange has the time of
    both halves: a rank that is late in one half may find all messages there."""
    ends = {e["id"]: e["ts"] for e in step if e["cat"] == trace.EXCHANGE and e["ph"] == "e"}
    seconds: dict[int, list[float]] = defaultdict(list)
    for event in step:
        if event["cat"] == trace.EXCHANGE and event["ph"] == "b" and event["id"] in ends and "bucket" in event["args"]:
            seconds[event["args"]["bucket"]].append((ends[event["id"]] - event["ts"]) / 1e6)
    dense = {algorithm.name: algorithm for algorithm in OWN if algorithm.family is Family.DENSE}
    for event in step:
        if event["cat"] != trace.BUCKET or event["ph"] != "X" or event["args"]["bucket"] not in seconds:
            continue
        args = event["args"]
        if args["algorithm"] in dense:
            measured = seconds[args["bucket"]]
            pieces = max(1, len(measured) // (2 if is_decoupled else 1))
            workload = Workload(nodes, slots, args["elements"])
            rounds = round(dense[args["algorithm"]].traffic(workload).messages)
            yield _Exchange(args["elements"] * args["itemsize"] / pieces, rounds, sum(measured) / pieces)
