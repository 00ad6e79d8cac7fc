"""Buckets between nodes of CPUs, whose messages travel while the next buckets start: dense buckets, buckets that are
compressed in two stages (`int8`, `int4`, `int3`), and all that can be reduced in two halves, with DeAR."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch

from topkube.arrays import view_flat
from topkube.collectives import AllReduce, Request
from topkube.collectives.codec_all_reduce import CodecAllReduce
from topkube.collectives.decoupled import DecoupledAllReduce
from topkube.collectives.dense import Hierarchical
from topkube.collectives.halves import HalvableAllReduce
from topkube.collectives.overlapped import UNDER_WAY, OverlappedAllReduce
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.reduction.delivery import Delivery
from topkube.training.exchange.reduction.reduced_parts import ReducedPart, ReducedParts
from topkube.training.exchange.reduction.staging import Staging
from topkube.training.ranks import communication_thread
from topkube.world import World

STAGING_BUFFERS = UNDER_WAY + 1
"""One for each bucket that is under way, and one for the bucket that begins."""


class OverlappedBuckets:
    """The buckets of one optimizer that are under way between the nodes of `world` (collectives/overlapped.py).
    `reduced_parts` holds what is reduced but not gathered, if exchanges are made in two halves (`is_decoupled`, DeAR);
    otherwise it is None. Methods run in the communication thread."""

    def __init__(self, world: World, staging: Staging, delivery: Delivery, is_decoupled: bool) -> None:
        self._world, self._staging, self._delivery = world, staging, delivery
        self._decoupled = DecoupledAllReduce(world) if is_decoupled else None
        self._all_reduce = self._decoupled or OverlappedAllReduce(world)
        self.reduced_parts = ReducedParts(self._decoupled, delivery) if self._decoupled is not None else None

    def collect(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's local gradients in one tensor, which no later bucket uses before they are delivered."""
        return self._staging.collect(bucket, STAGING_BUFFERS if self.reduced_parts is None else None)

    def begin(self, bucket: Bucket, all_reduce: Hierarchical, request: Request) -> None:
        """Begin the exchange of a bucket, as `all_reduce` would run `request`. Its gradients are delivered later, at
        the latest in `finish`, or when they are gathered."""
        call = all_reduce.enter(self._world, request, is_in_halves=self._decoupled is not None)
        factor = request.scale(self._world.size)
        for part in bucket.parts:
            flat = self.collect(part)
            array = view_flat(flat, "bucket", writable=True)
            if self.reduced_parts is not None and self._decoupled is not None:
                halved = self._decoupled.halve(call, array, factor, request.dense_wire)
                self.reduced_parts.parts.append(ReducedPart(part, flat, halved))
                continue
            delivered = partial(self._delivery.deliver, part, flat, None)
            self._all_reduce.begin(call, array, factor, delivered, request.dense_wire)
        communication_thread.advance_meanwhile(self._all_reduce.advance, links=self._world.links)

    def can_halve(self, all_reduce: AllReduce, bucket: Bucket) -> TypeGuard[HalvableAllReduce]:
        """Return True if `all_reduce` exchanges the bucket in two halves (`begin_halves`)."""
        if self._decoupled is None or not isinstance(all_reduce, HalvableAllReduce):
            return False
        return all_reduce.can_halve(str(bucket.dtype).removeprefix("torch."))

    def begin_halves(
        self,
        bucket: Bucket,
        all_reduce: HalvableAllReduce,
        flat: torch.Tensor,
        request: Request,
        ended: Callable[[], None],
    ) -> None:
        """Begin the exchange of a bucket, whose gradients are in `flat`, the array of `request`. `ended` is called when
        the first half has ended, at the latest in `finish`. The gradients are delivered when they are gathered."""
        assert self._decoupled is not None
        assert self.reduced_parts is not None
        halved = self._decoupled.halve_compressed(all_reduce, request, ended)
        self.reduced_parts.parts.append(ReducedPart(bucket, flat, halved))
        communication_thread.advance_meanwhile(self._decoupled.advance, links=self._world.links)

    def can_compress(self, all_reduce: AllReduce) -> TypeGuard[CodecAllReduce]:
        """Return True if buckets of this all-reduce can be under way beside dense buckets (`begin_compressed`)."""
        if self._decoupled is not None or not isinstance(all_reduce, CodecAllReduce):
            return False
        algorithm = all_reduce.algorithm
        return algorithm.residual is not None and algorithm.overlaps_buckets(self._world.nodes)

    def begin_compressed(self, all_reduce: CodecAllReduce, request: Request, delivered: Callable[[], None]) -> None:
        """Begin the exchange of the array of `request`, whose result `delivered` delivers later, at the latest in
        `finish`. The array is what `collect` returned."""
        call, shard, exchange, sent = all_reduce.begin(self._world, request, self._all_reduce.place)

        def end() -> None:
            self._all_reduce.note_finite(all(map(bool, shard.finite)))
            delivered()

        self._all_reduce.begin_exchange(call, exchange, sent, request.array, end)
        communication_thread.advance_meanwhile(self._all_reduce.advance, links=self._world.links)

    def finish(self) -> None:
        """Finish the buckets that are under way."""
        self._all_reduce.finish()

    def flush(self) -> bool:
        """Finish the buckets that are under way, and begin to gather what is only reduced. Return True if all values
        were finite."""
        self.finish()
        if self.reduced_parts is not None:
            self.reduced_parts.gather(self.reduced_parts.parts[::-1])  # the ranks agree meanwhile if the step is finite
        return self._all_reduce.take_finite()
