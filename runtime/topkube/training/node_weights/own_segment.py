"""The segment of a chunk that this node owns, in an exchange in two stages (collectives/two_stage.py).

The owner sends nothing of its own change. It adds that to what the other nodes sent, and what it does not send of the
mean is in its own weights: after the exchange, they are x + `rest`, where x has changed by the part that was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from topkube.arrays import Array
from topkube.collectives.codecs import TensorCodec
from topkube.training.node_weights.layout import Chunk, Ranges, select


class OwnSegment:
    """The own segment of a chunk: `segment` of this rank's shard, which `codec` packs. `tensors` are the pieces of the
    chunk in it."""

    def __init__(self, chunk: Chunk, segment: slice, codec: TensorCodec, tensors: Ranges) -> None:
        self._codec, self._tensors = codec, tensors
        self._length = segment.stop - segment.start
        self._places: list[slice] = []
        """The place of each of these pieces in the segment."""
        for number, elements in tensors:
            first = chunk.pieces[number].place.start - segment.start
            self._places.append(slice(first + elements.start, first + elements.stop))
        self._change: Array = np.empty(0, np.float32)

    def note_difference(self, weights: Sequence[Array], agreed: Sequence[Array]) -> None:
        """Keep the change, the difference of weights and agreed weights, until `move`. Both are one array for each
        piece of the chunk."""
        self._keep(map(np.subtract, select(weights, self._tensors), select(agreed, self._tensors)))

    def note_change(self, change: Sequence[Array]) -> None:
        """Keep the change until `move`: one array for each piece of the chunk."""
        self._keep(select(change, self._tensors))

    def copy_change(self) -> Array:
        """Return a copy of the change, side by side as the codec packs it. The gaps are zero."""
        return self._change.copy()

    def move(self, agreed: Sequence[Array], moved: Sequence[Array], is_delayed: bool, rest: Array, mean: Array) -> None:
        """Add the row `mean` to the agreed weights, and set the node's own weights to them plus `rest`, which the
        change has become. `moved` are the node's own weights; if the exchange `is_delayed`, what must be added to them
        later. Overwrites `rest`."""
        self._codec.unpack_add_tensors(select(agreed, self._tensors), [mean], [1.0])
        move = np.subtract(rest, self._change, out=rest)
        self._codec.unpack_add(move, [mean], [1.0])
        for weights, change in zip(select(moved, self._tensors), self._cut(move), strict=True):
            if is_delayed:
                weights[:] = change
            else:
                weights += change

    def _keep(self, parts: Iterable[Array]) -> None:
        self._change = np.zeros(self._length, np.float32)
        for target, part in zip(self._cut(self._change), parts, strict=True):
            target[:] = part

    def _cut(self, segment: Array) -> list[Array]:
        return [segment[place] for place in self._places]
