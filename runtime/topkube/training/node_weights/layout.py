"""The place of each parameter in the vectors that nodes exchange.

The layout depends on the names and lengths of the parameters only, not on the order of backward. Every tensor begins
at a multiple of 256 elements, and so does every shard: a block with its scale never contains two tensors or two
shards. So the result does not depend on the number of ranks per node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from topkube.arrays import Array
from topkube.collectives.call import find_own_shard
from topkube.kernels import SIGN_BLOCK
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.world import World

Ranges = list[tuple[int, slice]]
"""Pieces of a chunk by their numbers, and which elements of each piece."""
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class ShardPiece:
    """Elements [begin, end) of a flattened parameter. They are at [at, at + end - begin) of this rank's shard."""

    parameter: Parameter
    begin: int
    end: int
    at: int

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of a tensor of the parameter's shape, 1-D: a view if the tensor is contiguous."""
        return tensor.detach().reshape(-1)[self.begin : self.end]

    @cached_property
    def place(self) -> slice:
        """The place of these elements in the shard."""
        return slice(self.at, self.at + self.end - self.begin)


@dataclass
class Chunk:
    """Parameters that are exchanged together: `parameters[i]` begins at element starts[i]. `length` is a multiple of
    256 times the number of shards. All tensors of a chunk are small (sent as bf16), or none of them is."""

    number: int
    is_always_dense: bool
    parameters: list[Parameter] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    length: int = 0
    first: int = 0
    """The first element of this rank's shard."""
    last: int = 0
    """The end of this rank's shard."""
    pieces: list[ShardPiece] = field(default_factory=list)
    """The parts of parameters in this rank's shard."""

    @property
    def shard(self) -> int:
        """The length of this rank's shard."""
        return self.last - self.first

    def close(self, world: World) -> None:
        """Note that the chunk has all its parameters, and find this rank's shard."""
        self.length = _round_up(self.length, SIGN_BLOCK * world.shards)
        self.first, self.last = find_own_shard(world, self.length)
        self.pieces = list(self._find_pieces())

    def _find_pieces(self) -> Iterator[ShardPiece]:
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            low, high = max(start, self.first), min(start + parameter.length, self.last)
            if low < high:
                yield ShardPiece(parameter, low - start, high - start, low - self.first)


def cut_into_chunks(parameters: Sequence[Parameter], world: World, chunk_bytes: int) -> list[Chunk]:
    """Return the chunks of `parameters`, of at most `chunk_bytes` (float32) each; a larger tensor has its own chunk."""
    chunks: list[Chunk] = []
    for is_always_dense in (False, True):
        current: Chunk | None = None
        for parameter in parameters:
            if parameter.is_always_dense is not is_always_dense or parameter.length == 0:
                continue
            room = _round_up(parameter.length, SIGN_BLOCK)
            if current is None or _ELEMENT_BYTES * (current.length + room) > chunk_bytes:
                current = Chunk(len(chunks), is_always_dense)
                chunks.append(current)
            current.parameters.append(parameter)
            current.starts.append(current.length)
            current.length += room
    for chunk in chunks:
        chunk.close(world)
    return chunks


def list_tensors_of_ranges(chunk: Chunk, bounds: Sequence[int]) -> Iterator[Ranges]:
    """Yield the pieces in each range [bounds[i], bounds[i + 1]) of the chunk's shard. With more nodes than blocks, some
    ranges are empty."""
    first = 0
    for start, stop in itertools.pairwise(bounds):
        while first < len(chunk.pieces) and chunk.pieces[first].place.stop <= start:
            first += 1
        ranges: Ranges = []
        for number in range(first, len(chunk.pieces)):
            place = chunk.pieces[number].place
            low, high = max(place.start, start), min(place.stop, stop)
            if low >= high:
                break
            ranges.append((number, slice(low - place.start, high - place.start)))
        yield ranges


def select(tensors: Sequence[Array], ranges: Ranges) -> list[Array]:
    """Return the elements of `tensors`, one array for each piece of a chunk, in `ranges`."""
    return [tensors[number][elements] for number, elements in ranges]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
