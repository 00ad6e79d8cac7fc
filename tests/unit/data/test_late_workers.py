"""Workers of a data loader that begin later than others: the loop has trained batches by then, and counted them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, get_worker_info

from topkube.data.batch_stream import Batches
from topkube.data.sampler import DistributedSampler

SAMPLES, BATCH = 64, 4


class Numbers:
    """A dataset of numbers."""

    transform = None

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: Any) -> Sequence[Any]:
        return [int(index) for index in indices]

    def __getitems__(self, indices: Any) -> Sequence[Any]:
        return self.batch(indices)


class LateSampler(DistributedSampler):
    """A sampler with which worker 1 begins each iterator when its file is there, the first one included."""

    folder: Path
    iterator = 0

    @contextmanager
    def at_start_of_iterator(self, loader: int) -> Iterator[None]:
        worker = get_worker_info()
        if worker is not None and worker.id == 1:
            wait_for_file(self.folder / str(self.iterator))
        self.iterator += 1
        with super().at_start_of_iterator(loader):
            yield


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_in_second_worker(path: Path, worker: int) -> None:
    if worker == 1:
        wait_for_file(path)


def train_epoch(loader: Any, sampler: DistributedSampler, begun: Path) -> list[int]:
    """Return the samples of an epoch. The second worker may begin after the first batch was counted."""
    order: list[int] = []
    for batch in loader:
        order += [int(number) for number in batch]
        sampler.advance(len(batch))
        begun.touch()
    return order


def build_loader(sampler: DistributedSampler, start: str, **options: Any) -> Any:
    return DataLoader(
        Batches(Numbers(), BATCH, sampler),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=start,
        **options,
    )


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_that_starts_late_reads_its_part_of_the_whole_order(tmp_path: Path, start: str) -> None:
    sampler = DistributedSampler(Numbers())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order, begun = sampler.indices().tolist(), tmp_path / str(epoch)
        loader = build_loader(sampler, start, worker_init_fn=partial(wait_in_second_worker, begun))
        assert train_epoch(loader, sampler, begun) == order


def test_a_persistent_worker_that_goes_on_late_reads_its_part_of_the_whole_order(tmp_path: Path) -> None:
    sampler = LateSampler(Numbers())
    sampler.folder = tmp_path
    loader = build_loader(sampler, "fork", persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sampler.advance(8 * epoch)  # a resume in the middle of an epoch
        order = sampler.indices().tolist()
        assert train_epoch(loader, sampler, tmp_path / str(epoch)) == order
    assert np.unique(order).size == SAMPLES - 16
    loader = None  # ends the workers


def test_loaders_that_share_a_sampler_begin_where_they_are(tmp_path: Path) -> None:
    """The notes of one loader do not replace those of another."""
    sampler = DistributedSampler(Numbers())
    loaders = [build_loader(sampler, "fork", persistent_workers=True) for _ in range(2)]
    for position in (0, 8, 12):
        sampler.position = position
        order = sampler.indices().tolist()
        for loader in loaders:
            assert [int(number) for batch in loader for number in batch] == order
    loaders.clear()
