"""What `topkube plan` compares: algorithms on a cluster, for a model, from the options and the TrainingJob."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from topkube import algorithms
from topkube.algorithms import (
    AUTO,
    CHOICES,
    DELAY,
    DENSE,
    DENSE_WIRE,
    DENSITY,
    MATRIX_RANK,
    NODE_WEIGHTS,
    PERIOD,
    WIRE,
    Algorithm,
    BucketSize,
    Choice,
    Machines,
    find_least_change,
    keep_device_choices,
    keeps_loss,
    list_compressed_choices,
    sort_choices_by_time,
)
from topkube.cli.plan.model_profile import count_parameters, read_profile
from topkube.cli.plan.options import PlanOptions, parse_link, parse_memory_rate, parse_size
from topkube.errors import ArgumentError
from topkube.job import Aggregation, TrainingJob
from topkube.planning.models import Model
from topkube.planning.profile import StepProfile
from topkube.planning.situation import Situation
from topkube.planning.step import Prediction, predict_step

_LATENCY = 50e-6
"""The latency of a message between nodes, in seconds, if no trace has measured it."""


@dataclass(frozen=True)
class Comparison:
    """The algorithms to compare, and the cluster and the model for which they are compared.

    `wanted` is the name that the TrainingJob sets, `auto` without a TrainingJob. `profile` is None if the time of a
    step is unknown, and `model` is None if the model is not built in.
    """

    situation: Situation
    elements: int
    wanted: str
    listed: list[Algorithm]
    profile: StepProfile | None
    model: Model | None
    compressed_choices: tuple[Algorithm, ...] = ()
    """The algorithms that compress and that `auto` may stand for."""
    _predictions: dict[str, Prediction] = field(default_factory=dict)
    """The steps that were predicted, by the name of the algorithm."""

    @property
    def machines(self) -> Machines:
        return self.situation.machines

    def find_dense(self) -> Algorithm:
        """Return the fastest dense algorithm on this cluster."""
        return _find_choice(DENSE, self.machines, self.elements, self.situation.dense_wire).algorithm

    def find_chosen(self) -> Algorithm | None:
        """Return the algorithm that `wanted` stands for on this cluster; None if that depends on the time of a step,
        which is unknown."""
        if self.wanted not in CHOICES:
            return algorithms.find_algorithm(self.wanted)
        dense = self.find_dense()
        if self.wanted != AUTO or not self.compressed_choices:
            return dense
        if self.profile is None:
            return None
        allowed = [choice for choice in self.compressed_choices if keeps_loss(choice, self.machines.nodes)]
        dense_seconds, seconds = self.predict_step(dense).step, [self.predict_step(one).step for one in allowed]
        return find_least_change(allowed, seconds, dense_seconds, dense_seconds) or dense

    def is_measured(self, algorithm: Algorithm) -> bool:
        """Return True if a trace has measured the work of the communication thread for large buckets with the
        algorithm. Otherwise this work is the lower bound of the cost model."""
        host = self.profile.host.get(algorithm.name) if self.profile else None
        return host is not None and host.per_element > 0

    def predict_step(self, algorithm: Algorithm) -> Prediction:
        """Return the prediction of a step on this cluster with the algorithm. The time of a step must be known."""
        assert self.profile is not None
        if algorithm.name not in self._predictions:
            self._predictions[algorithm.name] = predict_step(self.profile, self.situation, algorithm)
        return self._predictions[algorithm.name]


def _find_choice(name: str, machines: Machines, elements: int, dense_wire: str) -> Choice:
    """Return what `auto` or `dense` stands for, as the ranks choose it from their measurements."""
    return sort_choices_by_time(name, machines, [BucketSize(elements)], dense_wire)[0]


def read_comparison(options: PlanOptions) -> Comparison:
    """Return the comparison that the options and their TrainingJob ask for. Options override the TrainingJob. Warnings
    go to stderr. Raises ArgumentError for a wrong value, and the errors of the TrainingJob and of the trace."""
    job = TrainingJob.from_yaml(options.job) if options.job else None
    spec = job.spec if job else None
    aggregation = spec.aggregation if spec else None
    workers = options.workers or (spec.workers if spec else 2)
    slots = options.slots or (spec.slots_per_worker if spec else 1)
    density, wire, dense_wire = _read_formats(options, aggregation)
    period = _read_period(options, aggregation)
    link = parse_link(options.link, "--link")
    memory = parse_memory_rate(options.memory, "--memory")
    if options.device not in (None, "cpu", "gpu"):
        raise ArgumentError(f"--device is {options.device!r}", next_step="choose cpu or gpu")
    profile, model = read_profile(options)
    _check_device_memory(options, profile, model)
    elements = profile.elements if profile else model.parameters if model else count_parameters(options)
    latency = profile.latency if profile and profile.latency else _LATENCY
    cores = options.cores or (profile.cores if profile and profile.cores else math.inf)
    if options.network_cores and options.network_cores >= cores:
        raise ArgumentError(
            f"--network-cores is {options.network_cores:g}, but a node has {cores:g} cores",
            next_step="pass fewer, or the cores of a node: --cores N",
        )
    machines = Machines(workers, slots, link, memory, latency)
    listed, errors = algorithms.load_all()
    for error in errors:
        print(f"warning: {error}", file=sys.stderr)
    wanted = aggregation.algorithm if aggregation else AUTO
    if period is not None:
        listed = _select_allowed(listed, period, wanted)
    if wanted in CHOICES:
        dense_wire = _find_choice(wanted, machines, elements, dense_wire).dense_wire
    listed = [algorithm for algorithm in listed if not algorithm.needs_gpu or algorithm.name == wanted]
    situation = Situation(
        machines,
        density,
        wire,
        cores,
        options.overlap,
        dense_wire=dense_wire,
        period=period,
        is_decoupled=_read_dear(options, aggregation, profile),
        matrix_rank=aggregation.matrix_rank if aggregation else MATRIX_RANK.default,
        delay=_read_delay(options, aggregation),
        network_cores=options.network_cores,
    )
    forbids_compression = aggregation is not None and (aggregation.momentum_correction or bool(aggregation.schedule))
    may_compress = machines.nodes > 1 and not forbids_compression
    node_weights = aggregation.node_weights if aggregation and not situation.is_decoupled else NODE_WEIGHTS.default
    choices = list_compressed_choices(node_weights) if may_compress else ()
    if profile is not None and not profile.on_cpu:
        choices = keep_device_choices(choices)
    return Comparison(situation, elements, wanted, listed, profile, model, choices)


def _check_device_memory(options: PlanOptions, profile: StepProfile | None, model: Model | None) -> None:
    """Raise ArgumentError if --device-memory is no size, or has no effect."""
    if options.device_memory is None:
        return
    parse_size(options.device_memory, "--device-memory")
    if model is None or profile is None:
        raise ArgumentError(
            "--device-memory is set, and the largest batch is unknown",
            cause="it follows from the activations of a built-in model, and is one of the recommendations for a step",
            next_step="add --model and --compute, or leave out --device-memory",
        )


def _read_formats(options: PlanOptions, aggregation: Aggregation | None) -> tuple[float, str, str]:
    """Return the density, and the formats of sparse and of dense values, that the options or the job set. Raises
    ArgumentError if one of them is not allowed."""
    density = options.density if options.density is not None else (aggregation.density if aggregation else None)
    density = DENSITY.default if density is None else density
    wire = options.wire or (aggregation.wire if aggregation else WIRE.default)
    if not 0 < density <= 1:
        raise ArgumentError(f"--density is {density:g}", next_step="pass a share above 0 and at most 1, such as 0.01")
    if wire not in WIRE.choices:
        raise ArgumentError(f"--wire is {wire!r}", next_step=f"choose one of {', '.join(WIRE.choices)}")
    dense_wire = options.dense_wire or (aggregation.dense_wire if aggregation else DENSE_WIRE.default)
    if dense_wire not in DENSE_WIRE.choices:
        raise ArgumentError(
            f"--dense-wire is {dense_wire!r}", next_step=f"choose one of {', '.join(DENSE_WIRE.choices)}"
        )
    return density, wire, dense_wire


def _read_dear(options: PlanOptions, aggregation: Aggregation | None, profile: StepProfile | None) -> bool:
    """Return True if an option or the job asks for DeAR. Raises ArgumentError if DeAR has no effect here."""
    is_requested = aggregation is not None and aggregation.overlap == "dear" if options.dear is None else options.dear
    if not is_requested:
        return False
    source = "--dear is set" if options.dear else "the job has overlap: dear"
    if not options.overlap:
        raise ArgumentError(
            f"{source}, and exchanges do not overlap", next_step="leave out --no-overlap, or add --no-dear"
        )
    if profile is not None and not profile.on_cpu:
        raise ArgumentError(
            f"{source}, and the gradients are on a GPU",
            cause="DeAR works with gradients in host memory only; without a trace, ranks compute on GPUs",
            next_step="add --device cpu, or --no-dear",
        )
    return True


def _read_delay(options: PlanOptions, aggregation: Aggregation | None) -> int:
    """Return the delay that an option or the job sets. Raises ArgumentError if exchanges must not overlap."""
    job_delay = aggregation.delay if aggregation else DELAY.default
    delay = job_delay if options.delay is None else options.delay
    if delay and not options.overlap:
        source = f"--delay is {delay}" if options.delay else f"the job has delay: {delay}"
        raise ArgumentError(
            f"{source}, and exchanges do not overlap", next_step="leave out --no-overlap, or add --delay 0"
        )
    return delay


def _read_period(options: PlanOptions, aggregation: Aggregation | None) -> int | None:
    """Return the period that an option or the job sets; None if neither does."""
    if options.period is not None:
        PERIOD.check(options.period)
        return options.period
    return aggregation.period if aggregation and "period" in aggregation.model_fields_set else None


def _select_allowed(listed: list[Algorithm], period: int, wanted: str) -> list[Algorithm]:
    """Return the algorithms that allow the period, and print why the others are left out. Raises ArgumentError if the
    algorithm `wanted` does not allow it."""
    allowed = []
    for algorithm in listed:
        try:
            algorithm.check_period(period)
        except ArgumentError as error:
            if algorithm.name == wanted:
                raise
            print(f"warning: {algorithm.name} is left out: {error.what}", file=sys.stderr)
        else:
            allowed.append(algorithm)
    return allowed
