"""The registry: every all-reduce algorithm by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from topkube.arrays import Array
from topkube.compression.error_feedback import Residual
from topkube.errors import ArgumentError
from topkube.world import World


@dataclass(frozen=True)
class Request:
    """One all-reduce, the same on every rank: `array` is a contiguous 1-D view, reduced in place."""

    array: Array
    op: str = "mean"
    density: float = 1.0
    wire: str = "fp32"
    selection: str = "topk"
    residual: Residual | None = None


@dataclass(frozen=True)
class Algorithm:
    name: str
    sparse: bool
    run: Callable[[World, Request], bool]
    """Reduces request.array in place; returns whether everything this rank saw was finite. Ranks may see different parts: the
    caller agrees on the step among all ranks, then commits or discards the residual."""
    residual_length: Callable[[World, int], int] = lambda world, length: 0


ALGORITHMS: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    assert algorithm.name not in ALGORITHMS, algorithm.name
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm


def find(name: str) -> Algorithm:
    """The algorithm called `name`. Raises ArgumentError listing the known ones."""
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise ArgumentError(
            f"unknown algorithm {name!r}", next_step=f"choose one of {', '.join(sorted(ALGORITHMS))}"
        ) from None
