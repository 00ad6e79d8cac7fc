"""hitopk, signsgd, powersgd and acpsgd on real ranks: their results equal those of their definitions on one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

import topkube
from ranks.allreduce import WIRES, Array, draw_inputs, hash_bits
from topkube import collectives
from topkube.algorithms import find_algorithm
from topkube.collectives import Request, load, residual_length
from topkube.collectives.error_feedback import Residual
from topkube.collectives.request import Matrix
from topkube.telemetry import phases
from topkube.world import World


def case_hitopk_is_hitopkcomm(world: World) -> None:
    """Results and residuals of several steps have the bits of a simulation in NumPy, which also rounds sent values."""
    for wire in WIRES:
        for length, density in [(10_007, 0.01), (40_000, 0.3), (3, 0.01)]:
            simulated = Simulation(world, length, density, WIRES[wire])
            residual = collectives.new_residual("hitopk", length)
            for step in range(4):
                arrays = draw_inputs(world, length, seed=10 + step)
                x = arrays[world.rank].copy()
                topkube.allreduce_(x, algorithm="hitopk", density=density, wire=wire, residual=residual)
                expected = simulated.step(arrays)
                assert x.tobytes() == expected.tobytes(), f"{wire} {length} step {step}: {np.abs(x - expected).max()}"
                if world.local_rank < world.shards:
                    own_residual = simulated.residuals[world.node][world.local_rank]
                    assert residual.current.tobytes() == own_residual.tobytes(), (
                        f"{wire} {length} step {step}: residual"
                    )


def case_signsgd_is_a_majority_vote(world: World) -> None:
    """Each element gets the sign that most ranks have, where a node votes for all its ranks, and the mean magnitude of
    its block. Compared with float64."""
    length = 3_001
    arrays = draw_inputs(world, length, seed=7)
    arrays[-1][:700] = -arrays[0][:700]  # a tie, if there are two nodes of equal size
    x = arrays[world.rank].copy()
    topkube.allreduce_(x, algorithm="signsgd")
    bounds = [length * i // world.shards for i in range(world.shards + 1)]
    expected, is_drawn = np.zeros(length), np.zeros(length, bool)
    for start, stop in itertools.pairwise(bounds):
        for first in range(start, stop, 256):
            block = slice(first, min(first + 256, stop))
            votes, scale = np.zeros(block.stop - block.start), 0.0
            for ranks in world.node_ranks:
                total = arrays[ranks[0]][block].copy()
                for rank in ranks[1:]:
                    total = total + arrays[rank][block]
                total = total * np.float32(1 / world.size)
                votes += np.where(np.signbit(total), -len(ranks), len(ranks))
                is_drawn[block] |= total == 0
                scale += float(np.abs(total.astype(np.float64)).mean().astype(ml_dtypes.bfloat16))
            expected[block] = np.sign(votes) * scale
    x[is_drawn] = expected[is_drawn] = 0  # a node that has 0 votes at random
    scales = np.abs(x[np.abs(x) > 0]) / np.abs(expected[np.abs(x) > 0])
    assert (np.sign(x) == np.sign(expected)).all()
    assert (np.abs(scales - 1) < 2.0**-7).all(), "a mean may round to the next bfloat16"
    if world.node_ranks == [[0], [1]]:
        assert (x[:512] == 0).all()


def case_signsgd_moves_elements_without_a_gradient_in_no_direction(world: World) -> None:
    """Zeros of all ranks get either sign equally often, the same on all ranks, and from the same arrays again."""
    total, count = np.zeros(1_000), 64
    for step in range(count):
        results = []
        for _ in range(2):
            x = draw_inputs(world, 4_000, seed=100 + step)[world.rank]
            x[::4] = 0
            topkube.allreduce_(x, algorithm="signsgd")
            assert len(set(world.comm.allgather(x.tobytes()))) == 1
            results.append(x)
        assert (results[0] == results[1]).all()
        total += np.sign(results[0][::4])
    assert abs(total.mean()) < 0.1 * count, total.mean()
    assert np.abs(total).max() < 0.8 * count, np.abs(total).max()


def case_powersgd_follows_its_definition(world: World) -> None:
    def approximate(whole: Array, rights: list[Array], number: int, step: int) -> Array:
        left = np.linalg.qr(whole @ rights[number]).Q
        rights[number] = whole.T @ left
        return left @ rights[number].T

    follow_definition(world, "powersgd", approximate)


def case_acpsgd_follows_its_definition(world: World) -> None:
    """Before even steps, `factors` has Q of the last step, and before odd steps P."""

    def approximate(whole: Array, factors: list[Array], number: int, step: int) -> Array:
        last = np.linalg.qr(factors[number]).Q
        factors[number] = whole.T @ last if step % 2 else whole @ last
        return last @ factors[number].T if step % 2 else factors[number] @ last.T

    follow_definition(world, "acpsgd", approximate)


def follow_definition(world: World, name: str, approximate: Callable[[Array, list[Array], int, int], Array]) -> None:
    """Compare with float64, with error feedback and warm start, for matrices that shards cut in the middle of rows.
    What all ranks receive has the same bits. `approximate` takes the sum of all nodes, the factors of the last step,
    the number of the matrix and that of the step."""
    matrices = (Matrix(0, 40 * 31, 31), Matrix(40 * 31, 9 * 200, 200), Matrix(3040, 157, 10), Matrix(3197, 3, 1))
    length, matrix_rank = 3200, 3
    without_gradient = matrices[-1].start
    residual = Residual(residual_length(find_algorithm(name), world, length))
    errors = [np.zeros(length) for _ in world.node_ranks]
    shapes = [(m.columns, min(matrix_rank, m.columns, m.rows)) for m in matrices]
    rights = [np.random.default_rng(shape).random(shape) - 0.5 for shape in shapes]
    for step in range(5):
        arrays = draw_inputs(world, length, seed=80 + step)
        x = arrays[world.rank].copy()
        x[without_gradient:] = 0
        request = Request(x, "mean", residual=residual, matrix_rank=matrix_rank, matrices=matrices)
        assert world.agree(load(find_algorithm(name)).run(world, request))
        residual.accept()
        residual.commit()
        expected = np.zeros(length)
        shares = [np.sum([arrays[rank] for rank in ranks], axis=0, dtype=np.float64) for ranks in world.node_ranks]
        for share, error in zip(shares, errors, strict=True):
            share[without_gradient:] = 0
            error += share / world.size
        for number, matrix in enumerate(matrices[:-1]):
            place = slice(matrix.start, matrix.start + matrix.length)
            padded = np.zeros(matrix.rows * matrix.columns)
            padded[: matrix.length] = np.sum(errors, axis=0)[place]
            whole = padded.reshape(matrix.rows, matrix.columns)
            expected[place] = approximate(whole, rights, number, step).reshape(-1)[: matrix.length]
        for error, ranks in zip(errors, world.node_ranks, strict=True):
            error -= expected * len(ranks) / world.size
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-4 * scale)
        assert len(set(world.comm.allgather(hash_bits(x.tobytes())))) == 1
        if world.local_rank < world.shards:
            first, last = (length * (world.local_rank + i) // world.shards for i in range(2))
            np.testing.assert_allclose(residual.current, errors[world.node][first:last], rtol=0, atol=2e-4 * scale)


def case_powersgd_is_exact_for_low_ranks(world: World) -> None:
    """A matrix of rank 2 is sent exactly by rank 2, whatever the first factors are, and nothing is owed."""
    generator = np.random.default_rng(5)
    common = generator.standard_normal((2, 50))
    matrix = (np.random.default_rng([6, world.rank]).standard_normal((60, 2)) @ common).astype(np.float32)
    total = np.sum(world.comm.allgather(matrix), axis=0, dtype=np.float64)
    x = matrix.reshape(-1).copy()
    residual = Residual(residual_length(find_algorithm("powersgd"), world, x.size))
    load(find_algorithm("powersgd")).run(
        world, Request(x, "sum", residual=residual, matrix_rank=2, matrices=(Matrix(0, 3000, 50),))
    )
    np.testing.assert_allclose(x.reshape(60, 50), total, rtol=0, atol=1e-4 * np.abs(total).max())
    y = matrix.copy()
    topkube.allreduce_(y, "sum", "powersgd", matrix_rank=2)
    assert y.tobytes() == x.tobytes(), "the array's own shape is the matrix"
    owed = world.comm.allreduce(float(residual.pending.astype(np.float64).sum()))
    assert abs(owed) < 1e-3 * np.abs(total).sum()


def case_powersgd_sends_two_factors_and_acpsgd_one(world: World) -> None:
    for name, factors in (("powersgd", 2), ("acpsgd", 1)):
        x = draw_inputs(world, 512 * 512, seed=90)[world.rank]
        phases.current.take()
        load(find_algorithm(name)).run(world, Request(x, "mean", matrix_rank=4, matrices=(Matrix(0, 512 * 512, 512),)))
        sent = float(world.sum_small(np.array([phases.current.take().inter_bytes], np.float64))[0]) / world.nodes
        bound = 2 * (world.nodes - 1) / world.nodes * 4 * factors * 512 * 4
        assert abs(sent - bound) <= 64 * world.size, name


class Simulation:
    """HiTopKComm in NumPy, for all ranks on one process: each node sums its ranks' arrays, adds the residual, selects
    the k largest entries of each shard and sends them; the other entries become the residual."""

    def __init__(self, world: World, length: int, density: float, wire: np.dtype) -> None:
        self.world, self.wire = world, wire
        shards = world.shards
        self.bounds = [length * shard // shards for shard in range(shards + 1)]
        self.k = max(1, math.ceil(round(density * length / shards, 6)))
        self.residuals = [
            [np.zeros(stop - start, np.float32) for start, stop in itertools.pairwise(self.bounds)]
            for _ in world.node_ranks
        ]

    def step(self, arrays: list[Array]) -> Array:
        world, out = self.world, np.zeros(self.bounds[-1], np.float32)
        for shard, (start, stop) in enumerate(itertools.pairwise(self.bounds)):
            for node, ranks in enumerate(world.node_ranks):
                total = arrays[ranks[0]][start:stop].copy()
                for rank in ranks[1:]:
                    total = total + arrays[rank][start:stop]
                sums = total * np.float32(1 / world.size) + self.residuals[node][shard]
                chosen = np.sort(np.argsort(-np.abs(sums), kind="stable")[: self.k])
                sent = sums[chosen].astype(self.wire).astype(np.float32)
                unsent = sums.copy()
                unsent[chosen] = sums[chosen] - sent
                self.residuals[node][shard] = unsent
                out[start:stop][chosen] += sent
        return out
