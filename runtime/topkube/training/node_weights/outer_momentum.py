"""The outer step of `diloco`: Nesterov momentum on the mean change of all nodes.

Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023. Delta is the mean change of
the nodes' weights since the last exchange, u the outer momentum, zero at first, b the momentum and r the outer learning
rate: u = b u + Delta, and the agreed weights x move by r (Delta + b u). With b = 0 and r = 1, they move by Delta.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from topkube.arrays import Array
from topkube.training.node_weights.layout import Chunk, ShardPiece

KEY = "outer_momentum"
"""The key of the outer momentum among the states of a parameter in a checkpoint."""


class OuterMomentum:
    """The outer momentum of this rank's shards, one per chunk (float32). It has the same bits on all nodes, because the
    changes have the same bits."""

    def __init__(self, chunks: Sequence[Chunk], learning_rate: float, momentum: float) -> None:
        self._learning_rate, self._momentum = np.float32(learning_rate), np.float32(momentum)
        self.values: list[Array] = [np.zeros(chunk.shard, np.float32) for chunk in chunks]

    def step(self, chunk: Chunk, change: Array) -> None:
        """Replace `change`, this rank's shard of the mean change of all nodes, by the change of the agreed weights."""
        values = self.values[chunk.number]
        values *= self._momentum
        values += change
        change += self._momentum * values
        change *= self._learning_rate

    def reset(self) -> None:
        """Forget the momentum."""
        for values in self.values:
            values[:] = 0

    def save(self, chunk: Chunk, piece: ShardPiece) -> tuple[str, list[tuple[int, torch.Tensor]]]:
        """Return the momentum of a part of a parameter: (name, entries), as a checkpoint has it."""
        values = self.values[chunk.number][piece.place]
        return f"{piece.parameter.name} {KEY}", [(piece.begin, torch.from_numpy(values.copy()))]
