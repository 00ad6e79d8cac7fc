"""Several datasets in one stream, mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube.data.remote.listing import Longs
from topkube.data.sampler import DistributedSampler, permute_by_shard
from topkube.errors import ArgumentError


class MixedDataset:
    """The concatenation of map-style datasets. `MixedSampler` mixes their samples. Raises ArgumentError if a dataset is
    empty."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = tuple(datasets)
        if not self.datasets or not all(len(dataset) for dataset in self.datasets):
            raise ArgumentError(
                "a MixedDataset got an empty dataset" if self.datasets else "a MixedDataset got no datasets",
                next_step="pass datasets that have samples",
            )
        self.starts: Longs = np.concatenate(([0], np.cumsum([len(dataset) for dataset in self.datasets]))).astype(
            np.int64
        )
        """The first sample of each dataset, then the number of samples: (datasets + 1,)."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | Longs) -> list[Any]:
        """Return the samples with these indices, in this order. Raises IndexError."""
        requested = np.asarray(indices, np.int64)
        if requested.size and not 0 <= requested.min() <= requested.max() < len(self):
            raise IndexError(f"an index is outside the {len(self)} samples of the datasets")
        owners = np.searchsorted(self.starts, requested, "right") - 1
        result: list[Any] = [None] * requested.size
        for number in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == number)
            dataset, own_indices = self.datasets[number], (requested[positions] - self.starts[number]).tolist()
            get_samples = getattr(dataset, "__getitems__", None)
            samples = get_samples(own_indices) if get_samples is not None else [dataset[index] for index in own_indices]
            for position, sample in zip(positions.tolist(), samples, strict=True):
                result[position] = sample
        return result

    @property
    def identity(self) -> list[str]:
        """The identity of each dataset; empty for a dataset without an identity."""
        return [str(getattr(dataset, "identity", "")) for dataset in self.datasets]

    def expect(self, order: Longs) -> None:
        """Announce to every dataset the order in which its samples will be read."""
        owners = np.searchsorted(self.starts, order, "right") - 1
        for number, dataset in enumerate(self.datasets):
            if hasattr(dataset, "expect"):
                dataset.expect(order[owners == number] - self.starts[number])


class MixedSampler(DistributedSampler):
    """A sampler that takes a share of every epoch from each dataset of a MixedDataset.

    weights: one positive number per dataset. An epoch has `samples` samples (default: the samples of all datasets).
    Dataset i contributes weights[i] / sum(weights) of them, rounded so that the shares add up. Each dataset has a
    stream of permutations. An epoch continues the stream at the place where the previous epoch stopped, so each sample
    is used once before any sample is used again. The stream depends only on the seed, the weights and the datasets, so
    it can be resumed with any number of ranks, as with DistributedSampler. Raises ArgumentError.
    """

    def __init__(
        self,
        dataset: MixedDataset,
        weights: Sequence[float],
        samples: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        window: int = 16,
    ) -> None:
        if len(weights) != len(dataset.datasets) or not all(0 < weight < math.inf for weight in weights):
            raise ArgumentError(
                f"weights = {list(weights)} for {len(dataset.datasets)} datasets",
                next_step="pass one positive number per dataset",
            )
        if samples is not None and samples < 1:
            raise ArgumentError(f"samples = {samples} per epoch", next_step="pass 1 or more")
        super().__init__(dataset, True, seed, drop_last, window)
        self.weights = tuple(float(weight) for weight in weights)
        self._samples = len(dataset) if samples is None else samples
        self._shares = _compute_shares(self.weights, self._samples)

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of samples of each dataset in an epoch."""
        return tuple(self._shares.tolist())

    def _count_samples(self) -> int:
        return self._samples

    def _describe_order(self) -> dict[str, Any]:
        dataset: Any = self.dataset
        lengths = np.diff(dataset.starts).tolist()
        return {**super()._describe_order(), "weights": list(self.weights), "lengths": lengths}

    def _order_samples(self) -> Longs:
        dataset: Any = self.dataset
        owners = np.repeat(np.arange(self._shares.size), self._shares)
        np.random.default_rng((self.seed, self.epoch)).shuffle(owners)
        order = np.empty(self._samples, np.int64)
        for number, share in enumerate(self._shares.tolist()):
            order[owners == number] = dataset.starts[number] + self._take_from_stream(number, self.epoch * share, share)
        return order

    def _take_from_stream(self, number: int, start: int, count: int) -> Longs:
        """Return samples `start` to `start + count` - 1 of the endless stream of permutations of dataset `number`."""
        dataset: Any = self.dataset
        inner = dataset.datasets[number]
        size = len(inner)
        starts = getattr(inner, "shard_starts", None)
        parts = []
        for repetition in range(start // size, -(-(start + count) // size)):
            random = np.random.default_rng((self.seed, number, repetition))
            if starts is not None and self.window and starts.size - 1 > self.window:
                order = permute_by_shard(starts, self.window, random)
            else:
                order = random.permutation(size)
            parts.append(order[max(0, start - repetition * size) : start + count - repetition * size])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _compute_shares(weights: Sequence[float], samples: int) -> Longs:
    """Return whole numbers in proportion to the weights that add up to `samples`. The numbers with the largest
    remainders are rounded up."""
    exact = np.array(weights) / sum(weights) * samples
    shares = np.floor(exact).astype(np.int64)
    lacking = samples - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:lacking]] += 1
    return shares
