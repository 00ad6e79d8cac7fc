"""The registry: every all-reduce algorithm by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from topkube.arrays import Array
from topkube.compression.error_feedback import Residual
from topkube.errors import ArgumentError
from topkube.world import World

OPS = ("mean", "sum")
WIRES = ("fp32", "bf16", "fp16")
SELECTIONS = ("topk", "mstopk")


@dataclass(frozen=True)
class Request:
    """One all-reduce, the same on every rank: `array` is a contiguous 1-D view of fp32, bf16 or fp16, reduced in place.

    `density`, `wire` (type of the values between nodes) and `selection` matter to sparse algorithms only. Raises
    ArgumentError where one of them is outside what is allowed.
    """

    array: Array
    op: str = "mean"
    density: float = 1.0
    wire: str = "fp32"
    selection: str = "topk"
    residual: Residual | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in [
            ("op", self.op, OPS),
            ("wire", self.wire, WIRES),
            ("selection", self.selection, SELECTIONS),
        ]:
            if value not in allowed:
                raise ArgumentError(f"{name} is {value!r}", next_step=f"choose one of {', '.join(allowed)}")
        if not 0 < self.density <= 1:
            raise ArgumentError(
                f"density is {self.density}, outside (0, 1]",
                next_step="give the share of entries to send, for example 0.01",
            )

    def scale(self, ranks: int) -> float:
        """What the sum over `ranks` is multiplied by."""
        return 1.0 / ranks if self.op == "mean" else 1.0


@dataclass(frozen=True)
class Algorithm:
    """`run` reduces request.array in place; it returns whether everything this rank saw was finite. Ranks may see
    different parts: the caller agrees on the step among all ranks, then commits or discards the residual.

    `residual_length(world, length)` is the residual's length on this rank for arrays of `length`; 0 where it keeps
    none.
    """

    name: str
    sparse: bool
    run: Callable[[World, Request], bool]
    residual_length: Callable[[World, int], int] = lambda world, length: 0


ALGORITHMS: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    """Adds an algorithm under its name."""
    assert algorithm.name not in ALGORITHMS, algorithm.name
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm


def find(name: str) -> Algorithm:
    """The algorithm called `name`. Raises ArgumentError with the nearest name and the known ones."""
    try:
        return ALGORITHMS[name]
    except (KeyError, TypeError):
        near = difflib.get_close_matches(str(name), ALGORITHMS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ArgumentError(
            f"unknown algorithm {name!r}", next_step=f"{hint}choose one of {', '.join(sorted(ALGORITHMS))}"
        ) from None
