"""The comparison of the weights that all nodes agree on, in place of the weights of all ranks."""

from __future__ import annotations

import numpy as np
import xxhash

from topkube.arrays import Array
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.step.weights_check import WeightsCheck
from topkube.training.node_weights.exchange import WeightExchange
from topkube.training.ranks import communication_thread
from topkube.training.ranks.agreement import Agreement, digest, find_differing_ranks, name_ranks, open_agreement
from topkube.world import World


class AgreedWeightsCheck(WeightsCheck):
    """The comparison of the agreed weights of `exchange`. The ranks of a node (`node_world`) also compare their own
    weights, which must be the same on all of them. `mode` and `every` are those of `WeightsCheck`."""

    def __init__(
        self, exchange: WeightExchange, node_world: World, parameters: list[Parameter], mode: str, every: int
    ) -> None:
        super().__init__(parameters, mode, every)
        self._world, self._node_world, self._exchange = exchange.world, node_world, exchange

    def compute_digest(self) -> float:
        """Return a digest of the agreed weights (with one node: of its weights). It is the same on all ranks if all
        nodes have the same agreed weights and the ranks of each node the same weights. A collective of the node. Waits
        for a delayed exchange, which changes the agreed weights."""
        self._exchange.wait_for_delayed()
        own = super().compute_digest()
        rows = communication_thread.run(lambda: open_agreement(self._node_world).gather([self._digest_shards(), own]))
        shards = rows[: self._world.shards, 0].tolist()
        is_equal = len(set(rows[:, 1].tolist())) == 1
        if self._world.nodes == 1:
            return float(rows[self._world.local_rank, 1])
        return digest(shards if is_equal else (shards, self._world.rank))

    def _digest_shards(self) -> float:
        return _digest_arrays(self._exchange.agreed)

    def describe_difference(self, agreement: Agreement, digest: float, first: bool) -> str:
        ranks = find_differing_ranks(agreement.gather([digest])[:, 0])
        self.differing = len(ranks)
        start = "ranks start from different weights" if first else "weights differ"
        return f"{start}: {name_ranks(ranks)} have other weights than their node, or agree on other weights"


def _digest_arrays(arrays: list[Array]) -> float:
    total = xxhash.xxh3_64()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return float(total.intdigest() >> 11)
