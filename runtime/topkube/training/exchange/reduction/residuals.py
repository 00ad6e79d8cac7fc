"""Residuals by parameter name and shard: they are created when first needed, saved and loaded.

A rank keeps the residual of its shard of every sparse bucket. Saved pieces are keyed by parameter name and contain
their position in the flattened parameter, so they depend neither on the buckets nor on the number of ranks. Residuals
are in units of the mean gradient: the sum of all copies of an element is the part of its gradient that was not sent
yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from topkube.algorithms import Algorithm
from topkube.collectives.error_feedback import Residual
from topkube.collectives.shard import count_residual_copies, residual_range
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.world import World

Pieces = dict[str, list[tuple[int, torch.Tensor]]]
"""Parameter name -> (first element in the flattened parameter, float32 values), ...; overlapping pieces add up, except
those of factors (`is_factor`)."""


def name_factor(parameter: str) -> str:
    """Return the name under which the factor of a parameter is saved."""
    return f"{parameter} factor"


def is_factor(name: str) -> bool:
    """Return True if `name` is that of a factor in the saved pieces: every node saves the same bits."""
    return name.endswith(name_factor(""))


def list_foreign(pieces: Pieces, parameters: Iterable[str]) -> list[str]:
    """Return the names of pieces that are not zero and belong to none of the `parameters` (names)."""
    known = {key for name in parameters for key in (name, f"{name} velocity", name_factor(name))}
    foreign = (name for name, entries in pieces.items() if any(values.any() for _, values in entries))
    return sorted(set(foreign) - known)


Momentum = Callable[[], tuple[float, float]]
"""Returns the momentum to correct for (0: none) and the factor of a gradient in its velocity."""


class Residuals:
    """This rank's residuals under one algorithm. The velocity of a parameter, with momentum correction, is saved
    under the name "NAME velocity", and the factor that `powersgd` or `acpsgd` keeps under "NAME factor". If buckets are
    reduced on a `device` (collectives/device/), residuals are on that device."""

    def __init__(
        self,
        world: World,
        algorithm: Algorithm,
        momentum: Momentum = lambda: (0.0, 1.0),
        device: torch.device | None = None,
    ) -> None:
        self._world, self._algorithm, self._momentum, self._device = world, algorithm, momentum, device
        self._buckets: list[Bucket] = []
        self._loaded: Pieces = {}
        """Pieces whose bucket was not exchanged yet."""
        self._loaded_whole: set[str] = set()
        """The names of loaded pieces that every rank of this copy holds as a whole, because another world saved
        them."""
        self._used: dict[int, Bucket] = {}
        """The buckets of the current exchange, by id."""

    def prepare(self, bucket: Bucket, loss_scale: float = 1.0) -> Residual:
        """Return the bucket's residual, ready for an exchange of gradients that are multiplied by `loss_scale`. A new
        residual contains loaded values, or zeros."""
        if bucket.residual is None:
            start, stop = self._find_range(bucket.length)
            bucket.residual = Residual(stop - start, *self._momentum(), self._device)
            for name, begin, end, at in _find_overlaps(bucket, start, stop):
                for key, array in _list_tensors(name, bucket.residual.current, bucket.residual.velocity):
                    for first, values in self._loaded.pop(key, []):
                        low, high = max(begin, first), min(end, first + values.numel())
                        if low < high:
                            target = array[at + low - begin : at + high - begin]
                            target += values[low - first : high - first].to(target.device)
            bucket.residual.factors = [self._take_loaded_factor(parameter) for parameter in bucket.parameters]
            for parameter in bucket.parameters:  # the rest belongs to other ranks, which have loaded it
                self._loaded.pop(parameter.name, None)
                self._loaded.pop(f"{parameter.name} velocity", None)
            self._buckets.append(bucket)
        if bucket.residual.has_velocity:
            bucket.residual.momentum, bucket.residual.gain = self._momentum()  # schedules may change it
        bucket.residual.prepare()
        bucket.residual.rescale(loss_scale)
        self._used[id(bucket)] = bucket
        return bucket.residual

    def leave_buckets(self) -> None:
        """Keep all residuals by the names of parameters, because buckets will be planned again. No exchange since the
        last step may have used them."""
        self.load(self.save(), self.list_whole())

    def forget_zeros(self, bucket: Bucket) -> None:
        """Free the bucket's residual if it is final and zero."""
        residual = bucket.residual
        if residual is not None and not residual.is_tentative and not residual.current.any():
            bucket.residual = None
            self._buckets = [other for other in self._buckets if other is not bucket]

    def find_range(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements [start, stop) of the bucket that this rank's residual belongs to."""
        return self._find_range(bucket.length)

    def _take_loaded_factor(self, parameter: Parameter) -> Any:
        """Return the factor of `powersgd` or `acpsgd` that was loaded for a parameter: float32, one-dimensional; empty
        without one."""
        entries = self._loaded.pop(name_factor(parameter.name), [])
        return entries[0][1].numpy() if entries else np.empty(0, np.float32)

    def accept(self) -> None:
        """Keep what the exchange did not send, to add it to the next exchange: all ranks agree that it was finite."""
        for bucket in self._used.values():
            assert bucket.residual is not None
            bucket.residual.accept()
        self._used.clear()

    def reject(self) -> None:
        """Undo the exchange: residuals stay as they were before it."""
        self._used.clear()

    def commit(self) -> None:
        """Make the residuals final: the optimizer made its step."""
        for residual in self._list_all():
            residual.commit()

    def discard(self) -> None:
        """Restore the residuals of the last step bit for bit: the gradients since then were discarded."""
        self._used.clear()
        for residual in self._list_all():
            residual.discard()

    @property
    def are_tentative(self) -> bool:
        """True if an exchange since the last step can still be undone."""
        return any(residual.is_tentative for residual in self._list_all())

    def discard_parameters(self, is_discarded: Callable[[Parameter], bool]) -> None:
        """Undo the exchanges since the last step of those parameters whose gradients are discarded."""
        for bucket in self._buckets:
            residual = bucket.residual
            if residual is None or not residual.is_tentative:
                continue
            discarded = {p.name for p in bucket.parameters if p.is_exchanged and is_discarded(p)}
            if len(discarded) == len(bucket.parameters):
                residual.discard()
                continue
            start = self._find_range(bucket.length)[0]
            for name, begin, end, at in _find_overlaps(bucket, start, start + len(residual)):
                if name in discarded:
                    residual.discard_range(at, at + end - begin)

    @contextmanager
    def set_frozen_aside(self, bucket: Bucket, residual: Residual) -> Iterator[None]:
        """Return a context in which an exchange does not send the residuals of the bucket's frozen parameters. They
        wait until the parameters are trained again."""
        start = self._find_range(bucket.length)[0]
        frozen = {p.name for p in bucket.parameters if not p.tensor.requires_grad}
        places = [
            slice(at, at + end - begin)
            for name, begin, end, at in _find_overlaps(bucket, start, start + len(residual))
            if name in frozen
        ]
        arrays = [(residual.current, "pending")] + [(residual.velocity, "pending_velocity")] * bool(
            residual.has_velocity
        )
        kept = [
            (values, pending_name, place, _copy_values(values[place]))
            for values, pending_name in arrays
            for place in places
        ]
        for values, _, place, _ in kept:
            values[place] = 0
        yield
        for values, pending_name, place, kept_values in kept:
            values[place] = kept_values
            getattr(residual, pending_name)[place] = kept_values

    def _list_all(self) -> Iterator[Residual]:
        return (bucket.residual for bucket in self._buckets if bucket.residual is not None)

    def list_arrays(self) -> list[torch.Tensor]:
        """Return the residuals themselves, one per bucket (float32, this rank's shard), not copied."""
        residuals = [_as_tensor(bucket.residual.current) for bucket in self._buckets if bucket.residual is not None]
        return [values for values in residuals if values.numel()]

    def save(self) -> Pieces:
        """Return copies of all pieces that this rank owns, as the last step left them, in units of true gradients."""
        pieces: Pieces = {name: list(entries) for name, entries in self._loaded.items()}
        for bucket in self._buckets:
            assert bucket.residual is not None
            start = self._find_range(bucket.length)[0]
            for name, begin, end, at in _find_overlaps(bucket, start, start + len(bucket.residual)):
                for key, array in _list_tensors(name, *bucket.residual.committed):
                    values = array[at : at + end - begin].to("cpu", copy=True)
                    values /= bucket.residual.loss_scale
                    pieces.setdefault(key, []).append((begin, values))
            for parameter, factor in zip(bucket.parameters, bucket.residual.committed_factors, strict=False):
                if factor.size:
                    pieces[name_factor(parameter.name)] = [(0, torch.from_numpy(factor.reshape(-1).copy()))]
        return pieces

    @property
    def has_loaded(self) -> bool:
        """True if values were loaded that this rank has not used yet, and some are not zero."""
        return any(values.any() for entries in self._loaded.values() for _, values in entries)

    def list_whole(self) -> list[str]:
        """Return the names of the pieces that every rank of this copy saves with the same values. They count once."""
        return sorted(self._loaded_whole & self._loaded.keys())

    def load(self, pieces: Mapping[str, Iterable[tuple[int, torch.Tensor]]], whole: Iterable[str] = ()) -> None:
        """Replace all residuals. Pieces that this rank does not own are dropped when their bucket is first
        exchanged. `whole` names the pieces that every rank of this copy loads with the same values."""
        for bucket in self._buckets:
            bucket.residual = None
        self._buckets.clear()
        self._used.clear()
        self._loaded = {name: list(entries) for name, entries in pieces.items()}
        self._loaded_whole = set(whole)

    def _find_range(self, length: int) -> tuple[int, int]:
        """Return this rank's part of a bucket: its shard, or the whole bucket if every rank keeps its own residual."""
        return residual_range(self._algorithm, self._world, length)

    @property
    def copies(self) -> int:
        """The number of residuals of every element in the whole world: one per node, or one per rank."""
        return count_residual_copies(self._algorithm, self._world)[0]

    @property
    def copy(self) -> int:
        """The number of the copy of which this rank holds a part."""
        return count_residual_copies(self._algorithm, self._world)[1]


def _list_tensors(name: str, residual: Any, velocity: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arrays of a parameter: (name in the saved pieces, values of the shard, on any device)."""
    yield name, _as_tensor(residual)
    if len(velocity):
        yield f"{name} velocity", _as_tensor(velocity)


def _copy_values(values: Any) -> Any:
    return values.clone() if isinstance(values, torch.Tensor) else values.copy()


def _as_tensor(values: Any) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def _find_overlaps(bucket: Bucket, start: int, stop: int) -> Iterable[tuple[str, int, int, int]]:
    """Yield the parameters with elements in [start, stop) of the bucket: (name, first and end element in the parameter,
    offset from start)."""
    for parameter, begin, end in zip(bucket.parameters, bucket.starts, bucket.starts[1:], strict=False):
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield parameter.name, low - begin, high - begin, low - start
