"""The sampler: equal batches on all ranks after a change of their number, checks of the state, and mixed datasets."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openers import Opener
from remotes import RemoteServer, write_files

from topkube.data import ArrayOf, Batches, DistributedSampler, MixedDataset, MixedSampler
from topkube.data import sampler as sampler_module
from topkube.data.base.rank_place import RankPlace
from topkube.errors import ArgumentError, WorldError

SIZES = st.integers(1, 7)


def deal_out(sampler: DistributedSampler, size: int) -> list[list[int]]:
    """Return the samples of each of `size` ranks."""
    shares = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(size):
            patch.setattr(sampler_module, "find_place", lambda rank=rank: RankPlace(rank, size))
            shares.append(sampler.indices().tolist())
            assert len(sampler) == len(shares[-1])
    return shares


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 130), SIZES, SIZES, SIZES, st.integers(0, 40))
def test_all_ranks_get_equal_numbers_after_a_change_of_their_number(
    count: int, before: int, after: int, batch: int, steps: int
) -> None:
    sampler = DistributedSampler(range(count), drop_last=True)
    whole = deal_out(DistributedSampler(range(count)), 1)[0]
    position = min(steps * batch * before, count - count % before)
    sampler.advance(position)
    shares = deal_out(sampler, after)
    assert len({len(share) for share in shares}) == 1
    assert [at for step in zip(*shares, strict=True) for at in step] == whole[position:][: len(shares[0]) * after]
    assert (count - position) - len(shares[0]) * after < after


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_in_a_spawned_worker_has_the_place_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, make_copy: Callable[[DistributedSampler], DistributedSampler]
) -> None:
    """The worker has no world of its own."""
    sampler = DistributedSampler(range(20), seed=3)
    sampler.set_epoch(2)
    sampler.advance(3)
    monkeypatch.setattr(sampler_module, "find_place", lambda: RankPlace(1, 3, node_ranks=((0, 1, 2),)))
    expected, copied = list(sampler), make_copy(sampler)

    def raise_error() -> RankPlace:
        raise WorldError("topkube.init() has not been called")

    monkeypatch.setattr(sampler_module, "find_place", raise_error)
    assert list(make_copy(copied)) == list(copied) == expected
    assert (len(copied), copied.common_length) == (6, 5)
    copied.set_epoch(5)
    assert sampler.epoch == 2, "a copy has a state of its own"


class Ranks:
    """The samplers of `size` ranks, which take batches of different sizes from one epoch."""

    def __init__(self, count: int, size: int, state: dict[str, Any] | None) -> None:
        self.samplers = [DistributedSampler(range(count)) for _ in range(size)]
        for sampler in self.samplers:
            if state is not None:
                sampler.load_state_dict(state)
        self._begin()

    def _begin(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self._left = []
            for rank, sampler in enumerate(self.samplers):
                place = RankPlace(rank, len(self.samplers))
                patch.setattr(sampler_module, "find_place", lambda place=place: place)
                self._left.append(sampler.indices().tolist())
                assert len(sampler) == len(self._left[-1])

    def take(self, batches: list[int]) -> list[int]:
        """Take a batch on every rank. Return the samples of all."""
        parts = [left[:batch] for left, batch in zip(self._left, batches, strict=False)]
        self._left = [left[len(part) :] for left, part in zip(self._left, parts, strict=True)]
        for sampler, part in zip(self.samplers, parts, strict=True):
            sampler.advance(sum(map(len, parts)), len(part))
        return [sample for part in parts for sample in part]

    def list_own_samples(self) -> list[int]:
        return [sampler.own_samples for sampler in self.samplers]

    def begin_again(self) -> None:
        """Leave the loop over the epoch, and begin it again."""
        own_samples = self.list_own_samples()
        for sampler in self.samplers:
            sampler.begin_iterator(own_samples)
        self._begin()


BATCHES = st.lists(st.integers(0, 5), min_size=7, max_size=7)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 90), st.lists(st.tuples(SIZES, st.lists(st.tuples(BATCHES, st.booleans()), max_size=5)), max_size=4)
)
def test_each_sample_is_taken_once_if_batches_of_ranks_differ_in_size(
    count: int, runs: list[tuple[int, list[tuple[list[int], bool]]]]
) -> None:
    """Runs of changing numbers of ranks leave and resume the epoch, and save the state at any step."""
    taken: list[int] = []
    state: dict[str, Any] | None = None
    for size, steps in [*runs, (2, [])]:
        ranks = Ranks(count, size, state)
        for batches, begins_again in steps:
            taken += ranks.take(batches)
            if begins_again:
                ranks.begin_again()
        states = [sampler.state_dict(ranks.list_own_samples()) for sampler in ranks.samplers]
        assert all(other == states[0] for other in states)
        state = states[0]
    while step := ranks.take([3] * 2):
        taken += step
    assert sorted(taken) == list(range(count))


def test_equal_batches_leave_nothing_in_the_state_but_the_position() -> None:
    ranks = Ranks(20, 2, None)
    ranks.take([3, 3])
    assert "taken" not in ranks.samplers[0].state_dict(ranks.list_own_samples())
    ranks.take([3, 1])
    state = ranks.samplers[0].state_dict(ranks.list_own_samples())
    assert state["taken"] == [[0, 6, 4]]
    with pytest.raises(ArgumentError, match="more finished samples than its position"):
        DistributedSampler(range(20)).load_state_dict({**state, "position": 9})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 130), SIZES, st.integers(1, 9), st.integers(0, 130))
def test_batches_are_equal_on_all_ranks_if_the_last_ones_are_dropped(
    count: int, size: int, batch: int, position: int
) -> None:
    sampler: Any = DistributedSampler(range(count))
    sampler.advance(min(position, count))
    batches = Batches(None, batch, sampler, drop_last=True)  # type: ignore[arg-type]
    lengths = set()
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(size):
            patch.setattr(sampler_module, "find_place", lambda rank=rank: RankPlace(rank, size))
            parts = batches._split_batches(sampler.indices())
            assert len(parts) == len(batches)
            assert all(part.size == batch for part in parts)
            lengths.add(len(parts))
    assert len(lengths) == 1


@pytest.mark.parametrize("position", [-1, 51])
def test_a_position_outside_the_epoch_is_refused(position: int) -> None:
    sampler = DistributedSampler(range(50))
    for act in (
        lambda: setattr(sampler, "position", position),
        lambda: sampler.load_state_dict({"epoch": 0, "position": position, "seed": 0}),
        lambda: sampler.advance(min(position, -1)),
    ):
        with pytest.raises(ArgumentError, match="position"):
            act()
    assert (sampler.epoch, sampler.position, sampler.seed) == (0, 0, 0)


STATES: list[dict[str, Any]] = [
    {"epoch": -1, "position": 0, "seed": 0},
    {"epoch": 0, "seed": 0},
    {"epoch": 0, "position": "3", "seed": 0},
    {"epoch": 0, "position": 0, "seed": None},
]


@pytest.mark.parametrize("state", STATES)
def test_an_invalid_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="the sampler's state has"):
        DistributedSampler(range(50)).load_state_dict(state)


def test_a_state_of_another_order_is_refused_in_the_middle_of_an_epoch(
    remote: RemoteServer, open_dataset: Opener
) -> None:
    write_files(remote.folder, 50)
    options: dict[str, Any] = {"decode": ArrayOf("uint8", (3072,)), "prefetch": False, "group_bytes": 20_000}
    dataset = open_dataset(remote.uri, **options)
    sampler = DistributedSampler(dataset, window=2)
    sampler.advance(20)
    state = sampler.state_dict()
    DistributedSampler(open_dataset(str(remote.folder), **options), window=2).load_state_dict(state)  # moved
    DistributedSampler(dataset, window=3).load_state_dict({"epoch": 0, "position": 20, "seed": 0})  # an older version
    for other, names in (
        (DistributedSampler(dataset, window=3), "window is 3, was 2"),
        (DistributedSampler(dataset, window=2, shuffle=False), "shuffle is False, was True"),
        (DistributedSampler(open_dataset(remote.uri, **{**options, "group_bytes": 30_000}), window=2), "dataset is"),
        (DistributedSampler(range(40), window=2), "samples is 40, was 50"),
    ):
        with pytest.raises(ArgumentError, match=names):
            other.load_state_dict(state)
        other.load_state_dict({**state, "position": 0})  # at the start of an epoch another order is allowed


class Numbers:
    """Samples `first`, `first` + 1, and so on."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return self.first + index


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=1, max_size=4), st.integers(1, 100), SIZES)
def test_a_mix_gives_each_dataset_its_share_and_each_sample_in_turn(
    parts: list[tuple[int, float]], samples: int, size: int
) -> None:
    mixed = MixedDataset([Numbers(1000 * at, count) for at, (count, _) in enumerate(parts)])
    weights = [weight for _, weight in parts]
    sampler = MixedSampler(mixed, weights, samples, seed=5)
    seen: list[list[int]] = [[] for _ in parts]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ranks = deal_out(sampler, size)
        assert sorted(at for rank in ranks for at in rank) == sorted(deal_out(sampler, 1)[0])
        values = mixed.__getitems__(deal_out(sampler, 1)[0])
        for number in range(len(parts)):
            values_of_part = [value - 1000 * number for value in values if value // 1000 == number]
            assert len(values_of_part) == sampler.shares[number]
            assert abs(len(values_of_part) - weights[number] / sum(weights) * samples) < 1
            seen[number] += values_of_part
        assert len(values) == samples
    for (count, _), values_of_part in zip(parts, seen, strict=True):
        times = np.bincount(values_of_part, minlength=count)
        assert times.max() - times.min() <= 1  # each sample comes once before any sample comes again


def test_a_mix_is_resumed_by_any_number_of_ranks_and_checks_its_state() -> None:
    mixed = MixedDataset([Numbers(0, 30), Numbers(1000, 7)])
    sampler = MixedSampler(mixed, [1, 2], 40, seed=3)
    sampler.set_epoch(4)
    whole = deal_out(sampler, 1)[0]
    sampler.advance(15)
    resumed = MixedSampler(mixed, [1, 2], 40)
    resumed.load_state_dict(sampler.state_dict())
    ranks = deal_out(resumed, 3)
    assert [ranks[at % 3][at // 3] for at in range(25)] == whole[15:]
    with pytest.raises(ArgumentError, match="weights is"):
        MixedSampler(mixed, [1, 3], 40).load_state_dict(sampler.state_dict())
    grown = MixedSampler(MixedDataset([Numbers(0, 31), Numbers(1000, 7)]), [1, 2], 40)
    with pytest.raises(ArgumentError, match=r"lengths is \[31, 7\], was \[30, 7\]"):
        grown.load_state_dict(sampler.state_dict())
    older_state = sampler.state_dict()
    del older_state["lengths"]
    resumed.load_state_dict(older_state)


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_invalid_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ArgumentError, match="weights"):
        MixedSampler(MixedDataset([range(3), range(4)]), weights)
