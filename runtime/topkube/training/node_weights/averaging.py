"""The average of the nodes' weights, after which all nodes have the same weights and the same state of the
optimizer."""

from __future__ import annotations

import numpy as np
import torch

from topkube.arrays import Array
from topkube.training.node_weights.exchange import WeightExchange
from topkube.training.node_weights.layout import Chunk
from topkube.training.node_weights.node_state import NodeWeightsState


@torch.no_grad()
def average_nodes(exchange: WeightExchange, state: NodeWeightsState) -> None:
    """Write the mean of the nodes' weights into the parameters of all nodes, and the mean of their optimizers' states
    into each state.

    The mean is x + mean(e): x are the agreed weights, and e is what a node has not sent, with what it owes as the owner
    of segments. Means are weighted by the ranks per node. A collective of all ranks, in the communication thread."""
    averaged = [_average_chunk(exchange, chunk) for chunk in exchange.chunks]
    exchange.place(averaged)
    state.average_optimizer()


def _average_chunk(exchange: WeightExchange, chunk: Chunk) -> Array:
    """Return this rank's shard of the mean of the nodes' weights: (chunk.shard,), float32."""
    agreed, stages = exchange.agreed[chunk.number], exchange.find_stages(chunk)
    unsent = np.empty(chunk.shard, np.float32)
    exchange.memory.collect(chunk, unsent, agreed)
    unsent *= np.float32(exchange.weights[exchange.world.node])
    if stages is not None:
        unsent[stages.segment] += stages.read_owed()
    exchange.sum_over_nodes(unsent)
    return agreed + unsent
