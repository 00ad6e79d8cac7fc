"""The compiled extension (csrc/). Arrays are one-dimensional contiguous uint8 views; a dtype code goes with each."""

from collections.abc import Callable, Sequence

from topkube.arrays import Array

def simd_paths() -> list[str]: ...
def use_simd(name: str) -> bool: ...
def simd() -> str: ...
def sum(out: Array, out_dtype: int, inputs: Sequence[Array], in_dtype: int, scale: float) -> None: ...
def scale(data: Array, dtype: int, factor: float) -> None: ...
def is_finite(data: Array, dtype: int) -> bool: ...
def copy(out: Array, input: Array) -> None: ...

class NodeTimeout(Exception):
    """`args`: the local ranks that did not enter the call."""

class NodeMismatch(Exception):
    """`args`: the local ranks whose signature differs."""

class Node:
    """Collectives of one node's ranks through `window`, which all of them map; see cpu/shared_memory.hpp."""

    def __init__(
        self, window: Array, rank: int, ranks: int, shards: int, cells: int, poll: Callable[[], None]
    ) -> None: ...
    @staticmethod
    def bytes(ranks: int, cells: int) -> int: ...
    def all_reduce(self, x: Array, dtype: int, scale: float, signature: int, deadline: float) -> bool: ...
    def reduce_scatter(
        self,
        x: Array,
        dtype: int,
        scale: float,
        out: Array | None,
        add: Array | None,
        signature: int,
        deadline: float,
    ) -> bool: ...
    def all_gather(
        self, x: Array, item: int, bounds: Array | None, signature: int, deadline: float
    ) -> None: ...

def spread(out: Array, dtype: int, parts: Sequence[tuple[Array, Array]]) -> None: ...
