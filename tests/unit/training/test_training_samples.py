"""The count of the samples of a batch: certain cases, cases that are refused, and the samples that a DataLoader
draws."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

import topkube
from topkube.errors import TrainingError
from topkube.settings import Settings
from topkube.training.batches.samples import SampleCounter, count_samples

Pair = namedtuple("Pair", "images labels")


class Graphs:
    """An object with tensors of several lengths, like torch_geometric's Batch."""

    def __init__(self, graphs: int) -> None:
        self.x, self.num_graphs = torch.zeros(11, 3), graphs


def build_images(count: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(3, 32, 32) for _ in range(count))


def build_boxes(*counts: int) -> tuple[dict[str, torch.Tensor], ...]:
    return tuple({"boxes": torch.zeros(count, 4), "labels": torch.zeros(count)} for count in counts)


CERTAIN: list[tuple[Any, int]] = [
    (torch.zeros(5, 2), 5),
    (np.zeros((6, 2)), 6),
    (torch.zeros(0, 2), 0),
    ([torch.zeros(4, 2), torch.zeros(4)], 4),
    ((torch.zeros(4, 2), torch.zeros(4, 1)), 4),
    ((torch.zeros(4, 3, 8, 8),), 4),
    ((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)), 4),
    (Pair(torch.zeros(4, 3, 8, 8), np.zeros(4)), 4),
    ({"x": torch.zeros(3, 1), "name": ["a", "b", "c"]}, 3),
    ({"ids": torch.zeros(3, 9), "mask": torch.zeros(3, 9), "labels": torch.zeros(3, 9)}, 3),
    ((torch.zeros(2, 2), {"y": 1}), 2),
    ((torch.zeros(2, 2), [torch.zeros(2), {"z": torch.zeros(2, 5)}]), 2),
    ((Graphs(8), torch.zeros(8)), 8),
    ((build_images(8), torch.zeros(8)), 8),
    (pack_sequence([torch.zeros(n, 4) for n in (9, 5, 2)]), 3),
    ((pack_sequence([torch.zeros(n, 4) for n in (9, 5, 2)]), torch.zeros(3)), 3),
]
NOT_CERTAIN: list[tuple[Any, int]] = [
    (build_images(8), 8),
    ((build_images(8), build_boxes(1, 4, 2, 0, 1, 3, 1, 1)), 8),
    ((build_images(8), build_boxes(*[3] * 8)), 8),
    ([{"x": torch.zeros(7), "y": torch.zeros(7)} for _ in range(4)], 4),
    ([{"x": 1.0} for _ in range(4)], 4),
    ([(torch.zeros(3, 8, 8), torch.zeros(1, 8, 8)) for _ in range(5)], 5),
    (["one", "two"], 2),
    (Graphs(8), 8),
    ([Graphs(8), Graphs(8)], 8),
    ((torch.zeros(50, 8, 4), torch.zeros(8)), 8),  # time-major
    (tuple(torch.zeros(4, 6, dtype=torch.long) for _ in range(3)), 4),
    (torch.tensor(1.0), 1),
    ({"question": "why", "answer": "so"}, 1),
    ([], 1),
]


@pytest.mark.parametrize(("batch", "count"), CERTAIN)
def test_batches_that_can_be_read_in_one_way_are_counted(batch: Any, count: int) -> None:
    assert count_samples(batch) == count
    assert count_samples(batch, drawn=count) == count


@pytest.mark.parametrize(("batch", "count"), NOT_CERTAIN)
def test_batches_that_can_be_read_in_several_ways_need_a_loader_or_the_script(batch: Any, count: int) -> None:
    with pytest.raises(TrainingError, match=r"cannot be counted: .* reads as .*samples=lambda batch: |samples=1"):
        count_samples(batch)
    assert count_samples(batch, drawn=count) == count or batch == []


@pytest.mark.parametrize(
    ("batch", "drawn"),
    [
        (torch.zeros(50, 8, 4), 8),
        ((torch.zeros(6, 2), torch.zeros(6)), 8),
        (torch.zeros(32, 4), 1),
        (build_images(8), 4),
    ],
    ids=["time-major", "a collate function that drops samples", "items that are batches", "images"],
)
def test_a_batch_that_contradicts_its_loader_is_refused(batch: Any, drawn: int) -> None:
    with pytest.raises(TrainingError, match=f"and the DataLoader drew {drawn}"):
        count_samples(batch, drawn)


def test_the_error_names_the_batch_and_the_line_to_write() -> None:
    with pytest.raises(TrainingError) as caught:
        count_samples((build_images(8), build_boxes(*[3] * 8)))
    assert "tuple of 2 [tuple of 8 [Tensor(3, 32, 32), Tensor(3, 32, 32)" in str(caught.value)
    assert "reads as 2 or 3 or 8 samples" in str(caught.value)
    assert "run.progress(loader, samples=lambda batch: len(batch[0]))" in str(caught.value)


class Detection(Dataset[Any]):
    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 16, 16), {"boxes": torch.zeros(index % 4, 4)}


