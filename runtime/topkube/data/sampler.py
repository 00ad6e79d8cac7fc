"""Which samples a rank gets: one permutation of the whole dataset, dealt out in turn."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from topkube.data.place import here
from topkube.errors import ArgumentError


class DistributedSampler:
    """A sampler for `torch.utils.data.DataLoader`: rank r of P gets entries r, r + P, r + 2P, ... of the epoch's
    permutation.

    Over a `CachedDataset` whose shards are not all small, the permutation is shard by shard: shards in random order,
    samples shuffled among `window` shards that follow each other, so that the first epoch can begin when the first
    shards are here. `window=0` shuffles all samples at once. Other datasets have no shards.

    The permutation depends on `seed` and the epoch only, so the samples of a step are the same for any number of
    ranks. Nothing is padded or repeated: ranks may get unequal numbers, which `run.progress` and `optimizer.join`
    even out; `drop_last` leaves out what does not divide. `shuffle=False` keeps the dataset's order.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, drop_last: bool = False, window: int = 16
    ) -> None:
        if window < 0:
            raise ArgumentError(f"window = {window} is negative", next_step="give shards, or 0 for a whole shuffle")
        if seed < 0:
            raise ArgumentError(f"seed = {seed} is negative", next_step="give 0 or more")
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self.window = window
        # In memory that forked data loader's workers share: persistent ones see the next epoch.
        self._state = np.frombuffer(mmap.mmap(-1, 16), np.int64)

    @property
    def epoch(self) -> int:
        return int(self._state[0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._state[0] = epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have finished."""
        return int(self._state[1])

    @position.setter
    def position(self, samples: int) -> None:
        self._state[1] = samples

    def set_epoch(self, epoch: int) -> None:
        """Begins `epoch`, with a permutation of its own; the same epoch again keeps the position."""
        if epoch != self.epoch:
            self._state[:] = epoch, 0

    def advance(self, samples: int) -> None:
        """Counts `samples` of all ranks as finished; `run.progress` does it after every step. An iterator that has
        begun goes on unchanged: the next one starts there."""
        self._state[1] += samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def indices(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The samples left for this rank in this epoch, in order."""
        place = here()
        left = self._order(place.size)[self.position :]
        if hasattr(self.dataset, "expect"):
            self.dataset.expect(left)
        return left[place.rank :: place.size]

    def __len__(self) -> int:
        """Samples left for this rank in this epoch."""
        place = here()
        return max(0, -(-(self._total(place.size) - self.position - place.rank) // place.size))

    def _total(self, size: int) -> int:
        total = len(self.dataset)
        return total - total % size if self.drop_last else total

    def _order(self, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        count = len(self.dataset)
        if not self.shuffle:
            return np.arange(self._total(size))
        random = np.random.default_rng((self.seed, self.epoch))
        starts = getattr(self.dataset, "shard_starts", None)
        if starts is None or not self.window or starts.size - 1 <= self.window:
            return random.permutation(count)[: self._total(size)]
        order, shards = [], random.permutation(starts.size - 1)
        for first in range(0, shards.size, self.window):
            here_now = shards[first : first + self.window]
            samples = np.concatenate([np.arange(starts[shard], starts[shard + 1]) for shard in here_now])
            order.append(random.permutation(samples))
        return np.concatenate(order)[: self._total(size)]

    def state_dict(self) -> dict[str, int]:
        """Epoch, position and seed: the same on every rank, good for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where `state` was taken, on the same permutation."""
        self._state[:] = state["epoch"], state["position"]
        self.seed = state["seed"]
