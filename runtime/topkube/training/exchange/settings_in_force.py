"""The number of updates of an optimizer, and the aggregation settings that follow it by the job's schedule."""

from __future__ import annotations

import sys

from topkube import algorithms
from topkube.algorithms import DENSITY
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.bucket_plan import BucketPlan
from topkube.training.exchange.reduction.bucket_algorithms import BucketAlgorithms
from topkube.world import World


class SettingsInForce:
    """The settings of `aggregation` that are in force after `steps` updates. A new number of steps can begin a stage of
    the schedule: buckets are then exchanged by the algorithm of that stage."""

    def __init__(
        self, world: World, aggregation: AggregationSettings, bucket_algorithms: BucketAlgorithms, plan: BucketPlan
    ) -> None:
        self._world, self._aggregation = world, aggregation
        self._algorithms, self._plan = bucket_algorithms, plan
        self._steps = 0

    @property
    def in_weights(self) -> bool:
        """True if nodes exchange weights, not gradients."""
        return self._aggregation.in_weights

    @property
    def steps(self) -> int:
        """The number of updates. All ranks set it between the same two steps."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        if not self._aggregation.schedule:
            return
        in_force, begins = self._aggregation.settings_at(steps), self._aggregation.begins_stage_at(steps)
        self._algorithms.change_to(in_force.within_node if in_force.in_weights else in_force, begins)
        self._plan.tuning.change_to(in_force, self._plan.list_sizes())
        self._algorithms.adopt(self._plan.tuning.choice)
        if begins and self._world.rank == 0:
            description = algorithms.describe(in_force.algorithm, in_force.density)
            period = f", every {in_force.period} steps" if in_force.period > 1 else ""
            print(
                f"topkube: from step {steps} on, nodes exchange with {description}{period}", file=sys.stderr, flush=True
            )

    def retract(self, steps: int) -> None:
        """Subtract steps that the device has skipped. A job with a schedule does not leave steps to the device."""
        self._steps -= steps

    @property
    def density(self) -> float:
        """The current density: it falls during warm-up, and is 1 if all entries are sent."""
        has_density = DENSITY in self._algorithms.large.parameters
        return self._aggregation.settings_at(self._steps).density_at(self._steps) if has_density else 1.0

    @property
    def is_warming_up(self) -> bool:
        """True if the density has not reached its target. For algorithms that compress without a density, the warm-up
        is the first step."""
        has_density = DENSITY in self._algorithms.large.parameters
        return self._steps < (self._aggregation.warmup_steps if has_density else min(1, self._aggregation.warmup_steps))
