"""The iterable style: a rank's part of an epoch as a stream of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from topkube.data.batch import collate
from topkube.data.listing import Longs

if TYPE_CHECKING:
    from topkube.data.dataset import CachedDataset
    from topkube.data.sampler import DistributedSampler


class Batches(IterableDataset[Any]):
    """The samples that `sampler` deals to this rank, in its order.

    Alone it is a loop's iterable; `ahead` batches are then prepared by as many threads. In a DataLoader
    (`batch_size=None`) every worker prepares each W-th batch, and the loader hands them out in the sampler's order.
    `sampler.set_epoch` and its position reach persistent workers that were forked.
    """

    def __init__(
        self,
        dataset: CachedDataset,
        batch_size: int | None,
        sampler: DistributedSampler,
        *,
        drop_last: bool = False,
        ahead: int = 0,
    ) -> None:
        self.dataset, self.batch_size, self.sampler = dataset, batch_size, sampler
        self.drop_last, self.ahead = drop_last, ahead

    def __len__(self) -> int:
        samples, size = len(self.sampler), self.batch_size or 1
        return samples // size if self.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[Any]:
        parts = self._parts(self.sampler.indices())
        worker = get_worker_info()
        if worker is not None:
            parts = parts[worker.id :: worker.num_workers]
        if self.batch_size is None:
            return (sample for part in parts for sample in self.dataset.__getitems__(part))
        if self.ahead and worker is None:
            return self._prepared(parts)
        return (self._collated(part) for part in parts)

    def _parts(self, indices: Longs) -> list[Longs]:
        size = self.batch_size or 1
        end = indices.size - indices.size % size if self.drop_last else indices.size
        return [indices[start : start + size] for start in range(0, end, size)]

    def _collated(self, indices: Longs) -> Any:
        # The sampler's numbers are in range: only with a transform are samples taken apart.
        known = self.dataset.transform is None
        return collate(self.dataset.batch(indices) if known else self.dataset.__getitems__(indices))

    def _prepared(self, parts: list[Longs]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(self.ahead, "topkube-batch") as pool:
            try:
                for part in parts:
                    waiting.append(pool.submit(self._collated, part))
                    if len(waiting) > self.ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
