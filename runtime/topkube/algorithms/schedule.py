"""The schedule of an aggregation: from a step on, another algorithm, density or period.

A schedule is checked here, so that admission and the ranks refuse the same mistakes with the same words. The steps are
the updates of the optimizer; skipped steps do not count. All ranks count the same updates, so they change together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topkube.algorithms.catalogue import find_algorithm, is_known
from topkube.algorithms.choice import CHOICES
from topkube.algorithms.declaration import Algorithm
from topkube.algorithms.parameters import DENSITY, PERIOD
from topkube.errors import ArgumentError

MOST_STAGES = 32
"""The most stages of a schedule."""


@dataclass(frozen=True)
class Stage:
    """A stage of a schedule. When `from_step` updates of the weights are done, the fields that are not None replace the
    present algorithm, density or period (steps between exchanges). The other fields stay as they were."""

    from_step: int
    algorithm: str | None = None
    density: float | None = None
    period: int | None = None


def check_schedule(algorithm: str, warmup_steps: int, momentum_correction: bool, stages: Sequence[Stage]) -> None:
    """Raise ArgumentError for the first mistake of a schedule that follows `algorithm`.

    Algorithms of packages that are not installed here are not checked: the workers check them when they start.
    """
    previous_step = 0
    current = algorithm
    for number, stage in enumerate(stages):
        stage_name = f"stage {number + 1} of the schedule (from step {stage.from_step})"
        if stage.from_step <= previous_step:
            raise ArgumentError(
                f"{stage_name} does not begin after "
                f"{'the first step' if previous_step == 0 else f'step {previous_step}'}",
                next_step="order the stages by their steps, from 1 on",
            )
        if stage.from_step < warmup_steps:
            raise ArgumentError(
                f"{stage_name} begins within the warm-up of {warmup_steps} steps",
                next_step="let it begin after the warm-up, or leave the warm-up out",
            )
        if (stage.algorithm, stage.density, stage.period) == (None, None, None):
            raise ArgumentError(
                f"{stage_name} changes nothing", next_step="set its algorithm, its density or its period"
            )
        _check_change(stage_name, current, stage, momentum_correction)
        previous_step, current = stage.from_step, stage.algorithm or current
    _check_residuals([algorithm, *(stage.algorithm for stage in stages if stage.algorithm)])


def _check_change(stage_name: str, current: str, stage: Stage, momentum_correction: bool) -> None:
    following = stage.algorithm or current
    changes_algorithm = stage.algorithm is not None and stage.algorithm != current
    is_declared = following in CHOICES or is_known(following)
    if "." not in following and not is_declared:
        find_algorithm(following)  # raises, and names the nearest algorithm
    for name in (current, following):
        if changes_algorithm and _gives_nodes_own_weights(name):
            raise ArgumentError(
                f"{stage_name} changes from {current} to {following}",
                cause=f"with {name}, every node has weights and an optimizer state of its own, which another algorithm"
                " cannot take over",
                next_step="change only its period, or start another job from the weights",
            )
    if changes_algorithm and momentum_correction:
        raise ArgumentError(
            f"{stage_name} changes the algorithm, which does not work with momentum correction",
            cause="the velocity of each node cannot be taken over",
            next_step="turn off momentum correction",
        )
    if not is_declared:
        return
    for parameter, value in ((DENSITY, stage.density), (PERIOD, stage.period)):
        if value is None:
            continue
        parameter.check(value)
        algorithm = _find_declared(following)
        if algorithm is None or parameter not in algorithm.parameters:
            raise ArgumentError(
                f"{stage_name} sets the {parameter.name}, but {following} does not read it",
                next_step=f"leave the {parameter.name} out of this stage",
            )
        if parameter is PERIOD:
            algorithm.check_period(int(value))


def _check_residuals(names: Sequence[str]) -> None:
    """Raise ArgumentError if two algorithms keep residuals of different ranks."""
    algorithms = [algorithm for name in names if (algorithm := _find_declared(name)) is not None]
    scopes = {algorithm.residual.scope: algorithm.name for algorithm in algorithms if algorithm.residual is not None}
    if len(scopes) > 1:
        first, second = list(scopes.values())[:2]
        raise ArgumentError(
            f"the schedule has {first} and {second}, which keep what was not sent in different ways",
            cause="the residual of a node and that of a rank cannot replace each other",
            next_step="use only one of the two; the other stages can be dense",
        )


def _gives_nodes_own_weights(name: str) -> bool:
    algorithm = _find_declared(name)
    return algorithm is not None and algorithm.in_weights


def _find_declared(name: str) -> Algorithm | None:
    """Return the algorithm called `name`; None for `auto` and `dense`, and if its package is not installed here."""
    return find_algorithm(name) if name not in CHOICES and is_known(name) else None
