"""Low-rank all-reduce: `PowerSgd` sends two thin factors in place of each matrix, `AcpSgd` one of them in turn.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019.
A is the sum over all nodes of a gradient and its residual, a matrix of m rows and n columns. One step of
the power iteration approximates A by P Q^T: P = A Q, with the Q of the last exchange; the columns of P are made
orthonormal; Q = A^T P. Both products are linear in A, so nodes add up their P and their Q, and never send A.

Zhang et al., "Evaluation and optimization of gradient compression for distributed deep learning", 2023:
ACP-SGD does half a step of the power iteration in each exchange, P = A Q and Q = A^T P in turn, each with the factor of
the exchange before. So there is one sum over all nodes where PowerSGD has two that wait for each other, and half as
many bytes.

Inside each node, ranks first add up their gradients. Every rank then works on its shard, which may begin and end within
a row. The columns of P and the product P Q^T must have the same bits on all nodes: they are computed in a fixed order,
without a BLAS.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from topkube import kernels
from topkube.algorithms import Route
from topkube.arrays import Array
from topkube.collectives.all_reduce import AllReduce, build_exchange, count_dense
from topkube.collectives.call import Call, find_own_shard, reserve_workspace
from topkube.collectives.exchange import Exchanges
from topkube.collectives.request import Matrix, Request
from topkube.telemetry import phases
from topkube.world import World

_LEAST_NEW = 1e-6
"""A column of P becomes zero if less than this share of its norm is independent of the columns before it. The matrix
then has a lower rank, and the rest of the column is a rounding error."""


class _LowRank(AllReduce):
    """An exchange of factors after a dense sum inside each node, with error feedback.

    `Request.matrices` lists the parts of the array that are matrices. If it is empty, the array is one matrix with
    about as many rows as columns. `Residual.factors` has what the last exchange left, one array per matrix. Without a
    residual, the first factors are random, the same on all ranks. Columns that have become zero are random again.
    """

    @abstractmethod
    def factorize(self, factorization: _Factorization, last: Sequence[Array]) -> tuple[Array, list[Array], list[Array]]:
        """Exchange factors. Return the sum that was received last (to check if it is finite), and P and Q of each
        matrix. `last` has what `keep` returned in the last exchange."""

    @abstractmethod
    def keep(self, lefts: Sequence[Array], rights: Sequence[Array], last: Sequence[Array]) -> list[Array]:
        """Return what the next exchange needs, one float32 array per matrix."""

    def run(self, world: World, request: Request) -> bool:
        call, x, residual = Call(world, self.algorithm.name, request), request.array, request.residual
        count_dense(world, request.nbytes)
        first, last = find_own_shard(world, request.length)
        if residual is not None:
            own = residual.pending
            finite = call.reduce_scatter(x, request.scale(world.size), own, residual.current)
        else:
            own = reserve_workspace(world, "shard", last - first, np.float32)
            finite = call.reduce_scatter(x, request.scale(world.size), own)
        call.check_between_nodes()
        factorization = _Factorization(call, request, own, first, last)
        kept = residual.factors if residual is not None else ()
        received, lefts, rights = self.factorize(factorization, kept)
        with phases.current.timed("select"):
            weight = len(world.node_ranks[world.node]) / world.size
            factorization.multiply(lefts, rights, x[first:last], weight)
            finite = all([finite, *(kernels.is_finite(part) for part in (received, x[first:last]) if part.size)])
        if residual is not None:
            residual.pending_factors = self.keep(lefts, rights, kept)
        call.all_gather(x)
        return finite


class PowerSgd(_LowRank):
    """PowerSGD: both factors in every exchange, one after the other. Q of the last exchange is kept."""

    def factorize(self, factorization: _Factorization, last: Sequence[Array]) -> tuple[Array, list[Array], list[Array]]:
        of_rows, of_columns = ([side] * factorization.count for side in (True, False))
        with phases.current.timed("select"):
            rights = factorization.begin(of_columns, last)
            lefts = factorization.compute(of_rows, rights)
        factorization.sum_over_all(lefts)
        with phases.current.timed("select"):
            factorization.orthonormalize(lefts, of_rows)
            rights = factorization.compute(of_columns, lefts)
        factorization.sum_over_all(rights)
        return rights, factorization.cut_factors(lefts, of_rows), factorization.cut_factors(rights, of_columns)

    def keep(self, lefts: Sequence[Array], rights: Sequence[Array], last: Sequence[Array]) -> list[Array]:
        return [values.copy() for values in rights]


class AcpSgd(_LowRank):
    """ACP-SGD: P in one exchange, Q in the next. The factor of the last exchange is made orthonormal and takes the
    place of the other one.

    What is kept of a matrix begins with 1 if its last factor was P, or 0 if it was Q. A matrix without a last factor
    begins with a random Q.
    """

    def factorize(self, factorization: _Factorization, last: Sequence[Array]) -> tuple[Array, list[Array], list[Array]]:
        had_rows = [number < len(last) and _holds_rows(last[number]) for number in range(factorization.count)]
        sends_rows = [not side for side in had_rows]
        with phases.current.timed("select"):
            fixed = factorization.begin(had_rows, [values.reshape(-1)[1:] for values in last])
            factorization.orthonormalize(fixed, had_rows)
            sent = factorization.compute(sends_rows, fixed)
        factorization.sum_over_all(sent)
        pairs = list(
            zip(
                factorization.cut_factors(fixed, had_rows),
                factorization.cut_factors(sent, sends_rows),
                had_rows,
                strict=True,
            )
        )
        lefts = [old if was_left else new for old, new, was_left in pairs]
        rights = [new if was_left else old for old, new, was_left in pairs]
        return sent, lefts, rights

    def keep(self, lefts: Sequence[Array], rights: Sequence[Array], last: Sequence[Array]) -> list[Array]:
        kept = []
        for number, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            has_rows = not (number < len(last) and _holds_rows(last[number]))
            factor = left if has_rows else right
            kept.append(np.concatenate([np.array([has_rows], np.float32), factor.reshape(-1)]))
        return kept


def _holds_rows(kept: Array) -> bool:
    """Return True if `kept`, what AcpSgd left of a matrix, holds P. It may hold a factor of `powersgd`, after a change
    of the algorithm: either side is then correct, because any first factor is."""
    return bool(kept.size) and float(kept.reshape(-1)[0]) > 0


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a matrix in this rank's shard: rows [row, row + rows), columns [left, right), from element `at` of
    the shard on."""

    matrix: int
    row: int
    rows: int
    left: int
    right: int
    at: int


