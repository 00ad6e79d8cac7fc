"""`spec.aggregation`: the all-reduce algorithm, its parameters, and their schedule."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from topkube.algorithms import (
    AUTO,
    CHOICES,
    DELAY,
    DENSE_WIRE,
    DENSITY,
    MATRIX_RANK,
    MOMENTUM_CORRECTION,
    MOST_STAGES,
    NODE_WEIGHTS,
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    OVERLAP,
    PERIOD,
    SELECTION,
    WARMUP_STEPS,
    WIRE,
    AlgorithmParameter,
    Stage,
    check_schedule,
    explain_delay,
    explain_dense_wire,
    explain_node_weights,
    explain_overlap,
    find_algorithm,
    reads_dense_wire,
)
from topkube.errors import ArgumentError
from topkube.job.algorithm_name import EXPLAINED, AlgorithmName, is_foreign
from topkube.job.base.part import INT32, OneOf, Part, raise_problems


def _declare_field(parameter: AlgorithmParameter, is_optional: bool = False) -> Any:
    """Return the field of an algorithm's parameter: its default (None if it is optional), range and description."""
    return Field(
        default=None if is_optional else parameter.default,
        gt=parameter.above,
        ge=parameter.at_least,
        le=parameter.at_most,
        description=parameter.description,
    )


class ScheduleStage(Part):
    """A stage of the schedule: new values from a step on. Values that are not set stay as they were."""

    from_step: int = Field(ge=1, le=INT32, description="the number of updates after which the stage begins")
    algorithm: AlgorithmName | None = Field(default=None, description="the algorithm from this step on")
    density: float | None = _declare_field(DENSITY, is_optional=True)
    period: int | None = _declare_field(PERIOD, is_optional=True)


class Aggregation(Part):
    """How gradients are summed over ranks."""

    algorithm: AlgorithmName = Field(default=AUTO, description=EXPLAINED)
    density: float = _declare_field(DENSITY)
    warmup_steps: int = _declare_field(WARMUP_STEPS)
    wire: Annotated[str, OneOf(WIRE.choices)] = _declare_field(WIRE)
    dense_wire: Annotated[str, OneOf(DENSE_WIRE.choices)] = _declare_field(DENSE_WIRE)
    selection: Annotated[str, OneOf(SELECTION.choices)] = _declare_field(SELECTION)
    momentum_correction: bool = _declare_field(MOMENTUM_CORRECTION)
    period: int = _declare_field(PERIOD)
    outer_learning_rate: float = _declare_field(OUTER_LEARNING_RATE)
    outer_momentum: float = _declare_field(OUTER_MOMENTUM)
    delay: int = _declare_field(DELAY)
    matrix_rank: int = _declare_field(MATRIX_RANK)
    overlap: Annotated[str, OneOf(OVERLAP.choices)] = _declare_field(OVERLAP)
    node_weights: Annotated[str, OneOf(NODE_WEIGHTS.choices)] = _declare_field(NODE_WEIGHTS)
    schedule: list[ScheduleStage] = Field(
        default=[],
        max_length=MOST_STAGES,
        description="changes during the run, in the order of their steps, such as sparse early and dense late",
    )

    @model_validator(mode="after")
    def _check_schedule(self) -> Aggregation:
        stages = [Stage(stage.from_step, stage.algorithm, stage.density, stage.period) for stage in self.schedule]
        try:
            check_schedule(self.algorithm, self.warmup_steps, self.momentum_correction, stages)
        except ArgumentError as error:
            raise ValueError(f"{error.what}; {error.next_step}") from None
        return self

    @model_validator(mode="after")
    def _check_period(self) -> Aggregation:
        if self.algorithm not in CHOICES and not is_foreign(self.algorithm):
            try:
                find_algorithm(self.algorithm).check_period(self.period)
            except ArgumentError as error:
                raise ValueError(f"{error.what}; {error.next_step}") from None
        return self

    @model_validator(mode="after")
    def _check_dense_settings(self) -> Aggregation:
        used = [self.algorithm, *(stage.algorithm for stage in self.schedule if stage.algorithm)]
        if self.dense_wire != DENSE_WIRE.default and not any(map(reads_dense_wire, used)):
            text = f"'{self.dense_wire}' has no effect: {explain_dense_wire(self.algorithm)}"
            raise_problems([(("denseWire",), text)])
        if self.overlap != OVERLAP.default and (reason := explain_overlap(used, self.momentum_correction)):
            raise_problems([(("overlap",), f"'{self.overlap}' does not work: {reason}")])
        if self.delay and (reason := explain_delay(used)):
            raise_problems([(("delay",), f"{self.delay} has no effect: {reason}")])
        others = self.overlap, self.momentum_correction, bool(self.schedule)
        if self.node_weights != NODE_WEIGHTS.default and (reason := explain_node_weights(self.algorithm, *others)):
            raise_problems([(("nodeWeights",), f"'{self.node_weights}' has no effect: {reason}")])
        return self
