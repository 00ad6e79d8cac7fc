"""The algorithm that exchanges a bucket: it depends on the job's settings, on measurements, and on the bucket."""

from __future__ import annotations

import sys

import torch

from topkube import algorithms
from topkube.algorithms import DENSE, Algorithm, Choice
from topkube.collectives import AllReduce, load
from topkube.collectives.dense import Hierarchical
from topkube.errors import ArgumentError
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.tuning.tuning import find_initial_dense_wire
from topkube.world import World


class BucketAlgorithms:
    """The algorithms of one optimizer's buckets, the same on all ranks.

    `aggregation` holds the settings in force, and `choice` what `auto` or `dense` stands for (None: not chosen yet).
    `large` is the algorithm of large buckets, and `dense_wire` the format of their dense values. `keeper` is the first
    algorithm that keeps a residual, among those of the schedule and then those that `auto` may take. If none keeps a
    residual, `keeper` is the first value of `large`.
    `compressed_choices` holds the algorithms that compress and that `auto` may stand for.
    """

    def __init__(
        self, world: World, aggregation: AggregationSettings, compressed_choices: tuple[Algorithm, ...] = ()
    ) -> None:
        self._nodes, self.compressed_choices = world.nodes, compressed_choices
        self.drained_steps = 0
        """The number of steps that still send whole residuals, since `auto` stands for an algorithm without them. It is
        part of a saved state: a run that resumes sends them in the same steps."""
        self.change_to(aggregation)
        density = aggregation.density
        stages = [algorithms.resolve(name, world.nodes, sys.maxsize, density) for name in aggregation.algorithms]
        stages += [algorithm for algorithm in compressed_choices if not algorithm.in_weights]
        self.keeper: Algorithm = next((stage for stage in stages if stage.residual is not None), self.large)

    def change_to(self, aggregation: AggregationSettings, begins_stage: bool = False) -> None:
        """Use these settings from the next backward on. All ranks call this between the same two steps.
        `begins_stage` is True if a stage of the schedule begins. If its algorithm keeps no residual, the next step then
        sends residuals whole."""
        self.aggregation, self._begins_stage = aggregation, begins_stage
        self.choice: Choice | None = None
        self.dense_wire = find_initial_dense_wire(aggregation)
        self._resolve()

    def adopt(self, choice: Choice | None) -> None:
        """Use what `auto` or `dense` stands for from the next bucket on. All ranks call this between two steps. Nothing
        changes for an algorithm with which nodes have weights of their own: it exchanges no gradients between nodes."""
        if choice is not None and not choice.algorithm.in_weights:
            if self.large.residual is not None and choice.algorithm.residual is None:
                self.drained_steps = 2  # the step whose gradients are exchanged already, and the next one
            self.choice, self.dense_wire = choice, choice.dense_wire
            self._resolve()

    @property
    def uses_residuals(self) -> bool:
        """True if an exchange reads or leaves residuals at the moment: the same on all ranks."""
        return self.large.residual is not None or self._begins_stage or self.drained_steps > 0

    def begin_anew(self, drained_steps: int) -> None:
        """Send whole residuals in so many steps if `auto` stands for an algorithm without them: those of a loaded
        state. All ranks call this together, with the same number."""
        self.drained_steps = drained_steps if self.compressed_choices else 0

    def note_step(self) -> None:
        """Note that the optimizer made its step. All ranks call this between the same two steps."""
        self.drained_steps = max(0, self.drained_steps - 1)

    def _resolve(self) -> None:
        self.large = self._load_algorithm(sys.maxsize).algorithm
        self._dense = self._load_algorithm(sys.maxsize, DENSE if self.large.compresses else self.large.name)

    def choose(self, bucket: Bucket, density: float, is_warming_up: bool) -> AllReduce:
        """Return the all-reduce that exchanges the bucket at this density, during or after the warm-up."""
        sends_whole = is_warming_up and density == 1 and not self.aggregation.momentum_correction
        return self._dense if sends_whole or self._is_exact(bucket) else self._load_algorithm(bucket.length)

    def choose_after_warmup(self, bucket: Bucket) -> AllReduce:
        """Return the all-reduce that exchanges the bucket after the warm-up."""
        return self._dense if self._is_exact(bucket) else self._load_algorithm(bucket.length)

    def _is_exact(self, bucket: Bucket) -> bool:
        """Return True if the bucket must be sent as it is. Small tensors share the buckets of others until the buckets
        are planned for an algorithm that compresses."""
        return bucket.is_always_dense or (self.large.compresses and bucket.holds_small)

    def drains(self, bucket: Bucket) -> bool:
        """Return True if the exchange also sends the bucket's residual, because the algorithm in force does not keep
        it. The same on all ranks, whatever their residuals hold."""
        is_first_step = self._begins_stage or self.drained_steps > 0
        if not is_first_step or bucket.is_always_dense or self.keeper.residual is None:
            return False
        return self._load_algorithm(bucket.length).algorithm.residual is None

    def is_sparse(self, bucket: Bucket) -> bool:
        """Return True if the bucket's exchange reads or leaves a residual, once the warm-up has begun to lower the
        density."""
        keeps = not self._is_exact(bucket) and self._load_algorithm(bucket.length).algorithm.residual is not None
        return keeps or self.drains(bucket)

    def may_overlap(self, bucket: Bucket) -> bool:
        """Return True if a dense exchange of the bucket between nodes can overlap with the next buckets. All-reduces of
        the warm-up do not count."""
        if bucket.has_rows or bucket.dtype == torch.float64:
            return False
        return isinstance(self.choose_after_warmup(bucket), Hierarchical)

    def stays_on_device(self, bucket: Bucket) -> bool:
        """Return True if no byte of the bucket passes through host memory, and no residual depends on the result."""
        if bucket.has_rows or bucket.dtype == torch.float64 or self.drains(bucket):
            return False
        algorithm = self.choose_after_warmup(bucket).algorithm
        return algorithm.residual is None and (self._nodes == 1 or algorithm.needs_gpu)

    def _load_algorithm(self, length: int, name: str | None = None) -> AllReduce:
        """Return the all-reduce for a tensor of `length` elements: that of the algorithm called `name`, or by default
        that of the choice or the settings in force."""
        if name is None and self.choice is not None:
            return load(self.choice.algorithm)
        name = name or self.aggregation.algorithm
        return load(algorithms.resolve(name, self._nodes, length, self.aggregation.density))


def refuse_gpu_algorithms(world: World, aggregation: AggregationSettings) -> None:
    """Raise ArgumentError if the job names an algorithm for GPUs only. Gradients here are in host memory."""
    for name in aggregation.algorithms:
        if algorithms.resolve(name, world.nodes, sys.maxsize, aggregation.density).needs_gpu:
            raise ArgumentError(
                f"the algorithm {name} reduces gradients on GPUs only, and the parameters are in host memory",
                cause="this process has no GPU, or the model was not moved to topkube.device()",
                next_step="choose the algorithm auto, or move the model to a GPU before DistributedOptimizer",
            )
