"""The noise of a node's gradient, compared with that of the mean gradient of all nodes.

A node's gradient has more noise than the mean gradient, so its squares and its norm are larger. Optimizers that divide
by them make steps that are too short. They use rho, one number per tensor: the sum of the squares of the node's
gradient over those of the mean gradient, clamped to [1, nodes]. A mean of squares becomes v / rho, and a norm
|g| / sqrt(rho). rho is estimated from 256 fixed entries of each tensor. Nodes exchange these entries (bf16) every 16
steps, and keep running means of their squares with a decay of 0.9.

An optimizer uses rho through a `NoiseCorrection`: Adam's is in second_moment.py, and that of LARS and LAMB in
optimizers/layerwise.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from topkube import kernels
from topkube.algorithms import Route
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.all_reduce import build_exchange, finish_exchange
from topkube.collectives.call import Call, reserve_workspace
from topkube.collectives.request import Request
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.node_weights.weights_device import WeightsDevice
from topkube.world import World

PROBES = 256
"""Entries of a tensor that are exchanged."""
PROBE_EVERY = 16
"""Steps between two exchanges of the entries."""
_ROWS_UP_TO = 4
"""The largest number of nodes for which the (nodes - 1) rows of bf16 that a rank receives are at most as many bytes as
an all-reduce of float32."""
_DECAY = 0.9
"""The decay of the running means of squares, from one exchange to the next."""


class NoiseCorrection(ABC):
    """The correction of an optimizer's step on a node for the noise of the node's gradient."""

    @abstractmethod
    def corrected(self, ratios: Mapping[torch.Tensor, float]) -> AbstractContextManager[None]:
        """Return a context for the step. `ratios` holds rho of the tensors that the optimizer updates; rho of a tensor
        that is not in it is 1."""


class GradientNoise:
    """The estimate of rho on this rank's node. `parameters` hold the tensors and the gradients that the optimizer
    reads, `weights` are those of the nodes in means, and `device` is that of the gradients. `ratios` holds rho for each
    parameter, shape (parameters,), float64."""

    def __init__(
        self, world: World, parameters: Sequence[Parameter], weights: Sequence[float], device: WeightsDevice
    ) -> None:
        self._world, self._parameters, self._weights, self._device = world, parameters, weights, device
        generator = torch.Generator("cpu").manual_seed(0)
        # A copy frees the permutation, which takes twice the memory of the weights.
        drawn = [torch.randperm(p.length, generator=generator, device="cpu")[:PROBES].clone() for p in parameters]
        self._entries = [chosen.to(p.tensor.device) for chosen, p in zip(drawn, parameters, strict=True)]
        self._bounds = np.cumsum([0, *(len(entries) for entries in self._entries)])
        count = int(self._bounds[-1])
        self._length = -(-count // world.shards) * world.shards
        self._own, self._mean = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self._is_new = True
        self.ratios = np.ones(len(parameters))

    def list_ratios(self) -> dict[torch.Tensor, float]:
        """Return rho by tensor."""
        return {p.tensor: ratio for p, ratio in zip(self._parameters, self.ratios.tolist(), strict=True)}

    def is_due(self, step: int) -> bool:
        """Return True if the entries are exchanged before step number `step`, from 0. The same on all ranks."""
        return self._is_new or step % PROBE_EVERY == 0

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the entries of the gradients and set `ratios`. A collective, in the communication thread."""
        own, mean = self._exchange_entries()
        for squares, values in ((self._own, own), (self._mean, mean)):
            squares *= np.float32(_DECAY)
            squares += np.float32(1 - _DECAY) * values * values
        self._is_new = False
        self._set_ratios()

    def _set_ratios(self) -> None:
        for number, (start, stop) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            own, mean = float(self._own[start:stop].sum()), float(self._mean[start:stop].sum())
            self.ratios[number] = min(max(own / max(mean, 1e-30), 1.0), float(self._world.nodes))

    def _exchange_entries(self) -> tuple[Array, Array]:
        """Return the node's entries, rounded to bf16, and their mean over the nodes, weighted by ranks: (entries,),
        float32. Each rank exchanges a shard of them. Up to _ROWS_UP_TO nodes, nodes send each other their entries;
        beyond, an all-reduce of float32 sends less."""
        world = self._world
        own = np.zeros(self._length, BFLOAT16)
        gradients = [(number, p.tensor.grad) for number, p in enumerate(self._parameters) if p.tensor.grad is not None]
        chosen = [gradient.reshape(-1)[self._entries[number]] for number, gradient in gradients]
        for (number, _), entries in zip(gradients, self._device.read(chosen), strict=True):
            kernels.cast_(own[self._bounds[number] : self._bounds[number + 1]], entries)
        values, mean = own.astype(np.float32), np.zeros(self._length, np.float32)
        call = Call(world, "gradient noise", Request(mean, "sum"))
        call.check_between_nodes()
        shard = self._length // world.shards
        if world.cross_comm is not None:
            place = slice(world.local_rank * shard, (world.local_rank + 1) * shard)
            if world.nodes <= _ROWS_UP_TO:
                self._add_rows(call, own[place], mean[place])
            else:
                mean[place] = values[place] * np.float32(self._weights[world.node])
                finish_exchange(call, *build_exchange(Route.ALL_REDUCE, world.cross_links, mean[place]))
        call.all_gather(mean)
        count = int(self._bounds[-1])
        return values[:count], mean[:count]

    def _add_rows(self, call: Call, own: Array, mean: Array) -> None:
        """Gather the `own` entries (bf16) of all nodes and add them to `mean`, weighted, in the order of the nodes."""
        world, row_bytes = self._world, 2 * len(own)
        rows = reserve_workspace(world, "rows of gradient noise", world.nodes * row_bytes, np.uint8)
        rows = rows.reshape(world.nodes, row_bytes)
        rows[world.node].view(BFLOAT16)[:] = own
        finish_exchange(call, *build_exchange(Route.ALL_GATHER, world.cross_links, rows))
        for row, weight in zip(rows, self._weights, strict=True):
            mean += row.view(BFLOAT16).astype(np.float32) * np.float32(weight)

    # ---- state

    def save(self) -> dict[str, torch.Tensor]:
        """Return copies of the running means of squares: the same on all ranks of a node."""
        return {"own": torch.from_numpy(self._own.copy()), "mean": torch.from_numpy(self._mean.copy())}

    def load(self, state: dict[str, torch.Tensor] | None) -> None:
        """Load what `save` returned. With None, or for another model, the estimate begins again at the next step."""
        self._own[:], self._mean[:], self.ratios[:], self._is_new = 0, 0, 1, True
        if state is not None and len(state["own"]) == len(self._own):
            self._own[:], self._mean[:], self._is_new = state["own"].numpy(), state["mean"].numpy(), False
            self._set_ratios()
