"""A problem: the array of every rank and the expected sums, as files that all ranks map."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
CHUNK = 1 << 20


class WrongResult(AssertionError):
    """The sum of a contender is wrong."""


class SumProblem:
    """`length` float32 for each rank of `layout`: normally distributed, and equal for every contender."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.length = int(np.load(directory / "rank0.npy", mmap_mode="r").size)

    @classmethod
    def create(cls, directory: Path, length: int, layout: tuple[int, ...], densities: tuple[float, ...]) -> SumProblem:
        directory.mkdir()
        generator = np.random.default_rng(2024)
        inputs = []
        for rank in range(sum(layout)):
            inputs.append(generator.standard_normal(length, np.float32))
            np.save(directory / f"rank{rank}.npy", inputs[-1])
        problem = cls(directory)
        total = np.zeros(length, np.float64)
        for array in inputs:
            total += array
        np.save(directory / "dense.npy", total.astype(np.float32))
        nodes = _sum_nodes(inputs, layout)
        for density in densities:
            naive_sum = np.zeros(length, np.float32)
            for array in inputs:
                naive_sum += _keep_largest(array, density, 1)
            np.save(directory / f"naive-{density}.npy", naive_sum)
            hitopk_sum = np.zeros(length, np.float32)
            for array in nodes:
                hitopk_sum += _keep_largest(array, density, min(layout))
            np.save(directory / f"hitopk-{density}.npy", hitopk_sum)
        return problem

    def load_input(self, rank: int) -> Floats:
        array: Floats = np.load(self.directory / f"rank{rank}.npy", mmap_mode="r")
        return array

    def check(self, result: Floats, reference: str, tolerance: float) -> None:
        """Raise WrongResult unless every element is within `tolerance` of `reference` and the zeros are at its
        zeros."""
        sums = np.load(self.directory / f"{reference}.npy", mmap_mode="r")
        if result.shape != sums.shape:
            raise WrongResult(f"length {result.shape}, not {sums.shape}")
        for start in range(0, self.length, CHUNK):
            actual, expected = result[start : start + CHUNK], sums[start : start + CHUNK]
            wrong = ~(np.abs(actual - expected) <= tolerance)
            if reference != "dense":
                # Rounded values may cancel to zero although the exact values do not; the reverse is an error.
                wrong |= (expected == 0) & (actual != 0)
                wrong |= (actual == 0) & (np.abs(expected) > tolerance)
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                raise WrongResult(
                    f"{reference}: element {start + first} is {actual[first]}, not {expected[first]}; "
                    f"{int(wrong.sum())} of this million elements are wrong"
                )


def _sum_nodes(inputs: list[Floats], layout: tuple[int, ...]) -> list[Floats]:
    sums, rank = [], 0
    for ranks in layout:
        total = inputs[rank].copy()
        for array in inputs[rank + 1 : rank + ranks]:
            total += array
        sums.append(total)
        rank += ranks
    return sums


def _keep_largest(array: Floats, density: float, shards: int) -> Floats:
    """Return the k largest magnitudes of each shard, with zeros elsewhere. Ties go to the lowest index."""
    kept = np.zeros_like(array)
    for shard, out in zip(np.array_split(array, shards), np.array_split(kept, shards), strict=True):
        k = max(1, math.ceil(density * array.size / shards))
        magnitude = np.abs(shard)
        threshold = np.partition(magnitude, array.size // shards - k)[array.size // shards - k]
        above = np.flatnonzero(magnitude > threshold)
        ties = np.flatnonzero(magnitude == threshold)[: k - above.size]
        for chosen in (above, ties):
            out[chosen] = shard[chosen]
    return kept
