"""The share of each rank in the processors of its machine, and the settings that override it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import topkube
from topkube.examples.options import set_threads
from topkube.launch.host.environment import set_defaults
from topkube.processors import count_own_threads, count_threads_per_rank
from topkube.world.world import open_worlds


@given(processors=st.integers(1, 512), ranks=st.integers(1, 4096))
def test_ranks_take_no_more_threads_than_there_are_processors_unless_they_outnumber_them(
    processors: int, ranks: int
) -> None:
    threads = count_threads_per_rank(processors, ranks)
    assert threads == 1 or threads * ranks <= processors
    assert (threads + 1) * ranks > processors


@pytest.mark.parametrize(
    ("own", "affinities", "granted", "threads"),
    [
        (range(2), [range(2), range(2)], 2, 1),  # two nodes of one rank on a machine with two cores
        (range(8), [range(8), range(8)], 8, 4),
        (range(4), [range(4), range(4, 8)], 8, 4),  # bound to halves: each has its own
        (range(1), [range(1), range(1, 2)], 2, 1),  # bound to one core each, as Open MPI does
        (range(64), [range(64)] * 4, 8, 2),  # a pod's limit of 8 processors
        (range(2), [range(2)] * 128, 2, 1),
        (range(6), [range(6)], 6, 6),
    ],
)
def test_a_rank_has_its_share_of_the_processors_that_it_may_use(
    own: range, affinities: list[range], granted: int, threads: int
) -> None:
    assert count_own_threads(frozenset(own), [frozenset(each) for each in affinities], granted) == threads


@pytest.fixture
def two_nodes_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is alone on its node, beside another node on the same two cores."""
    world = SimpleNamespace(local_size=1, threads=count_threads_per_rank(2, 2))
    monkeypatch.setattr(open_worlds, "whole", world)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_examples_share_cores_among_all_nodes_of_a_machine(
    two_nodes_of_one_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    set_threads()
    assert torch.get_num_threads() == topkube.world.current().threads == 1


def test_examples_keep_the_threads_that_a_person_set(
    two_nodes_of_one_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    set_threads()
    assert torch.get_num_threads() == 3


def test_topkube_run_shares_cores_by_the_same_rule_and_keeps_the_threads_that_a_person_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topkube.launch.host.environment.count_cores", lambda: 8)
    environment: dict[str, str] = {}
    set_defaults(environment, 4)
    assert environment["OMP_NUM_THREADS"] == str(count_threads_per_rank(8, 4)) == "2"
    environment = {"OMP_NUM_THREADS": "7"}
    set_defaults(environment, 4)
    assert environment["OMP_NUM_THREADS"] == "7"
