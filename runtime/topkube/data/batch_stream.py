"""An iterable dataset: the samples of a rank in an epoch, as a stream of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from topkube.data.base.batch import collate
from topkube.data.remote.listing import Longs
from topkube.data.sampler import DistributedSampler


class BatchSource(Protocol):
    """A dataset that reads a whole batch at once, like CachedDataset."""

    transform: Callable[[Any], Any] | None

    def batch(self, indices: Longs) -> Sequence[Any]: ...

    def __getitems__(self, indices: Longs) -> Sequence[Any]: ...


class Batches(IterableDataset[Any]):
    """The samples that `sampler` assigns to this rank, in the order of the sampler.

    A training loop can iterate over this object directly. Then `ahead` threads prepare up to `ahead` batches. In a
    DataLoader (`batch_size=None`) with W workers, each worker prepares every W-th batch, and the loader returns the
    batches in the sampler's order. With `drop_last`, every rank gets the same number of batches, and all batches are
    full. Persistent workers see changes of the sampler's epoch and position.
    """

    def __init__(
        self,
        dataset: BatchSource,
        batch_size: int | None,
        sampler: DistributedSampler,
        *,
        drop_last: bool = False,
        ahead: int = 0,
    ) -> None:
        self.dataset, self.batch_size, self.sampler = dataset, batch_size, sampler
        self.drop_last, self.ahead = drop_last, ahead

    def __len__(self) -> int:
        size = self.batch_size or 1
        return self.sampler.common_length // size if self.drop_last else -(-len(self.sampler) // size)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            parts = self._split_batches(self.sampler.indices())
        else:
            with self.sampler.at_start_of_iterator(worker.seed - worker.id):
                parts = self._split_batches(self.sampler.indices())
            parts = parts[worker.id :: worker.num_workers]
        if self.batch_size is None:
            return (sample for part in parts for sample in self.dataset.__getitems__(part))
        if self.ahead and worker is None:
            return self._read_ahead(parts)
        return (self._read_batch(part) for part in parts)

    def _split_batches(self, indices: Longs) -> list[Longs]:
        """Return the indices of each batch."""
        size = self.batch_size or 1
        end = self.sampler.common_length // size * size if self.drop_last else indices.size
        return [indices[start : start + size] for start in range(0, end, size)]

    def _read_batch(self, indices: Longs) -> Any:
        # The sampler's indices are valid, so `batch` reads them without a check. A transform needs single samples.
        if self.dataset.transform is None:
            return collate(self.dataset.batch(indices))
        return collate(self.dataset.__getitems__(indices))

    def _read_ahead(self, parts: list[Longs]) -> Iterator[Any]:
        """Yield the batches in order. Threads read the next batches meanwhile."""
        waiting: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(self.ahead, "topkube-batch") as pool:
            try:
                for part in parts:
                    waiting.append(pool.submit(self._read_batch, part))
                    if len(waiting) > self.ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
