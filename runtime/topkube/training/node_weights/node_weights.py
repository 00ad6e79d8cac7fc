"""The weights of a node beside the weights that all nodes agree on: steps, evaluation, checks and checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from topkube.algorithms import find_algorithm
from topkube.arrays import Array
from topkube.collectives.two_stage import TwoStage
from topkube.errors import ArgumentError, TrainingError
from topkube.telemetry import phases
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.parameter import Parameter, is_sharded
from topkube.training.exchange.reduction.residuals import Pieces
from topkube.training.exchange.step.weights_check import WeightsCheck
from topkube.training.node_weights.exchange import WeightExchange
from topkube.training.node_weights.guard import Guard, Squares, warn
from topkube.training.node_weights.layout import Chunk, Piece
from topkube.training.node_weights.outer_momentum import KEY
from topkube.training.node_weights.second_moment import SecondMoment
from topkube.training.ranks.agreement import Agreement, agreement, differing_ranks, digest, names_of
from topkube.training.ranks.communication_thread import schedule
from topkube.world import World, sub_world

T = TypeVar("T")
_all: weakref.WeakSet[NodeWeights] = weakref.WeakSet()


def world_of_node(world: World) -> World:
    """Return the world of the ranks of this rank's node. All ranks create it together, on first use."""
    if world.nodes == 1:
        return world
    existing: World | None = world.cache.get("world of the node")
    if existing is None:
        for ranks in world.node_ranks:
            existing = sub_world(world, ranks) or existing
        assert existing is not None
        world.cache["world of the node"] = existing
    return existing


