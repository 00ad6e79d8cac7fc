"""The state of a node in checkpoints: its own weights, what it owes as an owner of segments, its optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from topkube.arrays import Array
from topkube.collectives.two_stage import TwoStage
from topkube.errors import TrainingError
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.reduction.residuals import Pieces
from topkube.training.node_weights.exchange import WeightExchange
from topkube.training.node_weights.gradient_noise import GradientNoise
from topkube.training.node_weights.guard import DriftGuard
from topkube.training.node_weights.layout import Chunk, ShardPiece
from topkube.training.node_weights.outer_momentum import KEY

_NOISE = "second_moment"
"""The key of the squares from which the noise of gradients is estimated, in the state of a node."""
DELAYED = "delayed"
"""The key of what a delayed exchange will add to a parameter, among the states of the parameter in a checkpoint."""


class NodeWeightsState:
    """The state of this rank's node, of which each rank saves its shards. A loaded state waits until the model and the
    optimizer have loaded theirs (`restore`)."""

    def __init__(
        self,
        exchange: WeightExchange,
        parameters: list[Parameter],
        optimizer: torch.optim.Optimizer,
        guard: DriftGuard,
        noise: GradientNoise | None,
    ) -> None:
        self._world, self._exchange, self._parameters = exchange.world, exchange, parameters
        self._optimizer, self._guard, self._noise = optimizer, guard, noise
        self._loaded: Mapping[str, Any] | None = None
        self.own_weights: Mapping[str, torch.Tensor] = {}
        """The node's own weights by parameter name, while the parameters hold the agreed weights (`consensus`)."""

    @property
    def copies(self) -> int:
        """The number of nodes."""
        return self._world.nodes

    @property
    def copy(self) -> int:
        """The number of this rank's node."""
        return self._world.node

    def save(self) -> dict[str, Any]:
        """Return this rank's part of the node's state, keyed by parameter name: what was not sent, under "NAME", and
        the node's optimizer state, under "NAME KEY". "owners" holds, by name, what this node owes as the owner of
        segments: a part of the mean of all nodes. "weight" is the node's share of the ranks, and "differ" is True if
        nodes have different weights. "delayed" is True if the parameters do not have the result of a delayed exchange
        yet: it is under "NAME delayed", and what was not sent is the sum of both."""
        is_delayed = self._exchange.wait_for_delayed()
        pieces: Pieces = {}  # none before the first step
        owners: Pieces = {}
        for chunk, agreed in zip(self._exchange.chunks, self._exchange.agreed, strict=False):
            delayed_change = self._exchange.find_delayed(chunk) if is_delayed else None
            for piece in chunk.pieces:
                name = piece.parameter.name
                own = self._read(piece, self.own_weights.get(name, piece.parameter.tensor))
                pieces[name] = _list_differences(piece, own, agreed[piece.place])
                if delayed_change is not None:
                    change = delayed_change[piece.place]
                    pieces[f"{name} {DELAYED}"] = [(piece.begin, torch.from_numpy(change.copy()))]
                if self._exchange.outer is not None:
                    key, entries = self._exchange.outer.save(chunk, piece)
                    pieces[key] = entries
                for key, values in self._list_state(piece.parameter):
                    pieces[f"{piece.parameter.name} {key}"] = [(piece.begin, piece.view(values).to("cpu", copy=True))]
            if (stage := self._exchange.find_stages(chunk)) is not None and stage.keeps_owed:
                for name, entry in _list_owed(chunk, stage):
                    owners[name] = [entry]
        differ = bool(self._exchange.agreed)  # also on a rank without a shard, which has no pieces
        weight = self._exchange.weights[self._world.node]
        state = {"pieces": pieces, "weight": weight, "differ": differ, "owners": owners, "guard": self._guard.save()}
        if is_delayed:
            state["delayed"] = True
        if self._noise is not None and differ:
            state[_NOISE] = self._noise.save()
        return state

    @property
    def is_loaded(self) -> bool:
        """True if a state was loaded that `restore` has not taken."""
        return self._loaded is not None

    def load(self, state: Mapping[str, Any]) -> None:
        """Note the state that `save` returned, or its redistribution (checkpoint/residual_shares.py), for `restore`."""
        self._exchange.wait_for_delayed()
        self._exchange.forget_delayed()
        self._exchange.agreed = []
        is_of_nodes = state.get("differ", False) or ("mass" in state and state["pieces"])
        self._loaded = dict(state) if is_of_nodes else None
        self._guard.load(state.get("guard"))
        if self._noise is not None:
            self._noise.load(state.get(_NOISE))

    def restore(self) -> None:
        """Take the current weights as those that all nodes agree on, and restore the node's own weights and optimizer
        state. All ranks call this together, after the model and the optimizer have loaded their states. Does nothing if
        nothing was loaded."""
        if self._loaded is None:
            return
        state, self._loaded = self._loaded, None
        self._exchange.capture()
        self._exchange.device.run(lambda: self._restore(state))
        if self._world.nodes == 1:
            self._exchange.agreed = []

    @torch.no_grad()
    def _restore(self, state: Mapping[str, Any]) -> None:
        pieces = state["pieces"]
        own, delayed = [], []
        for chunk, agreed in zip(self._exchange.chunks, self._exchange.agreed, strict=True):
            shard = agreed.copy()
            self._restore_owed(state, chunk, shard)
            for piece in chunk.pieces:
                entries = pieces.get(piece.parameter.name, [])
                if "mass" in state:  # of another world: all that was not sent stays the same
                    change = np.zeros_like(shard[piece.place])
                    _add_entries(change, piece, entries)
                    _add_entries(change, piece, pieces.get(f"{piece.parameter.name} {DELAYED}", []))
                    shard[piece.place] += change / np.float32(self._exchange.weights[self._world.node])
                else:
                    _add_entries(shard[piece.place], piece, entries)
            if state.get("delayed"):
                delayed.append(np.zeros_like(shard))
                for piece in chunk.pieces:
                    _add_entries(delayed[-1][piece.place], piece, pieces.get(f"{piece.parameter.name} {DELAYED}", []))
            own.append(shard)
            self._restore_outer(state, chunk)
        self._exchange.place(own)
        if state.get("delayed"):
            self._exchange.restore_delayed(delayed)
        self._restore_optimizer(pieces, float(state.get("mass", 1.0)))

    def _restore_owed(self, state: Mapping[str, Any], chunk: Chunk, own: Array) -> None:
        """Restore what owners of segments owe in a chunk. With other segments than before, all nodes add up what was
        owed. If owners keep it in their weights, it is added there, so that the mean over nodes owes the same: in
        another world, every node adds the sum."""
        stage, owners = self._exchange.find_stages(chunk), state.get("owners", {})
        owed = np.zeros_like(own)
        for piece in chunk.pieces:
            _add_entries(owed[piece.place], piece, owners.get(piece.parameter.name, []))
        if "mass" in state:
            self._exchange.sum_over_nodes(owed)
        if stage is not None and stage.keeps_owed:
            stage.write_owed(owed[stage.segment])
        elif "mass" in state:
            own += owed
        else:
            own += owed / np.float32(self._exchange.weights[self._world.node])

    def _restore_outer(self, state: Mapping[str, Any], chunk: Chunk) -> None:
        """Restore the outer momentum of a chunk. In another world, the nodes add up their weighted parts: the sum has
        the same bits on all nodes."""
        if self._exchange.outer is None:
            return
        values = self._exchange.outer.values[chunk.number]
        for piece in chunk.pieces:
            _add_entries(values[piece.place], piece, state["pieces"].get(f"{piece.parameter.name} {KEY}", []))
        if "mass" in state:
            self._exchange.sum_over_nodes(values)

    def average_optimizer(self) -> None:
        """Replace the tensors of the optimizer's state by their means over the nodes, weighted by ranks. All ranks call
        this together, in the communication thread."""
        weight = np.float32(self._exchange.weights[self._world.node])
        for key in self._list_keys():
            for chunk in self._exchange.chunks:
                shard = np.zeros(chunk.shard, np.float32)
                for piece in chunk.pieces:
                    for own_key, tensor in self._list_state(piece.parameter):
                        if own_key == key:
                            shard[piece.place] = self._read(piece, tensor) * weight
                self._exchange.sum_over_nodes(shard)
                self._write_state(key, chunk, shard)

    def _read(self, piece: ShardPiece, tensor: torch.Tensor) -> Array:
        """Return the elements of the piece of a tensor of the parameter's shape: (piece.end - piece.begin,)."""
        return self._exchange.device.read([piece.view(tensor)])[0]

    def _list_keys(self) -> list[str]:
        return sorted({key for p in self._parameters for key, _ in self._list_state(p)})

    def _write_state(self, key: str, chunk: Chunk, shard: Array) -> None:
        """Write a chunk of the optimizer's state, of which every rank of the node passes its shard."""
        values = torch.from_numpy(self._exchange.gather(chunk, shard))
        for parameter, start in zip(chunk.parameters, chunk.starts, strict=True):
            for own_key, tensor in self._list_state(parameter):
                if own_key == key:
                    tensor.copy_(values[start : start + parameter.length].view(tensor.shape))

    def _restore_optimizer(self, pieces: Mapping[str, Any], mass: float) -> None:
        for key in self._list_keys():
            for chunk in self._exchange.chunks:
                shard = np.full(chunk.shard, -0.0, np.float32)  # -0.0 + x has the bits of x, also for -0.0
                for piece in chunk.pieces:
                    _add_entries(shard[piece.place], piece, pieces.get(f"{piece.parameter.name} {key}", []))
                if mass != 1:
                    shard /= np.float32(mass)
                self._write_state(key, chunk, shard)

    def _list_state(self, parameter: Parameter) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of the optimizer's state that differ between nodes. Raises TrainingError for a tensor of
        another shape or dtype than the parameter's."""
        tensors = []
        for key, value in sorted(self._optimizer.state.get(parameter.tensor, {}).items()):
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape == parameter.tensor.shape and value.dtype == torch.float32:
                tensors.append((key, value))
            elif value.ndim > 0:
                raise TrainingError(
                    f"the optimizer's state {key!r} of {parameter.name} has shape {tuple(value.shape)} and dtype"
                    f" {value.dtype}: a checkpoint cannot hold it for each node",
                    next_step="use an optimizer whose state has the shape and dtype of the parameters, such as SGD,"
                    " Adam or AdamW, or another algorithm",
                )
        return tensors


