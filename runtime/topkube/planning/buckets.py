"""The buckets that the runtime makes of a model's gradients, and the pieces in which dense buckets travel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from topkube.algorithms import DENSE_WIRE, Algorithm
from topkube.errors import ArgumentError
from topkube.installation import build_install_command
from topkube.planning.profile import Gradient, StepProfile

MOST_PIECES = 64
"""More pieces change the predicted time by less than 2% of the link's."""
_MANY_BUCKETS = 32
"""With more buckets, their pieces are not simulated one by one: the buckets overlap like pieces."""


@dataclass(frozen=True)
class BucketLength:
    """A bucket: `last` is the position of the gradient that completes it."""

    name: str
    elements: int
    itemsize: int
    is_always_dense: bool
    last: int
    pieces: int
    tensors: tuple[int, ...]
    """The elements of each of its tensors."""


def plan_bucket_lengths(
    profile: StepProfile,
    algorithm: Algorithm,
    nodes: int,
    ranks: int,
    rate: float = 0.0,
    crowding: float = 1.0,
    dense_wire: str = DENSE_WIRE.default,
) -> tuple[BucketLength, ...]:
    """Return the buckets that the runtime plans for the gradients of `profile`, in the order of their exchanges. `rate`
    is the bytes of gradients that pass the link per second (0: unknown), `crowding` the ranks per processor, and
    `dense_wire` the format of dense values between nodes."""
    largest = _find_largest_bucket(profile, algorithm, nodes, ranks)
    ends: frozenset[int] = frozenset()
    if largest is None:
        from topkube.training.exchange.buckets.fusion import find_overlap_ends

        ends = frozenset(find_overlap_ends(_build_parameters(profile.gradients), rate, crowding))
    return _fill_buckets(profile.gradients, largest, ends, _can_mix(algorithm, dense_wire))


def _find_largest_bucket(profile: StepProfile, algorithm: Algorithm, nodes: int, ranks: int) -> int | None:
    try:
        from topkube.training.exchange.buckets.fusion import choose_largest_size
    except ImportError as error:
        raise ArgumentError(
            f"a step cannot be predicted: {error}",
            cause="torch is not installed; the rule that makes buckets is part of the training loop",
            next_step=build_install_command("train"),
        ) from error
    total_bytes = sum(gradient.elements * gradient.itemsize for gradient in profile.gradients)
    return profile.bucket_bytes or choose_largest_size(algorithm, profile.on_cpu, nodes, ranks, total_bytes)


def _can_mix(algorithm: Algorithm, dense_wire: str) -> bool:
    from topkube.training.exchange.buckets.fusion import can_mix

    return can_mix(algorithm, dense_wire)


@functools.lru_cache(maxsize=4)
def _build_parameters(gradients: tuple[Gradient, ...]) -> list[Any]:
    """Return what the bucket rule reads of the parameters of the gradients."""
    import torch

    from topkube.training.exchange.buckets.parameter import SMALL_ELEMENTS

    dtype_of_itemsize = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    return [
        SimpleNamespace(
            position=position,
            length=gradient.elements,
            dtype=dtype_of_itemsize[gradient.itemsize],
            is_always_dense=gradient.is_always_dense or gradient.elements < SMALL_ELEMENTS or gradient.itemsize == 8,
            has_rows=False,
        )
        for position, gradient in enumerate(gradients)
    ]


@functools.lru_cache(maxsize=64)
def _fill_buckets(
    gradients: tuple[Gradient, ...], largest: int | None, ends: frozenset[int], mixes: bool
) -> tuple[BucketLength, ...]:
    """Return the buckets with these ends. Many rates have the same ends."""
    from topkube.training.exchange.buckets.fusion import BUCKET_BYTES, fill_buckets

    planned = fill_buckets(_build_parameters(gradients), BUCKET_BYTES if largest is None else largest, ends, mixes)
    last_position, lengths = -1, []
    for number, bucket in enumerate(planned):
        members: list[Any] = bucket.parameters
        last_position = max(last_position, *(member.position for member in members))
        pieces = _count_pieces(bucket.length * bucket.dtype.itemsize) if len(planned) <= _MANY_BUCKETS else 1
        lengths.append(
            BucketLength(
                f"bucket {number}",
                bucket.length,
                bucket.dtype.itemsize,
                bucket.is_always_dense,
                last_position,
                pieces,
                tuple(member.length for member in members),
            )
        )
    return tuple(lengths)


def _count_pieces(nbytes: int) -> int:
    """Return the number of pieces in which a dense bucket of `nbytes` bytes travels, at most MOST_PIECES."""
    from topkube.collectives.overlapped import count_pieces

    return min(count_pieces(nbytes), MOST_PIECES)
