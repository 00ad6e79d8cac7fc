"""The aggregation settings: the job's spec.aggregation, checked, with the density during the warm-up and the stages of
the schedule."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from topkube.algorithms import (
    AUTO,
    CHOICES,
    DELAY,
    DENSE,
    DENSE_WIRE,
    DENSITY,
    MATRIX_RANK,
    NODE_WEIGHTS,
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    OVERLAP,
    PERIOD,
    SELECTION,
    WARMUP_STEPS,
    WIRE,
    Algorithm,
    Stage,
    check_schedule,
    explain_delay,
    explain_dense_wire,
    explain_node_weights,
    explain_overlap,
    find_algorithm,
    list_compressed_choices,
    reads_dense_wire,
)
from topkube.errors import ArgumentError
from topkube.settings import Settings

_CHECKED = (
    DENSITY,
    WIRE,
    DENSE_WIRE,
    SELECTION,
    WARMUP_STEPS,
    PERIOD,
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    DELAY,
    MATRIX_RANK,
    OVERLAP,
    NODE_WEIGHTS,
)


@dataclass(frozen=True)
class AggregationSettings:
    """The aggregation settings, the same on every rank. `algorithm` is auto, dense, or a name from the catalogue."""

    algorithm: str
    density: float
    warmup_steps: int
    wire: str
    selection: str
    momentum_correction: bool = False
    bucket_bytes: int | None = None
    """The most bytes of a bucket; None if they are chosen from the sizes of the tensors."""
    period: int = 1
    dense_wire: str = "fp32"
    outer_learning_rate: float = OUTER_LEARNING_RATE.default
    outer_momentum: float = OUTER_MOMENTUM.default
    delay: int = DELAY.default
    matrix_rank: int = MATRIX_RANK.default
    overlap: str = OVERLAP.default
    node_weights: str = NODE_WEIGHTS.default
    schedule: tuple[Stage, ...] = ()
    """The stages that follow, in the order in which they begin."""

    @classmethod
    def from_settings(cls, settings: Settings, **arguments: object) -> AggregationSettings:
        """Return the settings in `arguments`; those that are None come from the job's `settings`. Raises
        ArgumentError."""
        values: dict[str, object] = {
            entry.name: getattr(settings, entry.name, None) for entry in dataclasses.fields(cls)
        }
        values["schedule"] = parse_stages(settings.schedule)
        values.update({name: value for name, value in arguments.items() if value is not None})
        return cls(**values)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.algorithm not in CHOICES:
            find_algorithm(self.algorithm)  # raises for an unknown name, before any parameter is checked
        for parameter in _CHECKED:
            parameter.check(getattr(self, parameter.name))
        if self.algorithm not in CHOICES:
            find_algorithm(self.algorithm).check_period(self.period)
        check_schedule(self.algorithm, self.warmup_steps, self.momentum_correction, self.schedule)
        if self.dense_wire != DENSE_WIRE.default and not any(map(reads_dense_wire, self.algorithms)):
            _refuse("dense_wire", self.dense_wire, explain_dense_wire(self.algorithm))
        if self.in_weights and self.momentum_correction:
            raise ArgumentError(
                f"momentum correction does not work with {self.algorithm}",
                cause=f"with {self.algorithm}, the node's optimizer applies its momentum before anything is sent",
                next_step="turn off momentum correction",
            )
        if self.is_decoupled and (problem := explain_overlap(self.algorithms, self.momentum_correction)):
            _refuse("overlap", self.overlap, problem)
        if self.delay and (problem := explain_delay(self.algorithms)):
            _refuse("delay", self.delay, problem)
        other_settings = self.overlap, self.momentum_correction, bool(self.schedule)
        if self.node_weights != NODE_WEIGHTS.default and (
            problem := explain_node_weights(self.algorithm, *other_settings)
        ):
            _refuse("node_weights", self.node_weights, problem)
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ArgumentError(f"bucket_bytes is {self.bucket_bytes}, below 1", next_step="pass 1 or more")

    @property
    def is_decoupled(self) -> bool:
        """True if gradients are gathered, and parameters updated, during the next forward."""
        return self.overlap == "dear"

    @property
    def compressed_choices(self) -> tuple[Algorithm, ...]:
        """The algorithms that compress and that `auto` may stand for; none if the job sets something that only dense
        algorithms support, or a schedule."""
        if self.algorithm != AUTO or self.momentum_correction or self.schedule:
            return ()
        return list_compressed_choices(self.node_weights)

    def replace_auto(self, algorithm: Algorithm) -> AggregationSettings:
        """Return the settings with `algorithm` in place of `auto`. `node_weights` and `dense_wire` get their defaults,
        because they are allowed with a choice such as `auto` only."""
        return dataclasses.replace(
            self, algorithm=algorithm.name, node_weights=NODE_WEIGHTS.default, dense_wire=DENSE_WIRE.default
        )

    @property
    def in_weights(self) -> bool:
        """True if what was not sent stays in the node's weights (training/node_weights/)."""
        return self.algorithm not in CHOICES and find_algorithm(self.algorithm).in_weights

    @property
    def within_node(self) -> AggregationSettings:
        """The aggregation of gradients within a node, if what was not sent stays in the node's weights."""
        return dataclasses.replace(self, algorithm=DENSE, warmup_steps=0, delay=0, schedule=())

    def settings_at(self, step: int) -> AggregationSettings:
        """Return the aggregation in force after `step` updates."""
        return _apply_stages(self, sum(stage.from_step <= step for stage in self.schedule))

    def begins_stage_at(self, step: int) -> bool:
        """Return True if a stage of the schedule begins after `step` updates."""
        return any(stage.from_step == step for stage in self.schedule)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The names of the algorithms of all stages, in their order."""
        return (self.algorithm, *(stage.algorithm for stage in self.schedule if stage.algorithm is not None))

    def density_at(self, step: int) -> float:
        """Return the density of step `step`, from 0. It starts at 1, falls exponentially, and reaches its target at
        `warmup_steps` (the scheme of Lin et al., "Deep Gradient Compression", 2018, section 3.3, with steps instead of
        epochs)."""
        if step >= self.warmup_steps:
            return self.density
        return float(self.density ** (step / self.warmup_steps))


def _refuse(setting: str, value: object, explanation: str) -> NoReturn:
    """Raise ArgumentError for a setting. `explanation` has the form "reason; advice", like the results of
    `explain_overlap` and similar functions of `topkube.algorithms`."""
    reason, _, advice = explanation.partition("; ")
    raise ArgumentError(f"{setting} is {value}, but {reason}", next_step=advice)


@functools.lru_cache(maxsize=64)
def _apply_stages(aggregation: AggregationSettings, stages: int) -> AggregationSettings:
    """Return the aggregation after the first `stages` stages of its schedule have begun."""
    if stages == 0:
        return aggregation
    changes: dict[str, Any] = {}
    for stage in aggregation.schedule[:stages]:
        fields = {"algorithm": stage.algorithm, "density": stage.density, "period": stage.period}
        changes |= {name: value for name, value in fields.items() if value is not None}
    if not reads_dense_wire(changes.get("algorithm", aggregation.algorithm)):
        changes["dense_wire"] = DENSE_WIRE.default
    return dataclasses.replace(aggregation, schedule=(), warmup_steps=0, **changes)


_FIELDS = {"fromStep": "from_step", "algorithm": "algorithm", "density": "density", "period": "period"}


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Return the stages that TOPKUBE_SCHEDULE holds: a JSON list of mappings with the fields of a TrainingJob. Raises
    ArgumentError."""
    if not text:
        return ()
    try:
        stages = [Stage(**{_FIELDS[name]: value for name, value in entry.items()}) for entry in json.loads(text)]
        for stage in stages:
            _check_types(stage)
        return tuple(stages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"the schedule is not a list of stages: {type(error).__name__}: {error}",
            next_step='set TOPKUBE_SCHEDULE to a list such as [{"fromStep": 2000, "algorithm": "dense"}]',
        ) from None


def _check_types(stage: Stage) -> None:
    """Raise TypeError if a value of a stage has another type than its field."""
    for name, kind in (("from_step", int), ("algorithm", str), ("density", int | float), ("period", int)):
        value = getattr(stage, name)
        if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and name != "from_step")):
            raise TypeError(f"{name} is {value!r}")