def _list_differences(piece: ShardPiece, own: Array, agreed: Array) -> list[tuple[int, torch.Tensor]]:
    """Return own - agreed as pieces. If they are added to `agreed` in their order, the sum has the bits of `own`. One
    piece is not always enough, because the difference is rounded."""
    entries = []
    reached = agreed
    for _ in range(2):
        difference = own - reached
        reached = reached + difference
        entries.append((piece.begin, torch.from_numpy(difference)))
        if (reached == own).all():
            break
    return entries


def _list_owed(chunk: Chunk, stage: TwoStage) -> Iterator[tuple[str, tuple[int, torch.Tensor]]]:
    """Yield the parts of parameters in the own segment: (name, (first element in the parameter, what is owed))."""
    owed = stage.read_owed()
    for piece in chunk.pieces:
        low, high = max(piece.place.start, stage.segment.start), min(piece.place.stop, stage.segment.stop)
        if low < high:
            values = owed[low - stage.segment.start : high - stage.segment.start]
            yield piece.parameter.name, (piece.begin + low - piece.at, torch.from_numpy(values.copy()))


def _add_entries(target: Array, piece: ShardPiece, entries: list[tuple[int, torch.Tensor]]) -> None:
    """Add the part of each entry that lies in the piece to `target`, in the order of the entries."""
    for first, values in entries:
        low, high = max(piece.begin, first), min(piece.end, first + values.numel())
        if low < high:
            target[low - piece.begin : high - piece.begin] += values[low - first : high - first].numpy()
