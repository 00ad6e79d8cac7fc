"""The plan of buckets, which is the same on all ranks. Ranks plan in the first backward, and again after a restart."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from topkube import algorithms
from topkube.algorithms import BucketSize
from topkube.errors import TrainingError
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.fusion import BUCKET_BYTES, can_mix, choose_largest_size, plan_buckets
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.buckets.rank_comparison import RankComparison
from topkube.training.exchange.tuning.tuning import Tuning, find_initial_dense_wire
from topkube.training.ranks.agreement import digest
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.world import World


class BucketPlan:
    """The buckets of all parameters, in the order of the exchanges.

    `order` names the parameters in that order, None before the first plan: selection is per bucket, so a run that
    resumes bit for bit needs the same order. `is_agreed` is False until all ranks have compared their plans, at the end
    of the first backward after the optimizer was created or loaded. `trainable` holds the indices of the parameters
    that required a gradient on all ranks when the ranks last compared them. `tuning` is what `auto` or `dense` stands
    for. `is_outdated` is True if that has changed since the buckets were planned, because they still had residuals.
    """

    def __init__(
        self,
        world: World,
        parameters: list[Parameter],
        aggregation: AggregationSettings,
        agreement: QueuedAgreement,
        tuning: Tuning,
        finite_check: str = "auto",
    ) -> None:
        self.buckets: list[Bucket] = []
        self.order: list[str] | None = None
        self.is_agreed = self.is_outdated = False
        self.trainable: set[int] = set()
        self._world, self._parameters, self._aggregation = world, parameters, aggregation
        self._agreement = agreement
        self.comparison = RankComparison(world, parameters, aggregation, agreement, finite_check)
        self.tuning = tuning
        self._bucket_of: dict[int, Bucket] = {}
        self._planned: tuple[int | None, bool] = (None, False)
        """The most bytes of a bucket, and if small tensors share the buckets of others, at the last plan."""

    def find_bucket(self, parameter: Parameter) -> Bucket | None:
        """Return the parameter's bucket; None if the parameter was frozen each time that buckets were planned."""
        return self._bucket_of.get(parameter.index)

    def is_active(self, bucket: Bucket) -> bool:
        """Return True if the ranks exchange the bucket: it holds a parameter that is trainable on all of them."""
        return any(parameter.index in self.trainable for parameter in bucket.parameters)

    def agree(self, seen: Iterable[int]) -> None:
        """Compare parameters, settings and order with all ranks, and plan the buckets: in the order that was loaded, or
        else in the order in which rank 0 saw the gradients of the first backward (`seen`, indices). If only some ranks
        have loaded an order, the others adopt it. All ranks call this together. Raises TrainingError on all ranks if
        ranks differ."""
        self.comparison.compare()
        if self._world.size > 1:
            self._agree_on_order()
        self.is_agreed = True
        self.trainable = {p.index for p in self._parameters if p.tensor.requires_grad}
        self.extend(seen)
        before = self.tuning.choice
        self.tuning.choose(self.list_sizes())
        if self.tuning.choice is not before and self._needs_other_buckets():
            self._restore_buckets(self.order or [])

    def list_sizes(self) -> list[BucketSize]:
        """Return the sizes of the buckets that an all-reduce exchanges."""
        return [
            BucketSize(bucket.length, bucket.dtype.itemsize, bucket.is_always_dense)
            for bucket in self.buckets
            if not bucket.has_rows and bucket.length
        ]

    def plan_again(self) -> None:
        """Plan all buckets again, if another algorithm or rate of the link needs other sizes. All ranks call this
        between the same two steps, and only if no bucket has a residual."""
        self.is_outdated = False
        if self.order is not None and (self._choose_largest_size() is None or self._needs_other_buckets()):
            self._restore_buckets(self.order)

    def _needs_other_buckets(self) -> bool:
        """Return True if the algorithm that is now in force needs other buckets than those that were planned."""
        return (self._choose_largest_size(), self._can_mix()) != self._planned

    def extend(self, seen: Iterable[int]) -> list[Bucket]:
        """Plan buckets for parameters that have none and whose gradients some rank saw in this backward (`seen`,
        indices): all parameters in the first backward, later those that were added, unfrozen or not used before. Return
        the new buckets. All ranks call this together. Residuals start with the first exchange, so none has to move."""
        seen = list(dict.fromkeys(seen))
        seen_here = set(seen)
        flags = [float(p.index in seen_here) for p in self._parameters] + [float(p.has_rows) for p in self._parameters]
        if self._world.size > 1:
            flags = list(self._agreement.maximum(flags))
        for parameter, has_rows in zip(self._parameters, flags[len(self._parameters) :], strict=True):
            parameter.has_rows = bool(has_rows)
        planned = [(parameter, self._bucket_of.get(parameter.index)) for parameter in self._parameters]
        if any(bucket is not None and bucket.has_rows != parameter.has_rows for parameter, bucket in planned):
            self._restore_buckets(self.order or [])
        new_parameters = [p for p in self._list_unplanned() if flags[p.index]]
        if new_parameters and self._choose_largest_size() is None:
            self.tuning.measure()
        names = self._order_by_readiness(seen, {p.index for p in new_parameters})
        by_name = {parameter.name: parameter for parameter in new_parameters}
        self.order = (self.order or []) + names
        return self._plan_more([by_name[name] for name in names])

    def list_trainable(self) -> list[Parameter]:
        """Return the parameters in buckets that require a gradient."""
        return [p for bucket in self.buckets for p in bucket.parameters if p.tensor.requires_grad]

    def update_trainable(self) -> bool:
        """Set `trainable` to the parameters that require a gradient now, on which all ranks agree. Return True if they
        have changed."""
        before = self.trainable
        self.trainable = {p.index for p in self._parameters if p.tensor.requires_grad}
        return self.trainable != before

    def save(self) -> dict[str, Any]:
        """Return the order, the buckets by the names of their parameters, and the choice of the algorithm, for a
        checkpoint. A run that resumes has the same buckets, also if a later version of TopKube would plan others."""
        names = [[parameter.name for parameter in bucket.parameters] for bucket in self.buckets]
        return {
            "order": self.order,
            "buckets": names,
            "bucket_sizes": self._planned[0],
            "mixes_small": self._planned[1],
            "is_outdated": self.is_outdated,
            "choice": self.tuning.save(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Plan the buckets of a saved `state`: the saved buckets, or buckets for the saved order if it was saved with
        other settings; none yet if it has no order, or names parameters that are not here."""
        self.buckets, self._bucket_of, self.order, self.is_agreed = [], {}, None, False
        self.is_outdated = bool(state.get("is_outdated", False))
        self.tuning.restore(state.get("choice"))
        by_name = {parameter.name: parameter for parameter in self._parameters}
        order = state.get("order")
        if order is None or not by_name.keys() >= set(order):
            return
        self.order = list(order)
        buckets = _build_buckets([[by_name[name] for name in names] for names in state.get("buckets", [])])
        is_complete = {p.name for bucket in buckets for p in bucket.parameters} == {
            n for n in order if by_name[n].length
        }
        planned = state.get("bucket_sizes"), bool(state.get("mixes_small", False))
        if is_complete and self._may_keep(*planned):
            self._adopt(buckets, [by_name[name] for name in order])
            self._planned = planned
        else:
            self._restore_buckets(self.order)

    def _may_keep(self, largest: int | None, mixes: bool) -> bool:
        """Return True if buckets of a saved state suit the settings in force. A state of a device may be older than
        DEVICE_BUCKET_BYTES, or of another algorithm in the same run."""
        if mixes and not self._can_mix():
            return False
        chosen = self._choose_largest_size()
        is_default = self._aggregation.bucket_bytes is None and chosen is not None and largest is not None
        return largest == chosen or (is_default and largest == BUCKET_BYTES)

    def _restore_buckets(self, order: list[str]) -> None:
        self.buckets, self._bucket_of = [], {}
        by_name = {parameter.name: parameter for parameter in self._parameters}
        self._plan_more([by_name[name] for name in order])

    def _list_unplanned(self) -> list[Parameter]:
        return [p for p in self._parameters if p.tensor.requires_grad and p.index not in self._bucket_of]

    def _plan_more(self, parameters: list[Parameter]) -> list[Bucket]:
        sizes = self._choose_largest_size()
        machines = self.tuning.machines
        crowding = machines.crowding if machines is not None else 1.0
        new_buckets = plan_buckets(parameters, sizes, self._find_gradient_rate(), crowding, self._can_mix())
        self._adopt(new_buckets, parameters)
        return new_buckets

    def _adopt(self, new_buckets: list[Bucket], parameters: list[Parameter]) -> None:
        self._planned = self._choose_largest_size(), self._can_mix()
        self.buckets += new_buckets
        for bucket in new_buckets:
            self._bucket_of.update({parameter.index: bucket for parameter in bucket.parameters})
        for parameter in parameters:
            self._bucket_of.setdefault(parameter.index, Bucket(parameter.dtype, True))  # no elements

    def _find_gradient_rate(self) -> float:
        """Return the bytes of gradients that pass the link per second with the algorithm in force; 0 if unknown."""
        world, aggregation, choice = self._world, self._aggregation, self.tuning.choice
        if choice is not None:
            algorithm, dense_wire = choice.algorithm, choice.dense_wire
        else:
            algorithm = algorithms.resolve(aggregation.algorithm, world.nodes, sys.maxsize, aggregation.density)
            dense_wire = find_initial_dense_wire(aggregation)
        slots = world.largest_node
        return self.tuning.rate * algorithms.count_times_fewer_bytes(algorithm, world.nodes, slots, dense_wire)

    def _choose_largest_size(self) -> int | None:
        """Return the most bytes of a bucket, None if sizes are chosen so that exchanges overlap with backward."""
        job_bytes, world = self._aggregation.bucket_bytes, self._world
        if job_bytes is not None:
            return job_bytes
        is_on_cpu = all(parameter.tensor.device.type == "cpu" for parameter in self._parameters)
        algorithm = algorithms.resolve(self._aggregation.algorithm, world.nodes, sys.maxsize, self._aggregation.density)
        if not is_on_cpu and self.tuning.choice is not None:
            algorithm = self.tuning.choice.algorithm
        total_bytes = sum(parameter.length * parameter.dtype.itemsize for parameter in self._parameters)
        return choose_largest_size(algorithm, is_on_cpu, world.nodes, world.size, total_bytes)

    def _can_mix(self) -> bool:
        """Return True if small tensors can share the buckets of others with the algorithm that is in force until the
        plan is made again."""
        aggregation, choice = self._aggregation, self.tuning.choice
        if aggregation.schedule:  # the plan stays when a stage begins
            return False
        if choice is not None:
            return can_mix(choice.algorithm, choice.dense_wire)
        algorithm = algorithms.resolve(aggregation.algorithm, self._world.nodes, sys.maxsize, aggregation.density)
        return can_mix(algorithm, find_initial_dense_wire(aggregation))

    def _order_by_readiness(self, seen: list[int], new: set[int]) -> list[str]:
        """Return the names of the `new` parameters, in the order in which rank 0 saw their gradients; the others
        follow."""
        own = [index for index in seen if index in new]
        first = set(own)
        own += [p.index for p in reversed(self._parameters) if p.index in new and p.index not in first]
        if self._world.size > 1 and own:
            own = [int(index) for index in self._agreement.broadcast([float(index) for index in own], 0)]
        return [self._parameters[index].name for index in own]

    def _agree_on_order(self) -> None:
        """Adopt the order of the first rank that has an order, if ranks differ."""
        rank, ranks, order_digest = self._world.rank, self._world.size, digest(self.save())
        first = -rank if self.order is not None else -ranks
        largest_digest, largest_negative_digest, root = self._agreement.maximum([order_digest, -order_digest, first])
        if largest_digest == -largest_negative_digest:  # all ranks have the same digest
            return
        root = int(-root)
        if root < ranks:
            state = json.dumps(self.save()).encode() if rank == root else b""
            [length] = self._agreement.maximum([len(state)])
            padded = [float(byte) for byte in state.ljust(int(length))]
            received = bytes(int(byte) for byte in self._agreement.broadcast(padded, root))
            self.restore(json.loads(received))
        if self.order is None:
            raise TrainingError(
                f"{f'rank {root}' if root < ranks else 'a rank'} loaded the state of another model",
                cause="the optimizer state names parameters that this model does not have",
                next_step="load the state of this model, on rank 0 or on every rank",
            )


def _build_buckets(groups: list[list[Parameter]]) -> list[Bucket]:
    """Return a bucket for each group of parameters; none at all if the parameters of a group cannot share a bucket."""
    buckets = []
    for group in groups:
        first = group[0]
        if any(_describe_kind(parameter) != _describe_kind(first) for parameter in group):
            return []
        is_always_dense = all(parameter.is_always_dense for parameter in group)
        bucket = Bucket(first.dtype, is_always_dense or first.has_rows, first.has_rows)
        for parameter in group:
            bucket.append(parameter)
        buckets.append(bucket)
    return buckets


def _describe_kind(parameter: Parameter) -> tuple[object, ...]:
    """Return the properties that all parameters of a bucket share."""
    return parameter.dtype, parameter.has_rows
