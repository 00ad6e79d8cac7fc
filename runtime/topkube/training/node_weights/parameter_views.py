"""The parameters of a chunk as flat tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from topkube.training.node_weights.layout import Chunk


class ParameterViews:
    """The parameters of a chunk as 1-D tensors that share their memory, so that a few calls copy or change all of them.
    Views are made when parameters have moved: making them takes longer than the copy of a small tensor."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._addresses: list[int] = []
        self._whole: list[torch.Tensor] = []
        self._pieces: list[torch.Tensor] = []
        ends = [start + p.length for start, p in zip(chunk.starts, chunk.parameters, strict=True)]
        self._lengths = _list_lengths(zip(chunk.starts, ends, strict=True), chunk.length)
        self._piece_lengths = _list_lengths(((p.place.start, p.place.stop) for p in chunk.pieces), chunk.shard)

    @property
    def whole(self) -> list[torch.Tensor] | None:
        """The parameters; None if the memory of one is not contiguous."""
        return self._whole if self._refresh() else None

    @property
    def pieces_in_place(self) -> list[torch.Tensor] | None:
        """The parts of parameters in this rank's shard: the same list until a parameter has moved. None if one of the
        parameters is not contiguous."""
        return self._pieces if self._refresh() else None

    @property
    def pieces(self) -> list[torch.Tensor]:
        """The parts of parameters in this rank's shard: copies of those that are not contiguous."""
        in_place = self.pieces_in_place
        return in_place if in_place is not None else self._cut_parameters()

    def cut(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of `values`, which has the length of the chunk, that belong to the parameters: views."""
        return values.split_with_sizes(self._lengths)[1::2]

    def cut_pieces(self, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of `shard`, which has the length of this rank's shard, that belong to its pieces: views."""
        return shard.split_with_sizes(self._piece_lengths)[1::2]

    def _cut_parameters(self) -> list[torch.Tensor]:
        return [piece.view(piece.parameter.tensor) for piece in self._chunk.pieces]

    def _refresh(self) -> bool:
        """Make new views if a parameter has moved. Return False if the memory of a parameter is not contiguous."""
        tensors = [parameter.tensor for parameter in self._chunk.parameters]
        if not all([tensor.is_contiguous() for tensor in tensors]):
            return False
        # Views keep their memory, so while parameters have these addresses, they are views of the parameters.
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._whole = [tensor.detach().view(-1) for tensor in tensors]
            self._pieces = self._cut_parameters()
            self._addresses = addresses
        return True


def _list_lengths(places: Iterable[tuple[int, int]], length: int) -> list[int]:
    """Return the lengths of what `places`, begin and end of each in `length` elements, cut: gaps and places in turn."""
    lengths, filled = [], 0
    for begin, end in places:
        lengths += [begin - filled, end - begin]
        filled = end
    return [*lengths, length - filled]