class NodeWeights:
    """The weights of the nodes of `world` under error feedback in the weights (exchange.py).

    The parameters hold the node's own weights while the script trains. Inside `consensus()` they hold the weights
    that all nodes agree on. With one node there is nothing to exchange, and both are the same. Raises ArgumentError for
    parameters that are not float32 in host memory.
    """

    def __init__(
        self,
        world: World,
        parameters: list[Parameter],
        aggregation: AggregationSettings,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        algorithm = find_algorithm(aggregation.algorithm)
        check_parameters(parameters, algorithm.name)
        self.world, self.node_world = world, world_of_node(world)
        self.exchange = WeightExchange(world, parameters, aggregation)
        self._parameters, self._optimizer = parameters, optimizer
        self.guard = Guard(aggregation.period, algorithm.name)
        self._second_moment = (
            SecondMoment(world, parameters, self.exchange.weights, optimizer)
            if world.nodes > 1 and algorithm.corrects_second_moment and SecondMoment.supports(optimizer)
            else None
        )
        self._loaded: Mapping[str, Any] | None = None
        self._in_consensus = False
        self._versions: list[int] = []
        """The versions of the parameters when this class or the optimizer last wrote them."""
        self._has_warned = False
        _all.add(self)

    @property
    def differ(self) -> bool:
        """True if the nodes may have different weights at the moment."""
        return bool(self.exchange.agreed) and not self._in_consensus

    # ---- the step

    def begin_step(self, steps: int) -> None:
        """Prepare the optimizer's step after `steps` steps. All ranks call this together."""
        if self._in_consensus:
            raise TrainingError(
                "step() was called inside optimizer.consensus()", next_step="call step() after the context has ended"
            )
        if self._loaded is not None:
            raise TrainingError(
                "the node's weights were loaded but not restored: the gradients are those of other weights",
                next_step="after the model and the optimizer have loaded their states, call"
                " optimizer.restore_node_weights() on every rank, before the next forward",
            )
        if not self.exchange.agreed and self.world.nodes > 1:
            self.exchange.capture()
            self._note_versions()
        self._warn_of_changes()
        if self._second_moment is not None and self._second_moment.is_due(steps):
            _in_thread(self._second_moment.exchange)

    def corrected(self) -> Any:
        """Return a context for the step of the wrapped optimizer, in which its second moment is corrected."""
        return self._second_moment.corrected() if self._second_moment is not None else nullcontext()

    def end_step(self, steps: int) -> None:
        """Exchange the changes of the weights, if an exchange is due after `steps` steps. All ranks call this
        together."""
        if self.world.nodes == 1:
            return
        node_ranks, ranks = self.node_world.size, self.world.size
        length = sum(4 * parameter.length for parameter in self._parameters if parameter.tensor.grad is not None)
        counted = 2 * (node_ranks - 1) * length // node_ranks  # when the node reduced the gradients
        phases.current.sent(dense=2 * (ranks - 1) * length // ranks - counted)
        if steps % self.guard.period == 0:
            _in_thread(self._measured_exchange if self.guard.is_due(steps) else self.exchange.run)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [parameter.tensor._version for parameter in self._parameters]

    def _warn_of_changes(self) -> None:
        """Warn once, on rank 0, if something else than a step has changed weights since nodes have weights of their
        own. The agreed weights do not have that change yet."""
        if self._has_warned or not self.differ:
            return
        changed = [p.name for p, v in zip(self._parameters, self._versions, strict=True) if p.tensor._version != v]
        if changed:
            self._has_warned = True
            if self.world.rank == 0:
                warn(
                    f"{changed[0]} was changed between two steps. {self.exchange.algorithm.name} sends that as it sends"
                    " the changes of steps, so the agreed weights (checkpoints, optimizer.consensus()) follow later. To"
                    " load other weights, call optimizer.unwrap() on all ranks, load them, and wrap the optimizer again"
                )

    def _measured_exchange(self) -> None:
        squares, weight = Squares(), self.exchange.weights[self.world.node]
        self.exchange.run(squares)
        total = agreement(self.world)([weight * part for part in (squares.change, squares.left, squares.agreed)])
        problem = self.guard.check_drift(*total.tolist())
        if problem and self.world.rank == 0:
            warn(problem)

    def end(self) -> None:
        """Write the weights that all nodes agree on into the parameters, and forget what was not sent. All ranks call
        this together."""
        if self.differ:
            _in_thread(lambda: self.exchange.place(self.exchange.agreed))
            self.exchange.agreed = []

    # ---- equal weights

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which the parameters hold the weights that all nodes agree on. All ranks enter it
        together. When it ends, the node's own weights return, and it raises TrainingError if weights were changed."""
        self._check_restored()
        self._warn_of_changes()
        if not self.differ:
            outer, self._in_consensus = self._in_consensus, True
            try:
                yield
            finally:
                self._in_consensus = outer
            return
        own = [parameter.tensor.detach().clone() for parameter in self._parameters]
        _in_thread(lambda: self.exchange.place(self.exchange.agreed))
        self._in_consensus = True
        versions = [parameter.tensor._version for parameter in self._parameters]
        try:
            yield
        finally:
            changed = [
                p.name for p, version in zip(self._parameters, versions, strict=True) if p.tensor._version != version
            ]
            with torch.no_grad():
                for parameter, weights in zip(self._parameters, own, strict=True):
                    parameter.tensor.copy_(weights)
            self._in_consensus = False
            self._note_versions()
        if changed:
            raise TrainingError(
                f"{changed[0]} was changed inside optimizer.consensus(); the node's own weights are back",
                next_step="evaluate or save in the context; change weights before the first step",
            )

    def _check_restored(self) -> None:
        if self._loaded is not None:
            raise TrainingError(
                "the node's weights were loaded but not restored",
                next_step="call optimizer.restore_node_weights() on every rank, after model and optimizer are loaded",
            )

    def digest(self) -> float:
        """Return a digest of the agreed weights (with one node: of its weights). It is the same on all ranks if all
        nodes have the same agreed weights and the ranks of each node the same weights. A collective of the node."""
        rows = _in_thread(lambda: agreement(self.node_world).gather([self._digest_of_shards(), self._digest_of_own()]))
        shards = rows[: self.world.shards, 0].tolist()
        is_equal = len(set(rows[:, 1].tolist())) == 1
        if self.world.nodes == 1:
            return float(rows[self.world.local_rank, 1])
        return digest(shards if is_equal else (shards, self.world.rank))

    def _digest_of_shards(self) -> float:
        return _digest_of(self.exchange.agreed)

    def _digest_of_own(self) -> float:
        return _digest_of([parameter.tensor.detach().contiguous().numpy() for parameter in self._parameters])

    # ---- state

    @property
    def copies(self) -> int:
        """The number of nodes."""
        return self.world.nodes

    @property
    def copy(self) -> int:
        """The number of this rank's node."""
        return self.world.node

    def save(self) -> dict[str, Any]:
        """Return this rank's part of the node's state, keyed by parameter name: what was not sent, under "NAME", and
        the node's optimizer state, under "NAME KEY". "owners" holds, by name, what this node owes as the owner of
        segments: a part of the mean of all nodes. "weight" is the node's share of the ranks, and "differ" is True if
        nodes have different weights."""
        pieces: Pieces = {}  # none before the first step
        owners: Pieces = {}
        for chunk, agreed in zip(self.exchange.chunks, self.exchange.agreed, strict=False):
            for piece in chunk.pieces:
                own = piece.of(piece.parameter.tensor).numpy()
                pieces[piece.parameter.name] = _difference(piece, own, agreed[piece.place])
                if self.exchange.outer is not None:
                    name, entries = self.exchange.outer.save(chunk, piece)
                    pieces[name] = entries
                for key, values in self._state_of(piece.parameter):
                    pieces[f"{piece.parameter.name} {key}"] = [(piece.begin, piece.of(values).clone())]
            if (stage := self.exchange.stages[chunk.number]) is not None:
                for name, entry in _owed_pieces(chunk, stage):
                    owners[name] = [entry]
        differ = bool(self.exchange.agreed)  # also on a rank without a shard, which has no pieces
        weight = self.exchange.weights[self.world.node]
        state = {"pieces": pieces, "weight": weight, "differ": differ, "owners": owners, "guard": self.guard.save()}
        if self._second_moment is not None and differ:
            state["second_moment"] = self._second_moment.save()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Note the state that `save` returned, or its redistribution (checkpoint/residual_shares.py), for `restore`."""
        self.exchange.agreed = []
        is_of_nodes = state.get("differ", False) or ("mass" in state and state["pieces"])
        self._loaded = dict(state) if is_of_nodes else None
        self.guard.load(state.get("guard"))
        if self._second_moment is not None:
            self._second_moment.load(state.get("second_moment"))

    def restore(self) -> None:
        """Take the current weights as those that all nodes agree on, and restore the node's own weights and optimizer
        state. All ranks call this together, after the model and the optimizer have loaded their states. Does nothing if
        nothing was loaded."""
        if self._loaded is None:
            return
        state, self._loaded = self._loaded, None
        self.exchange.capture()
        _in_thread(lambda: self._restore(state))
        self._note_versions()
        if self.world.nodes == 1:
            self.exchange.agreed = []

    @torch.no_grad()
    def _restore(self, state: Mapping[str, Any]) -> None:
        pieces = state["pieces"]
        own = []
        for chunk, agreed in zip(self.exchange.chunks, self.exchange.agreed, strict=True):
            shard = agreed.copy()
            self._restore_owed(state, chunk, shard)
            for piece in chunk.pieces:
                entries = pieces.get(piece.parameter.name, [])
                if "mass" in state:  # of another world: all that was not sent stays the same
                    change = np.zeros_like(shard[piece.place])
                    _add(change, piece, entries)
                    shard[piece.place] += change / np.float32(self.exchange.weights[self.world.node])
                else:
                    _add(shard[piece.place], piece, entries)
            own.append(shard)
            self._restore_outer(state, chunk)
        self.exchange.place(own)
        self._restore_optimizer(pieces, float(state.get("mass", 1.0)))

    def _restore_owed(self, state: Mapping[str, Any], chunk: Chunk, own: Array) -> None:
        """Restore what owners of segments owe in a chunk. With other segments than before, all nodes add up what was
        owed; without segments, every node adds the sum to its own weights, so the mean over nodes owes the same."""
        stage, owners = self.exchange.stages[chunk.number], state.get("owners", {})
        owed = np.zeros_like(own)
        for piece in chunk.pieces:
            _add(owed[piece.place], piece, owners.get(piece.parameter.name, []))
        if "mass" in state:
            self.exchange.sum_over_nodes(owed)
        if stage is not None:
            stage.owed[:] = owed[stage.segment]
        else:
            own += owed

    def _restore_outer(self, state: Mapping[str, Any], chunk: Chunk) -> None:
        """Restore the outer momentum of a chunk. In another world, the nodes add up their weighted parts: the sum has
        the same bits on all nodes."""
        if self.exchange.outer is None:
            return
        values = self.exchange.outer.values[chunk.number]
        for piece in chunk.pieces:
            _add(values[piece.place], piece, state["pieces"].get(f"{piece.parameter.name} {KEY}", []))
        if "mass" in state:
            self.exchange.sum_over_nodes(values)

    def _restore_optimizer(self, pieces: Mapping[str, Any], mass: float) -> None:
        keys = sorted({key for p in self._parameters for key, _ in self._state_of(p)})
        for key in keys:
            for chunk in self.exchange.chunks:
                shard = np.zeros(chunk.last - chunk.first, np.float32)
                for piece in chunk.pieces:
                    _add(shard[piece.place], piece, pieces.get(f"{piece.parameter.name} {key}", []))
                if mass != 1:
                    shard /= np.float32(mass)
                values = torch.from_numpy(self.exchange.gather(chunk, shard))
                for parameter, start in zip(chunk.parameters, chunk.starts, strict=True):
                    for its_key, tensor in self._state_of(parameter):
                        if its_key == key:
                            tensor.copy_(values[start : start + parameter.length].view(tensor.shape))

    def _state_of(self, parameter: Parameter) -> list[tuple[str, torch.Tensor]]:
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


class NodeWeightsCheck(WeightsCheck):
    """The comparison of the weights that all nodes agree on, in place of the weights of all ranks."""

    def __init__(self, node_weights: NodeWeights, mode: str, every: int) -> None:
        super().__init__([], mode, every)
        self._node_weights = node_weights

    def digest(self) -> float:
        return self._node_weights.digest()

    def describe_difference(self, agreement: Agreement, digest: float, first: bool) -> str:
        ranks = differing_ranks(agreement.gather([digest])[:, 0])
        self.differing = len(ranks)
        start = "ranks start from different weights" if first else "weights differ"
        return f"{start}: {names_of(ranks)} have other weights than their node, or agree on other weights"


def check_parameters(parameters: list[Parameter], algorithm: str) -> None:
    """Raise ArgumentError for parameters that cannot be exchanged in this way."""
    for parameter in parameters:
        tensor: Any = parameter.tensor
        problem = (
            "is a DTensor"
            if is_sharded(tensor)
            else f"is on {tensor.device}"
            if tensor.device.type != "cpu"
            else f"has dtype {tensor.dtype}"
            if tensor.dtype != torch.float32
            else f"has gradients of {parameter.gradient_dtype}"
            if parameter.gradient_dtype != torch.float32
            else ""
        )
        if problem:
            raise ArgumentError(
                f"{algorithm} does not support this model: parameter {parameter.name} {problem}",
                cause=f"{algorithm} exchanges weights that are float32 tensors in host memory",
                next_step="choose another algorithm, such as dense",
            )


def refuse_if_nodes_differ(tensors: list[torch.Tensor]) -> None:
    """Raise TrainingError if one of `tensors` is a weight that differs between nodes on purpose."""
    places = {tensor.data_ptr() for tensor in tensors}
    for node_weights in list(_all):
        for parameter in node_weights._parameters:
            if node_weights.differ and parameter.tensor.data_ptr() in places:
                raise TrainingError(
                    f"{parameter.name} cannot be broadcast: every node trains weights of its own",
                    cause="the optimizer has made a step with error feedback in the weights",
                    next_step="call topkube.broadcast_parameters before the first step",
                )


def _in_thread(work: Callable[[], T]) -> T:
    """Run a collective in the communication thread, in order with the exchanges of gradients."""
    return schedule().submit(work).result()


def _digest_of(arrays: list[Array]) -> float:
    total = xxhash.xxh3_64()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return float(total.intdigest() >> 11)


def _difference(piece: Piece, own: Array, agreed: Array) -> list[tuple[int, torch.Tensor]]:
    """Return own - agreed as pieces that give `own` bit for bit when they are added to `agreed` in their order. One
    difference is not always enough, because it is rounded."""
    entries = []
    reached = agreed
    for _ in range(2):
        difference = own - reached
        reached = reached + difference
        entries.append((piece.begin, torch.from_numpy(difference)))
        if (reached == own).all():
            break
    return entries


def _owed_pieces(chunk: Chunk, stage: TwoStage) -> Iterator[tuple[str, tuple[int, torch.Tensor]]]:
    """Yield the parts of parameters in the own segment: (name, (first element in the parameter, what is owed))."""
    for piece in chunk.pieces:
        low, high = max(piece.place.start, stage.segment.start), min(piece.place.stop, stage.segment.stop)
        if low < high:
            values = stage.owed[low - stage.segment.start : high - stage.segment.start]
            yield piece.parameter.name, (piece.begin + low - piece.at, torch.from_numpy(values.copy()))


def _add(target: Array, piece: Piece, entries: list[tuple[int, torch.Tensor]]) -> None:
    """Add the part of each entry that lies in the piece to `target`, in the order of the entries."""
    for first, values in entries:
        low, high = max(piece.begin, first), min(piece.end, first + values.numel())
        if low < high:
            target[low - piece.begin : high - piece.begin] += values[low - first : high - first].numpy()
