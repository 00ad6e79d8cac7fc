"""Low-rank all-reduce: `PowerSgd` sends two thin factors in place of each matrix.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019.
A is the sum over all nodes of a gradient and its residual, a matrix of m rows and n columns. One step of
the power iteration approximates A by P Q^T: P = A Q, with the Q of the last exchange; the columns of P are made
orthonormal; Q = A^T P. Both products are linear in A, so nodes add up their P and their Q, and never send A.

Inside each node, ranks first add up their gradients. Every rank then works on its shard, which may begin and end within
a row. The columns of P and the product P Q^T must have the same bits on all nodes: they are computed in a fixed order,
without a BLAS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from topkube import kernels
from topkube.algorithms import Route
from topkube.arrays import Array
from topkube.collectives.all_reduce import AllReduce, between_nodes, count_dense
from topkube.collectives.call import Call, own_shard, workspace
from topkube.collectives.exchange import Exchanges
from topkube.collectives.request import Matrix, Request
from topkube.telemetry import phases
from topkube.world import World

_LEAST_NEW = 1e-6
"""A column of P becomes zero if less than this share of its norm is independent of the columns before it. The matrix
then has a lower rank, and the rest of the column is a rounding error."""
_BLOCK_ELEMENTS = 1 << 15
"""Elements of P Q^T that are computed together, so that they stay in the cache."""


class PowerSgd(AllReduce):
    """PowerSGD with error feedback and warm start, after a dense sum inside each node.

    `Request.matrices` lists the parts of the array that are matrices. If it is empty, the array is one matrix with
    about as many rows as columns. The factor Q of the last exchange is in `Residual.factors`, one array per matrix.
    Without a residual it is random, the same on all ranks. Columns that have become zero are random again.
    """

    def run(self, world: World, request: Request) -> bool:
        call, x, residual = Call(world, self.algorithm.name, request), request.array, request.residual
        count_dense(world, request.nbytes)
        first, last = own_shard(world, request.length)
        if residual is not None:
            own = residual.pending
            finite = call.reduce_scatter(x, request.scale(world.size), own, residual.current)
        else:
            own = workspace(world, "shard", last - first, np.float32)
            finite = call.reduce_scatter(x, request.scale(world.size), own)
        call.check_between_nodes()
        factorization = _Factorization(call, request, own, first, last)
        with phases.current.timed("select"):
            rights = factorization.begin(residual.factors if residual is not None else ())
            lefts = factorization.compute_lefts(rights)
        factorization.sum_over_all(lefts)
        with phases.current.timed("select"):
            factorization.orthonormalize(lefts)
            rights = factorization.compute_rights(lefts)
        factorization.sum_over_all(rights)
        with phases.current.timed("select"):
            weight = len(world.node_ranks[world.node]) / world.size
            factorization.multiply(lefts, rights, x[first:last], weight)
            finite = all([finite, *(kernels.is_finite(part) for part in (rights, x[first:last]) if part.size)])
        if residual is not None:
            residual.pending_factors = [values.copy() for values in factorization.parts(rights, of_rows=False)]
        call.all_gather(x)
        return finite


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
    """The factors of all matrices of one exchange. `lefts` is one float32 array with P of each matrix, (rows, rank),
    one after the other. `rights` is the same with Q of each matrix, (columns, rank)."""

    def __init__(self, call: Call, request: Request, own: Array, first: int, last: int) -> None:
        self._call, self._own = call, own
        self._matrices = request.matrices or _shape_as_square(request.length)
        self._ranks = [min(request.matrix_rank, matrix.rows, matrix.columns) for matrix in self._matrices]
        self._pieces = [
            piece for number, matrix in enumerate(self._matrices) for piece in _cut_pieces(number, matrix, first, last)
        ]

    def parts(self, factors: Array, of_rows: bool) -> list[Array]:
        """Cut `factors` into one 2-D view per matrix."""
        views, end = [], 0
        for matrix, rank in zip(self._matrices, self._ranks, strict=True):
            rows = matrix.rows if of_rows else matrix.columns
            views.append(factors[end : end + rows * rank].reshape(rows, rank))
            end += rows * rank
        return views

    def _allocate(self, name: str, of_rows: bool) -> Array:
        lengths = [m.rows if of_rows else m.columns for m in self._matrices]
        count = sum(length * rank for length, rank in zip(lengths, self._ranks, strict=True))
        buffer = workspace(self._call.world, name, count, np.float32)
        buffer[:] = 0
        return buffer

    def begin(self, warm: Sequence[Array]) -> Array:
        """Return the first `rights`: those of the last exchange, with new columns in place of zeros."""
        rights = self._allocate("right factors", of_rows=False)
        for number, part in enumerate(self.parts(rights, of_rows=False)):
            if number < len(warm) and warm[number].size == part.size:
                part[:] = warm[number].reshape(part.shape)
            empty = ~part.any(axis=0)
            if empty.any():
                part[:, empty] = np.random.default_rng(part.shape).random(part.shape)[:, empty] - 0.5
        return rights

    def compute_lefts(self, rights: Array) -> Array:
        """Return this rank's share of P = A Q, from the elements of its shard."""
        lefts = self._allocate("left factors", of_rows=True)
        all_lefts, all_rights = self.parts(lefts, of_rows=True), self.parts(rights, of_rows=False)
        for piece in self._pieces:
            part, right = all_lefts[piece.matrix], all_rights[piece.matrix]
            part[piece.row : piece.row + piece.rows] += self._values(piece) @ right[piece.left : piece.right]
        return lefts

    def compute_rights(self, lefts: Array) -> Array:
        """Return this rank's share of Q = A^T P, from the elements of its shard."""
        rights = self._allocate("right factors", of_rows=False)
        all_lefts, all_rights = self.parts(lefts, of_rows=True), self.parts(rights, of_rows=False)
        for piece in self._pieces:
            part, left = all_rights[piece.matrix], all_lefts[piece.matrix]
            part[piece.left : piece.right] += self._values(piece).T @ left[piece.row : piece.row + piece.rows]
        return rights

    def orthonormalize(self, lefts: Array) -> None:
        """Make the columns of each part orthonormal, or zero."""
        for part in self.parts(lefts, of_rows=True):
            part[:] = _orthonormalize(part)

    def multiply(self, lefts: Array, rights: Array, out: Array, weight: float) -> None:
        """Write P Q^T into `out`, this rank's shard of the array, and subtract `weight` times that from the shard that
        the factors came from."""
        all_lefts, all_rights = self.parts(lefts, of_rows=True), self.parts(rights, of_rows=False)
        for piece in self._pieces:
            columns = np.ascontiguousarray(all_rights[piece.matrix][piece.left : piece.right].T)
            width, left = piece.right - piece.left, all_lefts[piece.matrix]
            step = max(1, _BLOCK_ELEMENTS // width)
            for row in range(0, piece.rows, step):
                rows = left[piece.row + row : piece.row + min(row + step, piece.rows)]
                product = np.zeros((len(rows), width), np.float32)
                for rank, column in enumerate(columns):
                    product += rows[:, rank : rank + 1] * column
                start = piece.at + row * width
                target = out[start : start + product.size]
                target[:] = product.reshape(-1).astype(out.dtype)
                self._own[start : start + product.size] -= np.float32(weight) * target.astype(np.float32)

    def sum_over_all(self, factors: Array) -> None:
        """Replace `factors` by their sum over all ranks: inside the node, between nodes, inside the node."""
        call, world = self._call, self._call.world
        call.reduce_scatter(factors, 1.0)
        start, stop = own_shard(world, factors.size)
        if world.cross_comm is not None and world.nodes > 1:
            exchange, sent = between_nodes(Route.ALL_REDUCE, world.cross_comm, factors[start:stop])
            exchanges = Exchanges()
            exchanges.start(0, exchange)
            exchanges.finish(0, call)
            phases.current.sent(inter=sent)
        call.all_gather(factors)

    def _values(self, piece: _Piece) -> Array:
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
        left = math.sqrt(_sum_products(column, column))
        result[:, number] = column / left if left > _LEAST_NEW * norm else 0.0
    return result.astype(np.float32)


def _sum_products(a: Array, b: Array) -> float:
    """Return the dot product of two vectors, added up from the first element to the last."""
    return float(np.add.accumulate(a * b)[-1])
