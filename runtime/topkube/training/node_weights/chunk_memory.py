"""The weights of a chunk: in the parameters, and in the work buffer through which the ranks of a node gather them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from topkube.arrays import Array
from topkube.collectives.call import Call, reserve_workspace
from topkube.training.node_weights.layout import Chunk
from topkube.training.node_weights.parameter_views import ParameterViews
from topkube.training.node_weights.weights_device import WeightsDevice
from topkube.world import World


class ChunkMemory:
    """The weights of a rank of `world`, whose parameters are on `device`."""

    def __init__(self, world: World, device: WeightsDevice) -> None:
        self._world, self.device = world, device
        self._views: dict[int, ParameterViews] = {}
        """The parameters of each chunk, by its number."""
        self._in_place: dict[int, tuple[list[torch.Tensor], list[Array]]] = {}
        """The pieces of each chunk in host memory, as tensors and as arrays."""

    def take_staging(self, chunk: Chunk, world: World | None = None) -> tuple[Array, Array]:
        """Return a work buffer for the chunk, and this rank's shard of it. The next chunk has another buffer. A later
        call may return another, larger buffer: keep the arrays. `world` has the buffer if it is another world of the
        same ranks."""
        name = f"staging of weights {chunk.number % 2}"
        staging = reserve_workspace(world or self._world, name, chunk.length, np.float32)
        return staging, staging[chunk.first : chunk.last]

    def find_in_place(self, chunk: Chunk) -> list[Array] | None:
        """Return the weights of the chunk where they are, one array for each piece: views of the parameters. None if
        this rank cannot write all weights of its node there."""
        if self._world.local_size > 1 or self.device.device is not None:
            return None
        pieces = self._find_views(chunk).pieces_in_place
        if pieces is None:
            return None
        known, arrays = self._in_place.get(chunk.number, (None, []))
        if pieces is not known:
            if any(piece.data_ptr() % piece.element_size() for piece in pieces):
                return None
            arrays = self.device.read(pieces)
            self._in_place[chunk.number] = pieces, arrays
        return arrays

    def read(self, chunk: Chunk) -> list[Array]:
        """Return the weights of this rank's shard, one array for each piece: copies, or views if the parameters are in
        host memory and contiguous."""
        in_place = self.find_in_place(chunk)
        return in_place if in_place is not None else self.device.read(self._find_views(chunk).pieces)

    def _find_views(self, chunk: Chunk) -> ParameterViews:
        views = self._views.get(chunk.number)
        if views is None:
            views = self._views[chunk.number] = ParameterViews(chunk)
        return views

    def collect(self, chunk: Chunk, shard: Array, agreed: Array | None = None) -> None:
        """Copy this rank's shard of the parameters into `shard`, without `agreed`, its shard of the agreed weights. The
        gaps between tensors become zero."""
        filled = 0
        for piece, values in zip(chunk.pieces, self.read(chunk), strict=True):
            shard[filled : piece.at] = 0
            if agreed is None:
                shard[piece.place] = values
            else:
                np.subtract(values, agreed[piece.place], out=shard[piece.place])
            filled = piece.place.stop
        shard[filled:] = 0

    def write(self, chunk: Chunk, call: Call, staging: Array) -> None:
        """Gather `staging`, a work buffer of the chunk of which each rank of the node has filled its shard, and copy it
        into the parameters."""
        call.all_gather(staging)
        if pairs := list(self.list_tensors(chunk, staging)):
            torch._foreach_copy_([parameter for parameter, _ in pairs], [values for _, values in pairs])

    def list_tensors(self, chunk: Chunk, staging: Array) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters of a chunk, and their parts of `staging`, in each one's shape and on their device."""
        values = self.device.copy_to_device(staging)
        for parameter, start in zip(chunk.parameters, chunk.starts, strict=True):
            yield parameter.tensor, values[start : start + parameter.length].view(parameter.tensor.shape)


def cut(shard: Array, chunk: Chunk) -> list[Array]:
    """Return the parts of a shard of the chunk that its pieces take, without the gaps between them."""
    return [shard[piece.place] for piece in chunk.pieces]