class _Factorization:
    """The factors of all matrices of one exchange.

    `factors` is one float32 array with a factor of each matrix, one after the other: P, (rows, rank), if the entry of
    `sides` for this matrix is True, else Q, (columns, rank).
    """

    def __init__(self, call: Call, request: Request, own: Array, first: int, last: int) -> None:
        self._call, self._own = call, own
        self._matrices = request.matrices or _shape_as_square(request.length)
        self._ranks = [min(request.matrix_rank, matrix.rows, matrix.columns) for matrix in self._matrices]
        self._pieces = [
            piece for number, matrix in enumerate(self._matrices) for piece in _cut_pieces(number, matrix, first, last)
        ]

    @property
    def count(self) -> int:
        """The number of matrices."""
        return len(self._matrices)

    def cut_factors(self, factors: Array, sides: Sequence[bool]) -> list[Array]:
        """Cut `factors` into one 2-D view per matrix."""
        views, end = [], 0
        for length, rank in zip(self._list_lengths(sides), self._ranks, strict=True):
            views.append(factors[end : end + length * rank].reshape(length, rank))
            end += length * rank
        return views

    def _list_lengths(self, sides: Sequence[bool]) -> list[int]:
        pairs = zip(self._matrices, sides, strict=True)
        return [matrix.rows if of_rows else matrix.columns for matrix, of_rows in pairs]

    def _allocate(self, name: str, sides: Sequence[bool]) -> Array:
        count = sum(length * rank for length, rank in zip(self._list_lengths(sides), self._ranks, strict=True))
        buffer = reserve_workspace(self._call.world, name, count, np.float32)
        buffer[:] = 0
        return buffer

    def begin(self, sides: Sequence[bool], warm: Sequence[Array]) -> Array:
        """Return the first factors: `warm`, the factors of the last exchange, with random columns in place of zeros."""
        factors = self._allocate("first factors", sides)
        for number, part in enumerate(self.cut_factors(factors, sides)):
            if number < len(warm) and warm[number].size == part.size:
                part[:] = warm[number].reshape(part.shape)
            empty = ~part.any(axis=0)
            if empty.any():
                part[:, empty] = np.random.default_rng(part.shape).random(part.shape)[:, empty] - 0.5
        return factors

    def compute(self, sides: Sequence[bool], others: Array) -> Array:
        """Return this rank's share of the factors P = A Q or Q = A^T P, from the elements of its shard. `others` has
        the factors of the other sides."""
        factors = self._allocate("factors of rows" if any(sides) else "factors of columns", sides)
        parts, other_parts = self.cut_factors(factors, sides), self.cut_factors(others, [not side for side in sides])
        for piece in self._pieces:
            part, other, values = parts[piece.matrix], other_parts[piece.matrix], self._view_values(piece)
            if sides[piece.matrix]:
                part[piece.row : piece.row + piece.rows] += values @ other[piece.left : piece.right]
            else:
                part[piece.left : piece.right] += values.T @ other[piece.row : piece.row + piece.rows]
        return factors

    def orthonormalize(self, factors: Array, sides: Sequence[bool]) -> None:
        """Make the columns of each part orthonormal, or zero."""
        for part in self.cut_factors(factors, sides):
            part[:] = _orthonormalize(part)

    def multiply(self, lefts: Sequence[Array], rights: Sequence[Array], out: Array, weight: float) -> None:
        """Write P Q^T of each matrix into `out`, this rank's shard of the array, and subtract `weight` times that from
        the shard that the factors came from."""
        for piece in self._pieces:
            left = lefts[piece.matrix][piece.row : piece.row + piece.rows]
            right = rights[piece.matrix][piece.left : piece.right]
            place = slice(piece.at, piece.at + piece.rows * (piece.right - piece.left))
            kernels.low_rank_product_(out[place], self._own[place], left, right, weight)

    def sum_over_all(self, factors: Array) -> None:
        """Replace `factors` by their sum over all ranks: inside the node, between nodes, inside the node."""
        call, world = self._call, self._call.world
        call.reduce_scatter(factors, 1.0)
        start, stop = find_own_shard(world, factors.size)
        if world.cross_comm is not None and world.nodes > 1:
            exchange, sent = build_exchange(Route.ALL_REDUCE, world.cross_links, factors[start:stop])
            exchanges = Exchanges(world)
            exchanges.start(0, exchange)
            exchanges.finish(0, call)
            phases.current.sent(inter=sent)
        call.all_gather(factors)

    def _view_values(self, piece: _Piece) -> Array:
        width = piece.right - piece.left
        values: Array = self._own[piece.at : piece.at + piece.rows * width].reshape(piece.rows, width)
        return values


