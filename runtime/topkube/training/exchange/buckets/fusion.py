"""Tensor fusion: which parameters share a bucket, and how large buckets are.

This module does not communicate. If values are compressed or rounded, small tensors (biases, norms) have separate
buckets, which are always exchanged dense: they have few bytes, and dropping most of a norm's gradient costs accuracy.
All parameters of a bucket have the same dtype.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from topkube.algorithms import DENSE_WIRE, Algorithm
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.parameter import Parameter

BUCKET_BYTES = 25 * 2**20
"""The largest size that is chosen: larger buckets hide no more latency."""
DEVICE_BUCKET_BYTES = 4 * BUCKET_BYTES
"""The largest size on a device with an algorithm that compresses. The work of the host for a bucket then takes longer
than its messages, and delays the launches of backward."""
DEVICE_NODES = 8
"""With more nodes that send their rows to all others, buckets are smaller: their rows are in work buffers at a time."""
DEVICE_BUCKETS = 4
"""The buckets that a model has at least on a device, if they have BUCKET_BYTES or more."""
LEAST_BUCKET_BYTES = 2**20
"""The smallest size that is chosen, and the size of the first and the last bucket. The messages of smaller buckets cost
more than they hide."""
BUCKETS = 8
"""The number of buckets that a model has, if these bounds and the link allow it. While one bucket travels, the
gradients of the next are computed; only the last bucket has nothing to hide behind. But every bucket costs processor
time: with 16 of them, and a processor for each rank, a step over 1 Gbit/s took 6% longer."""
BUCKET_SECONDS = 0.01
"""How long a bucket occupies the link at least: on a fast link, the work per bucket costs more than a shorter wait for
the last bucket saves."""


def find_overlap_ends(parameters: Iterable[Parameter], rate: float = 0.0, crowding: float = 1.0) -> set[int]:
    """Return the positions of `parameters` after which a bucket should end, so that its exchange overlaps with
    the rest of backward. The first bucket is small, so that the exchange starts early. The last bucket is small,
    because it is exchanged after backward. The limits of the others double from bucket to bucket, so that the link does
    not wait for a large one, up to a size that follows from the sizes of the tensors and
    from `rate`, the bytes of gradients that pass the link per second (0: unknown): more than the link's rate if values
    are sent in fewer bytes. With `crowding` ranks per processor, what the link carries counts that often, and the share
    of the model half as often, because the work per bucket delays other ranks too."""
    crowding = max(1.0, crowding)
    groups: dict[torch.dtype, list[tuple[int, int]]] = {}
    for position, parameter in enumerate(parameters):
        if parameter.length and not parameter.is_always_dense and not parameter.has_rows:
            size = parameter.length * parameter.dtype.itemsize
            groups.setdefault(parameter.dtype, []).append((position, size))
    ends: set[int] = set()
    for group in groups.values():
        total = sum(size for _, size in group)
        if total <= LEAST_BUCKET_BYTES:
            continue
        by_link = rate * BUCKET_SECONDS * crowding
        usual_limit = min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, total * max(1.0, crowding / 2) // BUCKETS, by_link))
        first = min(usual_limit, max(LEAST_BUCKET_BYTES, by_link / 4))
        filled, limit, remaining, previous_position, is_last = 0, first, total, -1, False
        for position, size in group:
            begins_last = not is_last and remaining <= max(LEAST_BUCKET_BYTES, size)  # a large last tensor is alone
            if filled and (begins_last or filled + size > limit):
                ends.add(previous_position)
                filled, limit = 0, min(usual_limit, 2 * limit)
            is_last = is_last or begins_last
            filled, remaining, previous_position = filled + size, remaining - size, position
    return ends


def fill_buckets(
    parameters: Iterable[Parameter],
    bucket_bytes: int = BUCKET_BYTES,
    ends: Container[int] = frozenset(),
    mixes: bool = False,
) -> list[Bucket]:
    """Return buckets for `parameters`, which come in the order in which backward produces their gradients.

    A bucket has at most `bucket_bytes`, and ends after a parameter whose position is in `ends`. A larger parameter has
    a separate bucket, and so has a parameter whose gradients are sparse tensors. With `mixes`, small tensors share the
    buckets of the others. Buckets come in the order in which their last gradient is produced: the order of the
    exchanges, the same on every rank that passes the same parameters.
    """
    open_buckets: dict[tuple[torch.dtype, bool], Bucket] = {}
    complete: list[tuple[int, Bucket]] = []
    last: dict[int, int] = {}
    for position, parameter in enumerate(parameters):
        if parameter.length == 0:
            continue
        if parameter.has_rows:
            alone = Bucket(parameter.dtype, True, has_rows=True)
            alone.append(parameter)
            complete.append((position, alone))
            continue
        key = (parameter.dtype, parameter.is_always_dense and not mixes)
        bucket = open_buckets.get(key)
        size = parameter.length * parameter.dtype.itemsize
        if bucket is not None and bucket.length * parameter.dtype.itemsize + size > bucket_bytes:
            complete.append((last[id(bucket)], open_buckets.pop(key)))
            bucket = None
        if bucket is None:
            bucket = open_buckets[key] = Bucket(*key)
        bucket.append(parameter)
        last[id(bucket)] = position
        if position in ends:
            complete.append((position, open_buckets.pop(key)))
    complete += [(last[id(bucket)], bucket) for bucket in open_buckets.values()]
    buckets = [bucket for _, bucket in sorted(complete, key=lambda entry: entry[0])]
    for bucket in buckets:
        bucket.is_always_dense = bucket.has_rows or all(parameter.is_always_dense for parameter in bucket.parameters)
    return buckets


def choose_largest_size(algorithm: Algorithm, is_on_cpu: bool, nodes: int, ranks: int, total_bytes: int) -> int | None:
    """Return the most bytes of a bucket, None if sizes are chosen so that exchanges overlap with backward. All
    gradients have `total_bytes`. A device has its own pipeline, so its buckets are large."""
    if is_on_cpu:
        return None if ranks > 1 and algorithm.has_small_buckets else BUCKET_BYTES
    if ranks == 1 or not algorithm.compresses:
        return BUCKET_BYTES
    most = DEVICE_BUCKET_BYTES
    if nodes > DEVICE_NODES and not algorithm.has_two_stages(nodes):
        most = most * DEVICE_NODES // nodes
    return max(BUCKET_BYTES, min(most, total_bytes // DEVICE_BUCKETS))


def can_mix(algorithm: Algorithm, dense_wire: str) -> bool:
    """Return True if small tensors can share the buckets of others: all values are sent as they are."""
    return not algorithm.compresses and dense_wire == DENSE_WIRE.default


def plan_buckets(
    parameters: list[Parameter], largest: int | None, rate: float = 0.0, crowding: float = 1.0, mixes: bool = False
) -> list[Bucket]:
    """Return the buckets of `parameters`, which come in the order of their gradients. `largest` is what
    `choose_largest_size` returned, or the job's choice; `rate` and `crowding` are as for `find_overlap_ends`, and
    `mixes` as for `fill_buckets`."""
    if largest is not None:
        return fill_buckets(parameters, largest, mixes=mixes)
    return fill_buckets(parameters, ends=find_overlap_ends(parameters, rate, crowding), mixes=mixes)
