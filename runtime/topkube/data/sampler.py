"""The sampler: each epoch has a permutation of the whole dataset, whose samples are assigned to the ranks in turn."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from topkube.data.base.rank_place import find_place
from topkube.data.remote.listing import Longs
from topkube.errors import ArgumentError


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
        # Forked workers of a data loader share this memory, so persistent workers see the next epoch.
        self._state = np.frombuffer(mmap.mmap(-1, 16), np.int64)

    @property
    def epoch(self) -> int:
        """The current epoch. `set_epoch` begins another epoch."""
        return int(self._state[0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._state[0] = epoch

    @property
    def position(self) -> int:
        """The number of samples of this epoch that all ranks together have finished."""
        return int(self._state[1])

    @position.setter
    def position(self, samples: int) -> None:
        self._check_position(samples)
        self._state[1] = samples

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
            self._state[:] = epoch, 0

    def advance(self, samples: int) -> None:
        """Count `samples` of all ranks as finished. `run.progress` calls this method after every step. The next
        iterator starts at the new position; iterators that exist do not change."""
        self.position = min(self.position + samples, self._count_samples()) if samples >= 0 else samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def indices(self) -> Longs:
        """Return the samples that are left for this rank in this epoch, in order, and announce the order of all ranks'
        samples to the dataset."""
        place = find_place()
        remaining = self._order_samples()[self.position :]
        remaining = remaining[: self._count_remaining(place.size)]
        if hasattr(self.dataset, "expect"):
            self.dataset.expect(remaining)
        return remaining[place.rank :: place.size]

    def __len__(self) -> int:
        """Return the number of samples that are left for this rank in this epoch."""
        place = find_place()
        return max(0, -(-(self._count_remaining(place.size) - place.rank) // place.size))

    @property
    def common_length(self) -> int:
        """The smallest number of samples that a rank has left."""
        size = find_place().size
        return self._count_remaining(size) // size

    def _count_samples(self) -> int:
        """Return the number of samples of an epoch."""
        return len(self.dataset)

    def _count_remaining(self, size: int) -> int:
        """Return the number of samples of this epoch that are left for all `size` ranks."""
        remaining = max(0, self._count_samples() - self.position)
        return remaining - remaining % size if self.drop_last else remaining

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

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position, seed, and what identifies the permutation: dataset, number of samples, window and
        shuffle. The state is the same on every rank and can be loaded with any number of ranks."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, **self._describe_order()}

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
        self.seed = state["seed"]
        self._state[:] = state["epoch"], position


def permute_by_shard(starts: Longs, window: int, random: np.random.Generator) -> Longs:
    """Return all samples: the shards are in random order, and samples are shuffled among `window` consecutive shards.
    starts: the first sample of each shard, then the number of samples, (shards + 1,)."""
    order, shards = [], random.permutation(starts.size - 1)
    for first in range(0, shards.size, window):
        window_shards = shards[first : first + window]
        samples = np.concatenate([np.arange(starts[shard], starts[shard + 1]) for shard in window_shards])
        order.append(random.permutation(samples))
    return np.concatenate(order)