def _shape_as_square(length: int) -> tuple[Matrix, ...]:
    return (Matrix(0, length, math.isqrt(max(length - 1, 0)) + 1),) if length else ()


def _cut_pieces(number: int, matrix: Matrix, first: int, last: int) -> Iterator[_Piece]:
    """Yield the rectangles of a matrix in the elements [first, last) of the array: the end of a row, whole rows, the
    beginning of a row."""
    begin, end = max(first, matrix.start) - matrix.start, min(last, matrix.start + matrix.length) - matrix.start
    while begin < end:
        row, left = divmod(begin, matrix.columns)
        rows = 1 if left else max(1, (end - begin) // matrix.columns)
        right = min(matrix.columns, left + end - begin)
        yield _Piece(number, row, rows, left, right, matrix.start + begin - first)
        begin += rows * (right - left)


def _orthonormalize(columns: Array) -> Array:
    """Return the columns of a matrix made orthonormal by the modified Gram-Schmidt process, in float64 and in a fixed
    order. Columns that depend on the columns before them become zero. NaN and infinite values make everything NaN."""
    result = columns.astype(np.float64)
    if not np.isfinite(result).all():
        return np.full_like(columns, np.nan)
    for number in range(result.shape[1]):
        column = result[:, number]
        norm = math.sqrt(_sum_products(column, column))
        for other in range(number):
            column -= _sum_products(result[:, other], column) * result[:, other]
        new_norm = math.sqrt(_sum_products(column, column))
        result[:, number] = column / new_norm if new_norm > _LEAST_NEW * norm else 0.0
    return result.astype(np.float32)


def _sum_products(a: Array, b: Array) -> float:
    """Return the dot product of two vectors, added up from the first element to the last."""
    return float(np.add.accumulate(a * b)[-1])
