"""The comparison of the weights that all nodes agree on, in place of the weights of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash

from topkube.arrays import Array
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.step.weights_check import WeightsCheck
from topkube.training.node_weights.exchange import WeightExchange
from topkube.training.ranks import communication_thread
from topkube.training.ranks.agreement import Agreement, digest, find_differing_ranks, name_ranks, open_agreement
from topkube.world import World

_SETTINGS = ("lr", "momentum", "betas", "weight_decay")
"""The settings of a group of parameters that are compared. Other entries may be state of one node's optimizer."""


class AgreedWeightsCheck(WeightsCheck):
    """The comparison of the agreed weights of `exchange`. The ranks of a node (`node_world`) also compare their own
    weights, which must be the same on all of them. All ranks compare the settings of `optimizer`: nodes with different
    learning rates still agree on weights. `mode` and `every` are those of `WeightsCheck`."""

    def __init__(
        self,
        exchange: WeightExchange,
        node_world: World,
        parameters: list[Parameter],
        optimizer: torch.optim.Optimizer,
        mode: str,
        every: int,
    ) -> None:
        super().__init__(parameters, mode, every)
        self._world, self._node_world, self._exchange = exchange.world, node_world, exchange
        self._optimizer, self._have_other_settings = optimizer, False

    def compute_digest(self) -> float:
        """Return a digest of the agreed weights (with one node: of its weights) and of the optimizer's settings. It is
        the same on all ranks if all have these settings, all nodes the same agreed weights, and the ranks of each node
        the same weights. A collective of the node. Waits for a delayed exchange, which changes the agreed weights."""
        self._exchange.wait_for_delayed()
        own = super().compute_digest()
        rows = communication_thread.run(lambda: open_agreement(self._node_world).gather([self._digest_shards(), own]))
        shards = rows[: self._world.shards, 0].tolist()
        is_equal = len(set(rows[:, 1].tolist())) == 1
        if self._world.nodes == 1:
            return float(rows[self._world.local_rank, 1])
        return digest((self._digest_settings(), shards, None if is_equal else self._world.rank))

    def explain(self, first: bool) -> tuple[str, str]:
        if not self._have_other_settings:
            return super().explain(first)
        return (
            "a scheduler of this script follows the loss of its own rank, such as ReduceLROnPlateau",
            "pass the mean over all ranks to the scheduler: topkube.reduce(loss, 'mean')",
        )

    def _digest_settings(self) -> float:
        groups = self._optimizer.param_groups
        return digest([[(name, _round_numbers(group.get(name))) for name in _SETTINGS] for group in groups])

    def _digest_shards(self) -> float:
        return _digest_arrays(self._exchange.agreed)

    def describe_difference(self, agreement: Agreement, digest: float, first: bool) -> str:
        weights, settings = agreement.gather([digest, self._digest_settings()]).T
        different = find_differing_ranks(settings)
        self._have_other_settings = bool(different)
        ranks = different or find_differing_ranks(weights)
        self.differing = len(ranks)
        if different:
            return (
                f"{name_ranks(ranks)} train with another learning rate, momentum or weight decay than the other ranks"
            )
        start = "ranks start from different weights" if first else "weights differ"
        return f"{start}: {name_ranks(ranks)} have other weights than their node, or agree on other weights"


def _round_numbers(value: Any) -> list[str]:
    """Return a setting, which may be a tensor or a pair, as numbers of six digits; nothing if the optimizer has no such
    setting. Schedulers call functions such as cos, whose last bits depend on the processor."""
    if value is None:
        return []
    return [f"{float(number):.5e}" for number in (value if isinstance(value, tuple | list) else (value,))]


def _digest_arrays(arrays: list[Array]) -> float:
    total = xxhash.xxh3_64()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return float(total.intdigest() >> 11)
