"""The collectives of a node's ranks in shared memory, with threads as ranks. tests/mpi runs them with real ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube import _kernels

DEADLINE_SECONDS = 60.0


class Ranks:
    """The ranks of a node, each with its own thread."""

    def __init__(self, count: int, shards: int, cells: int) -> None:
        window = np.zeros(_kernels.Node.window_bytes(count, cells), np.uint8)
        self.nodes = [_kernels.Node(window, r, count, shards, cells, True, lambda: None) for r in range(count)]
        self._threads = ThreadPoolExecutor(count)

    def call(self, collective: Callable[[Any, int], Any]) -> list[Any]:
        """Return what `collective(node, rank)` returns, or the error that it raises, for every rank."""

        def run(rank: int) -> Any:
            try:
                return collective(self.nodes[rank], rank)
            except Exception as error:
                return error

        return list(self._threads.map(run, range(len(self.nodes))))


def draw_values(ranks: int, length: int, seed: int) -> list[np.ndarray]:
    """Return an array of small whole numbers for each rank: their sums are exact."""
    return list(np.random.default_rng(seed).integers(-99, 99, (ranks, length)).astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 2), (4, 4), (5, 3)]),
    cells=st.integers(3, 6),
    calls=st.lists(
        st.tuples(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "mismatch"]), st.integers(0, 70_000)),
        min_size=1,
        max_size=8,
    ),
)
def test_calls_in_any_order_and_after_mismatches(
    shape: tuple[int, int], cells: int, calls: list[tuple[str, int]]
) -> None:
    count, shards = shape
    ranks = Ranks(count, shards, cells)
    for number, (kind, length) in enumerate(calls):
        values = draw_values(count, length, number)
        total, own = np.sum(values, axis=0, dtype=np.float32), [length * i // shards for i in range(shards + 1)]
        shared, signature = [x.copy() for x in values], 7 * number

        def reduce(node: Any, rank: int, signature: int = signature, shared: Any = shared) -> bool:
            return bool(node.all_reduce(shared[rank].view(np.uint8), 0, 1.0, signature, DEADLINE_SECONDS))

        if kind == "all_reduce":
            assert ranks.call(reduce) == [True] * count
            assert all(np.array_equal(x, total) for x in shared)
        elif kind == "reduce_scatter":
            ranks.call(
                lambda node, rank, x=shared, s=signature: node.reduce_scatter(
                    x[rank].view(np.uint8), 0, 1.0, None, None, s, DEADLINE_SECONDS
                )
            )
            for rank in range(shards):
                assert np.array_equal(shared[rank][own[rank] : own[rank + 1]], total[own[rank] : own[rank + 1]])
        elif kind == "all_gather":
            ranks.call(
                lambda node, rank, x=shared, s=signature: node.all_gather(
                    x[rank].view(np.uint8), 4, None, s, DEADLINE_SECONDS
                )
            )
            gathered = np.concatenate([values[rank][own[rank] : own[rank + 1]] for rank in range(shards)])
            assert all(np.array_equal(x, gathered) for x in shared)
        elif count > 1:  # the last rank enters a call of another length
            other = np.zeros(length // 2 + 1, np.float32)

            def mismatch(node: Any, rank: int, other: Any = other, reduce: Any = reduce, s: int = signature) -> bool:
                if rank < count - 1:
                    return bool(reduce(node, rank))
                return bool(node.all_reduce(other.view(np.uint8), 0, 1.0, s + 1, DEADLINE_SECONDS))

            errors = ranks.call(mismatch)
            assert all(isinstance(error, _kernels.NodeMismatch) for error in errors)
            assert all(np.array_equal(x, before) for x, before in zip(shared, values, strict=True))


def test_a_rank_that_does_not_arrive_is_named() -> None:
    ranks = Ranks(3, 3, 4)
    x = np.ones(100, np.float32)

    def reduce(node: Any, rank: int) -> bool | None:
        return None if rank == 1 else bool(node.all_reduce(x.copy().view(np.uint8), 0, 1.0, 5, 0.3))

    first, absent, last = ranks.call(reduce)
    assert absent is None
    for error in (first, last):
        assert isinstance(error, _kernels.NodeTimeout)
        assert error.args == (1,)
    x[:] = 2

    def reduce_later(node: Any, rank: int) -> bool:
        return bool(node.all_reduce(x.copy().view(np.uint8), 0, 1.0, 6, 0.3))

    for _ in range(2):  # these ranks are out of step with the absent one, for ever
        first, absent, last = ranks.call(reduce_later)
        assert isinstance(absent, Exception)
        assert isinstance(first, _kernels.NodeTimeout)
        assert isinstance(last, _kernels.NodeTimeout)


def test_a_value_that_is_not_finite_is_reported() -> None:
    ranks = Ranks(2, 2, 4)
    values = draw_values(2, 5_000, 1)
    values[1][17] = np.inf
    finite = ranks.call(lambda node, rank: node.all_reduce(values[rank].view(np.uint8), 0, 1.0, 3, DEADLINE_SECONDS))
    assert finite == [False, False]