def collate_columns(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


def count_batches(loader: Any, samples: Any = None) -> list[tuple[int, int]]:
    counter = SampleCounter(loader, samples)
    return [counter.count(batch) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_the_samples_of_a_detection_batch(workers: int) -> None:
    loader = DataLoader(Detection(), batch_size=8, collate_fn=collate_columns, num_workers=workers)
    assert count_batches(loader) == [(8, 8), (8, 8), (3, 3)]


@given(st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_all_samples_of_a_pass_are_counted_once(total: int, size: int, drops_last: bool) -> None:
    data = TensorDataset(torch.zeros(total, 3, 2, 2))
    kept = total - total % size if drops_last else total
    for loader in (
        DataLoader(data, size, drop_last=drops_last),
        DataLoader(data, size, drop_last=drops_last, collate_fn=lambda batch: batch),
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), size, drops_last)),
    ):
        counts = count_batches(loader)
        assert all(count == drawn for count, drawn in counts)
        assert sum(drawn for _, drawn in counts) == kept


def test_a_script_counts_samples_and_the_loader_counts_drawn_samples() -> None:
    """If a loader drops unusable samples, or if the loss is a mean over tokens, the weight of a batch and the number of
    drawn samples differ."""

    def stack_usable(batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([sample for sample in batch if sample])

    loader = DataLoader(torch.arange(10), batch_size=4, collate_fn=stack_usable)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="reads as 3 samples, and the DataLoader drew 4"):
        count_batches(loader)
    assert count_batches(loader, len) == [(3, 4), (4, 4), (2, 2)]
    assert count_batches(loader, 7) == [(7, 4), (7, 4), (7, 2)]
    assert count_batches(loader, lambda batch: (batch > 5).sum()) == [(0, 4), (2, 4), (2, 2)]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(5, 3, 2, 2))


class UnknownBatchSampler(BatchSampler):
    pass


def test_without_a_known_loader_samples_are_counted_in_the_batch() -> None:
    data = torch.zeros(5, 3, 2, 2)
    by_hand: Any = DataLoader(data, batch_sampler=UnknownBatchSampler(SequentialSampler(data), 2, False))  # type: ignore[arg-type]
    for loader in (DataLoader(Stream(), 2), by_hand, list(data.split(2)), DataLoader(data, batch_size=None)):  # type: ignore[arg-type]
        counts = count_batches(loader)
        assert counts in ([(2, 2), (2, 2), (1, 1)], [(3, 3)] * 5)


def test_a_script_that_counts_tokens_does_not_move_the_sampler_by_tokens() -> None:
    """A batch sampler of a script's own does not show what it drew. The batch does, if it is certain."""
    data = TensorDataset(torch.zeros(5, 10, 8), torch.zeros(5))
    own: Any = DataLoader(data, batch_sampler=UnknownBatchSampler(SequentialSampler(data), 2, False))
    assert count_batches(own, lambda batch: batch[0].shape[0] * batch[0].shape[1]) == [(20, 2), (20, 2), (10, 1)]
    assert count_batches([build_images(8)], len) == [(8, 8)]


def test_a_loader_with_an_order_of_its_own_is_reported_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    topkube.init()
    model = torch.nn.Linear(1, 1)
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    data = TensorDataset(torch.arange(4.0).view(4, 1))
    sampler = topkube.data.DistributedSampler(data, shuffle=False)
    settings = Settings(checkpoint_directory=str(tmp_path))
    own: Any = DataLoader(data, batch_sampler=UnknownBatchSampler(sampler, 2, False))
    for loader, times in ((DataLoader(data, 2, sampler=sampler), 0), ([torch.zeros(2)], 0), (own, 1)):
        with topkube.checkpointing(model, optimizer, sampler, settings=settings) as run:
            for _ in run.epochs(run.epoch + 2):
                list(run.progress(loader))
        assert capsys.readouterr().err.count("may yield samples in another order") == times


@pytest.mark.parametrize("answer", [-1, 2.5, "3", None, torch.zeros(2)])
def test_the_result_of_samples_is_checked(answer: Any) -> None:
    with pytest.raises(TrainingError, match="not a number of samples"):
        count_batches([torch.zeros(2)], lambda _: answer)


def test_join_and_progress_pass_the_counting_function_on() -> None:
    topkube.init()
    model = torch.nn.Linear(3, 1)
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches = [build_images(8), build_images(2)]
    with pytest.raises(TrainingError, match="samples=lambda batch: len"):
        list(optimizer.join(batches))
    assert [optimizer.turns.samples for _ in optimizer.join(batches, samples=len)] == [8, 2]
    with topkube.checkpointing(model, optimizer) as run:
        assert [optimizer.turns.samples for _ in run.progress(batches, samples=len)] == [8, 2]


def test_the_position_of_the_sampler_follows_the_drawn_samples() -> None:
    """A resumed run must neither repeat nor skip data, however the script counts samples."""
    topkube.init()
    model = torch.nn.Linear(1, 1)
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    data = TensorDataset(torch.arange(12.0).view(12, 1))
    sampler = topkube.data.DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    with topkube.checkpointing(model, optimizer, sampler) as run:
        assert [sampler.position for _ in run.progress(loader, samples=1000)] == [0, 4, 8]


class Files(Dataset[torch.Tensor]):
    """A dataset whose items are batches."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.zeros(10 + index, 2)


def test_items_that_are_batches_count_by_their_samples_and_advance_by_one() -> None:
    topkube.init()
    sampler = topkube.data.DistributedSampler(Files(), shuffle=False)
    assert count_batches(DataLoader(Files(), batch_size=None, sampler=sampler)) == [(10, 1), (11, 1), (12, 1)]


def test_a_batch_sampler_may_be_passed_as_the_sampler() -> None:
    data = TensorDataset(torch.zeros(5, 3, 2, 2))
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), 2, False))
    assert count_batches(loader) == [(2, 2), (2, 2), (1, 1)]
