"""Which samples a rank gets: one permutation of the whole dataset, dealt out in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from topkube.errors import ArgumentError
from topkube.world import current


class DistributedSampler:
    """A sampler for `torch.utils.data.DataLoader`: rank r of P gets entries r, r + P, r + 2P, ... of the epoch's
    permutation.

    The permutation depends on `seed` and the epoch only, so the samples of a step are the same for any number of
    ranks. Nothing is padded or repeated: ranks may get unequal numbers, which `run.progress` and `optimizer.join`
    even out; `drop_last` leaves out what does not divide. `shuffle=False` keeps the dataset's order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        if seed < 0:
            raise ArgumentError(f"seed = {seed} is negative", next_step="give 0 or more")
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0
        """Samples of this epoch that all ranks together have finished."""

    def set_epoch(self, epoch: int) -> None:
        """Begins `epoch`, with a permutation of its own; the same epoch again keeps the position."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, samples: int) -> None:
        """Counts `samples` of all ranks as finished; `run.progress` does it after every step. An iterator that has
        begun goes on unchanged: the next one starts there."""
        self.position += samples

    def __iter__(self) -> Iterator[int]:
        world = current()
        return iter(self._order()[self.position + world.rank :: world.size].tolist())

    def __len__(self) -> int:
        """Samples left for this rank in this epoch."""
        world = current()
        return max(0, -(-(self._total(world.size) - self.position - world.rank) // world.size))

    def _total(self, size: int) -> int:
        total = len(self.dataset)
        return total - total % size if self.drop_last else total

    def _order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        count = len(self.dataset)
        order = np.random.default_rng((self.seed, self.epoch)).permutation(count) if self.shuffle else np.arange(count)
        return order[: self._total(current().size)]

    def state_dict(self) -> dict[str, int]:
        """Epoch, position and seed: the same on every rank, good for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where `state` was taken, on the same permutation."""
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
