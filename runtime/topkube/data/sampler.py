"""The sampler: each epoch has a permutation of the whole dataset, whose samples are assigned to the ranks in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from topkube.data.base.rank_place import RankPlace, find_place
from topkube.data.base.shared_numbers import SharedNumbers
from topkube.data.remote.listing import Longs
from topkube.errors import ArgumentError, WorldError

_NOTE_COUNT, _FIRST_NOTE, _MOST_NOTES = 3, 4, 16
"""Among the shared numbers: the place of the count of all notes, that of the first note, and how many are kept."""


@dataclass(frozen=True)
class _Taken:
    """Samples of an order that are finished: the first `before`, and of the others `counts[r]` of rank r, which got
    every entry number r + i * ranks."""

    before: int
    counts: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.counts)

    def remove_from(self, order: Longs) -> Longs:
        """Return what is left of `order`, with the first `before` entries still in it: others count them too."""
        is_left = np.ones(order.size, np.bool_)
        for rank, count in enumerate(self.counts):
            is_left[self.before + rank :: len(self.counts)][:count] = False
        return order[is_left]


class DistributedSampler:
    """A sampler for `torch.utils.data.DataLoader`: rank r of P gets entries r, r + P, r + 2P, ... of the epoch's
    permutation.

    For a `CachedDataset` with more than `window` shards, the shards are in random order and samples are shuffled among
    `window` consecutive shards, so that the first epoch can begin when the first shards have arrived. `window=0`
    shuffles all samples at once, as for datasets without shards.

    The permutation depends only on `seed` and the epoch, so the samples of a step are the same for any number of
    ranks. No sample is added or repeated. Therefore ranks may get different numbers of samples, which `run.progress`
    and `optimizer.join` support. `drop_last` leaves out the samples that cannot be divided evenly, also after a resume
    with another number of ranks. `shuffle=False` keeps the order of the dataset.

    Raises ArgumentError for a position outside the epoch and for the state of another dataset.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, drop_last: bool = False, window: int = 16
    ) -> None:
        if window < 0:
            raise ArgumentError(
                f"window = {window} is negative",
                next_step="pass a number of shards, or 0 to shuffle all samples at once",
            )
        if seed < 0:
            raise ArgumentError(f"seed = {seed} is negative", next_step="pass 0 or more")
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self.window = window
        # Workers of a data loader share this memory, so persistent workers see the next epoch: the epoch, the position,
        # the length of `_taken`, and notes of iterators of persistent workers: their number, and a key and a position
        # for each.
        self._state = SharedNumbers(_FIRST_NOTE + 2 * _MOST_NOTES)
        self._last_position = 0
        """The position, as this process has set it. A worker knows by it where its loader's first iterator began."""
        self._iterators_of_worker = 0
        self._fixed_position: int | None = None
        self._taken: list[_Taken] = []
        """What earlier iterators took unevenly. Each entry refers to the samples that the entries before it left."""
        self._own = 0
        self._place_of_rank: RankPlace | None = None
        """In a process that a rank has spawned, the place of the rank; else None."""

    def __getstate__(self) -> dict[str, Any]:
        place = self._place_of_rank
        with contextlib.suppress(WorldError):
            place = place or find_place()
        return {**self.__dict__, "_place_of_rank": place and RankPlace(place.rank, place.size)}

    def _find_place(self) -> RankPlace:
        return self._place_of_rank or find_place()

    @property
    def epoch(self) -> int:
        """The current epoch. `set_epoch` begins another epoch."""
        return self._state[0]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._state[0] = epoch

    @property
    def position(self) -> int:
        """The number of samples of this epoch that all ranks together have finished."""
        return self._state[1] if self._fixed_position is None else self._fixed_position

    @position.setter
    def position(self, samples: int) -> None:
        self._check_position(samples)
        self._begin(self.epoch, samples)

    def _store_position(self, position: int) -> None:
        self._state[1] = self._last_position = position

    def _begin(self, epoch: int, position: int, taken: Sequence[_Taken] = ()) -> None:
        self._taken, self._own = list(taken), 0
        self._state[0], self._state[2] = epoch, len(self._taken)
        self._store_position(position)

    def _check_position(self, samples: int) -> None:
        count = self._count_samples()
        if not 0 <= samples <= count:
            raise ArgumentError(
                f"position {samples} is outside the epoch, which has {count} samples",
                cause="the position belongs to another dataset, or samples were counted twice",
                next_step="count the samples of all ranks, each sample once",
            )

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which has its own permutation. If `epoch` is the current epoch, the position stays."""
        if epoch != self.epoch:
            self._begin(epoch, 0)

    def advance(self, samples: int, own: int | None = None) -> None:
        """Count `samples` of all ranks as finished, of which `own` were this rank's. `run.progress` calls this method
        after every step. The next iterator starts at the new position; iterators that exist do not change.

        Without `own`, ranks have finished equally many samples, but for the last ones of the epoch."""
        position = min(self.position + samples, self._count_samples()) if samples >= 0 else samples
        self._check_position(position)
        self._store_position(position)
        self._own += own or 0

    @property
    def own_samples(self) -> int:
        """The samples of the current iterator that this rank has finished, according to `advance`."""
        return self._own

    def begin_iterator(self, own_samples: Sequence[int]) -> None:
        """Prepare for a new iterator in the middle of an epoch. `own_samples` has the `own_samples` of every rank, in
        rank order: with batches of different sizes, the rest is not the end of the order."""
        if self._is_uneven(own_samples):
            self._taken.append(self._take(own_samples))
        self._own, self._state[2] = 0, len(self._taken)

    def _take(self, own_samples: Sequence[int]) -> _Taken:
        before = self.position - sum(own_samples) - sum(taken.samples for taken in self._taken)
        return _Taken(max(before, 0), tuple(own_samples))

    @staticmethod
    def _is_uneven(own_samples: Sequence[int]) -> bool:
        """Return False if an iterator's samples that ranks have finished are its first ones."""
        total, ranks = sum(own_samples), len(own_samples)
        return any(count != max(0, -(-(total - rank) // ranks)) for rank, count in enumerate(own_samples))

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """In this context, no sample of the epoch is finished, and lengths are those of a whole epoch."""
        position = self.position
        self._store_position(0)
        try:
            yield
        finally:
            self._store_position(position)

    @contextmanager
    def at_start_of_iterator(self, loader: int) -> Iterator[None]:
        """In this context, the position is that at which the iterator began for which a worker of a data loader begins
        its own part. All workers of the loader pass the same `loader`, a number; each calls this once per iterator.

        A worker may begin late: the loader can return batches of other workers, and `advance` count them, before.
        """
        number, self._iterators_of_worker = self._iterators_of_worker, self._iterators_of_worker + 1
        # A worker starts when its loader begins the first iterator. Later, the loader has no batch, and `advance` none
        # to count, before the first worker is here.
        self._fixed_position = self._last_position if number == 0 else self._find_noted_position(loader, number)
        try:
            yield
        finally:
            self._fixed_position = None

    def _find_noted_position(self, loader: int, number: int) -> int:
        """Return the position at which the first worker began iterator `number`, and note it if this is that worker."""
        key = 1 + (loader * 1_000_003 + number) % (2**62)
        with self._state.locked():
            for place in range(_FIRST_NOTE, _FIRST_NOTE + 2 * _MOST_NOTES, 2):
                if self._state[place] == key:
                    return self._state[place + 1]
            place = _FIRST_NOTE + 2 * (self._state[_NOTE_COUNT] % _MOST_NOTES)
            self._state[_NOTE_COUNT] += 1
            self._state[place], self._state[place + 1] = key, self._state[1]
            return self._state[place + 1]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def indices(self) -> Longs:
        """Return the samples that are left for this rank in this epoch, in order, and announce the order of all ranks'
        samples to the dataset."""
        place = self._find_place()
        remaining = self._list_remaining()[: self._count_remaining(place.size)]
        if hasattr(self.dataset, "expect"):
            self.dataset.expect(remaining)
        return remaining[place.rank :: place.size]

    def __len__(self) -> int:
        """Return the number of samples that are left for this rank in this epoch."""
        place = self._find_place()
        return max(0, -(-(self._count_remaining(place.size) - place.rank) // place.size))

    @property
    def common_length(self) -> int:
        """The smallest number of samples that a rank has left."""
        size = self._find_place().size
        return self._count_remaining(size) // size

    def _count_samples(self) -> int:
        """Return the number of samples of an epoch."""
        return len(self.dataset)

    def _count_remaining(self, size: int) -> int:
        """Return the number of samples of this epoch that are left for all `size` ranks."""
        remaining = max(0, self._count_samples() - self.position)
        return remaining - remaining % size if self.drop_last else remaining

    def _list_remaining(self) -> Longs:
        """Return the samples of the epoch that are not finished, in order."""
        if self._state[2] != len(self._taken):
            raise ArgumentError(
                "this process does not know which samples are finished",
                cause="ranks had batches of different sizes, and the loop over the epoch began again in its middle, in"
                " workers of a data loader that were started before",
                next_step="pass persistent_workers=False to the data loader",
            )
        remaining, position = self._order_samples(), self.position
        for taken in self._taken:
            remaining = taken.remove_from(remaining)
            position -= taken.samples
        return remaining[position:]

    def _order_samples(self) -> Longs:
        """Return all samples of the epoch, in order."""
        count = len(self.dataset)
        if not self.shuffle:
            return np.arange(count)
        random = np.random.default_rng((self.seed, self.epoch))
        starts = getattr(self.dataset, "shard_starts", None)
        if starts is None or not self.window or starts.size - 1 <= self.window:
            return random.permutation(count)
        return permute_by_shard(starts, self.window, random)

    def _describe_order(self) -> dict[str, Any]:
        """Return what determines the order of samples, except the seed and the epoch."""
        return {
            "samples": self._count_samples(),
            "dataset": getattr(self.dataset, "identity", ""),
            "window": self.window,
            "shuffle": self.shuffle,
        }

    def state_dict(self, own_samples: Sequence[int] = ()) -> dict[str, Any]:
        """Return epoch, position, seed, and what identifies the permutation: dataset, number of samples, window and
        shuffle. `own_samples` has the `own_samples` of every rank, which count if batches of ranks differ in size. The
        state is the same on every rank and can be loaded with any number of ranks."""
        state = {"epoch": self.epoch, "position": self.position, "seed": self.seed, **self._describe_order()}
        taken = [*self._taken, self._take(own_samples)] if self._is_uneven(own_samples) else self._taken
        return {**state, "taken": [[entry.before, *entry.counts] for entry in taken]} if taken else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`. Raises ArgumentError, and changes nothing, if `state` was taken in the
        middle of an epoch with another dataset or another order. A state of an older version of TopKube does not
        contain the dataset and the order. It is accepted without this check."""
        for name in ("epoch", "position", "seed"):
            if type(value := state.get(name)) is not int or value < 0:
                raise ArgumentError(
                    f"the sampler's state has {value!r} as {name}",
                    cause="a damaged checkpoint, or a state that is not a sampler's",
                    next_step="resume from another checkpoint",
                )
        position, order = int(state["position"]), self._describe_order()
        different = [name for name in order if name in state and state[name] != order[name]]
        if position and different:
            raise ArgumentError(
                "the sampler's state belongs to another order of samples: "
                + ", ".join(f"{name} is {order[name]!r}, was {state[name]!r}" for name in different),
                cause="the dataset, its shards or the sampler's arguments have changed since the state was taken; "
                "samples would be skipped or repeated",
                next_step="open the dataset as before, or begin with the next epoch (`set_epoch`)",
            )
        self._check_position(position)
        taken = [_Taken(before, tuple(counts)) for before, *counts in state.get("taken", ())]
        if sum(entry.samples for entry in taken) > position:
            raise ArgumentError(
                "the sampler's state has more finished samples than its position",
                cause="a damaged checkpoint",
                next_step="resume from another checkpoint",
            )
        self.seed = state["seed"]
        self._begin(state["epoch"], position, taken)


def permute_by_shard(starts: Longs, window: int, random: np.random.Generator) -> Longs:
    """Return all samples: the shards are in random order, and samples are shuffled among `window` consecutive shards.
    starts: the first sample of each shard, then the number of samples, (shards + 1,)."""
    order, shards = [], random.permutation(starts.size - 1)
    for first in range(0, shards.size, window):
        window_shards = shards[first : first + window]
        samples = np.concatenate([np.arange(starts[shard], starts[shard + 1]) for shard in window_shards])
        order.append(random.permutation(samples))
    return np.concatenate(order)
