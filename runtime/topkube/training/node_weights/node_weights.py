"""The weights of a node and the weights that all nodes agree on: during steps and during evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from topkube.algorithms import find_algorithm
from topkube.errors import TrainingError
from topkube.telemetry import phases
from topkube.telemetry.trace import DELAYED_THREAD
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.reduction.devices import find_exchange_device
from topkube.training.node_weights.averaging import average_nodes
from topkube.training.node_weights.exchange import WeightExchange
from topkube.training.node_weights.gradient_noise import GradientNoise, NoiseCorrection
from topkube.training.node_weights.guard import DriftGuard, Squares
from topkube.training.node_weights.node_state import NodeWeightsState
from topkube.training.node_weights.requirements import check_parameters
from topkube.training.node_weights.trained_weights import Masters, TrainedWeights
from topkube.training.node_weights.worlds import find_delayed_world, find_node_world
from topkube.training.ranks import communication_thread
from topkube.training.ranks.agreement import open_agreement
from topkube.training.reporting.warning import warn
from topkube.world import World

_all: weakref.WeakSet[NodeWeights] = weakref.WeakSet()
"""All NodeWeights of this process."""


class NodeWeights:
    """The weights of the nodes of `world` under error feedback in the weights (exchange.py). `state` saves and loads
    them.

    The parameters hold the node's own weights while the script trains. Inside `consensus()` they hold the weights
    that all nodes agree on. With one node there is nothing to exchange, and both are the same. `masters` holds the
    float32 masters of 16-bit parameters, if the optimizer has them. `correction` corrects the steps of the optimizer
    for the noise of the node's gradient; None if they need no correction. Raises ArgumentError for parameters that
    cannot be exchanged in this way.
    """

    def __init__(
        self,
        world: World,
        parameters: list[Parameter],
        aggregation: AggregationSettings,
        optimizer: torch.optim.Optimizer,
        masters: Masters | None = None,
        correction: NoiseCorrection | None = None,
    ) -> None:
        algorithm = find_algorithm(aggregation.algorithm)
        self.trained = TrainedWeights(parameters, masters)
        check_parameters(self.trained, algorithm.name)
        self.world, self.node_world = world, find_node_world(world)
        self._is_delayed = aggregation.delay > 0 and world.nodes > 1
        delayed_world = find_delayed_world(world) if self._is_delayed else None
        device = find_exchange_device(self.trained.parameters)
        self.exchange = WeightExchange(world, self.trained.parameters, aggregation, delayed_world, device)
        self._run = self.exchange.device.run
        self._correction = correction
        self.guard = DriftGuard(aggregation.period, algorithm.name)
        self._noise = (
            GradientNoise(world, self.trained.parameters, self.exchange.weights, self.exchange.device)
            if world.nodes > 1 and algorithm.corrects_second_moment and correction is not None
            else None
        )
        self.state = NodeWeightsState(self.exchange, self.trained.parameters, optimizer, self.guard, self._noise)
        self._in_consensus = False
        self._has_warned = False
        _all.add(self)

    @property
    def differ(self) -> bool:
        """True if the nodes may have different weights at the moment."""
        return self.exchange.has_agreed and not self._in_consensus

    # ---- the step

    def begin_step(self, steps: int) -> None:
        """Prepare the optimizer's step after `steps` steps: `apply_exchange` was called. All ranks call this
        together."""
        if self.state.is_loaded:
            raise TrainingError(
                "the node's weights were loaded but not restored: the gradients are those of other weights",
                next_step="after the model and the optimizer have loaded their states, call"
                " optimizer.restore_node_weights() on every rank, before the next forward",
            )
        self._warn_of_changes()
        if not self.exchange.has_agreed and self.world.nodes > 1:
            self.trained.take_changes()  # later the masters take them in their step
            self.exchange.capture()
            self.trained.note_versions()
        self.trained.list_gradients()  # the estimate and the correction read those of the masters
        if self._noise is not None and self._noise.is_due(steps):
            self._run(self._noise.exchange)

    def corrected(self) -> Any:
        """Return a context for the step of the wrapped optimizer, which corrects the step for the noise of the node's
        gradient."""
        if self._correction is None:
            return nullcontext()
        return self._correction.corrected(self._noise.list_ratios() if self._noise is not None else {})

    def end_step(self, steps: int) -> None:
        """Exchange the changes of the weights, if an exchange is due after `steps` steps. All ranks call this
        together."""
        if self.world.nodes == 1:
            return
        # Count the bytes that a dense exchange among all ranks would have sent, less the bytes that were counted when
        # the node reduced its gradients.
        node_ranks, ranks = self.node_world.size, self.world.size
        length = sum(4 * parameter.length for parameter in self.trained.of_model if parameter.tensor.grad is not None)
        counted = 2 * (node_ranks - 1) * length // node_ranks
        phases.current.sent(dense=2 * (ranks - 1) * length // ranks - counted)
        self.trained.note_versions()
        if steps % self.guard.period:
            return
        squares = Squares() if self.guard.is_due(steps) else None
        if self._is_delayed:
            self.exchange.keep_changes(squares)
            thread = communication_thread.open_thread(DELAYED_THREAD)
            self.exchange.note_delayed(thread.submit(partial(self._run_exchange, squares, is_delayed=True)))
        else:
            self._run(partial(self._run_exchange, squares))
            self.trained.write()

    def apply_exchange(self) -> None:
        """Wait for a delayed exchange, and add its result to the parameters. Does nothing if there is none. All ranks
        call this together. Raises TrainingError inside `consensus`."""
        self._refuse_in_consensus("step()")
        if not self.exchange.wait_for_delayed():
            return
        self._warn_of_changes()
        self.trained.take_changes()
        self._run(self.exchange.apply)
        self.exchange.forget_delayed()
        self.trained.write()

    def _warn_of_changes(self) -> None:
        """Warn once, on rank 0, if something other than a step has changed weights since nodes have weights of their
        own. The agreed weights do not contain that change yet."""
        if self._has_warned or not self.differ:
            return
        if changed := self.trained.find_changed():
            self._has_warned = True
            if self.world.rank == 0:
                warn(
                    f"{changed} was changed between two steps. {self.exchange.algorithm.name} sends that as it sends"
                    " the changes of steps, so the agreed weights (checkpoints, optimizer.consensus()) follow later. To"
                    " load other weights, call optimizer.unwrap() on all ranks, load them, and wrap the optimizer again"
                )

    def _run_exchange(self, squares: Squares | None, is_delayed: bool = False) -> None:
        """Exchange the changes of the weights. If `squares` is passed, pass what is measured to the guard. Rank 0
        prints its warning."""
        self.exchange.run(squares, is_delayed)
        if squares is None:
            return
        world = self.exchange.delayed_world if is_delayed else self.world
        weight = self.exchange.weights[self.world.node]
        total = open_agreement(world).sum([weight * part for part in (squares.change, squares.unsent, squares.agreed)])
        problem = self.guard.check_drift(*total.tolist())
        if problem and self.world.rank == 0:
            warn(problem)

    def end(self) -> None:
        """Write the weights that all nodes agree on into the parameters, and forget what was not sent. All ranks call
        this together."""
        self._refuse_in_consensus("unwrap()")
        self.exchange.wait_for_delayed()
        self.exchange.forget_delayed()
        if self.differ:
            self._run(lambda: self.exchange.place(self.exchange.agreed))
            self.trained.write()
            self.exchange.agreed = []

    def average(self) -> None:
        """Write the mean of the nodes' weights into the parameters of all nodes. The optimizer's state becomes its mean
        over the nodes. Nodes have equal weights then. All ranks call this together."""
        self.apply_exchange()
        if self.differ:
            self._run(partial(average_nodes, self.exchange, self.state))
            self.trained.write()
            self.exchange.agreed = []

    # ---- equal weights

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which the parameters hold the weights that all nodes agree on. All ranks enter it
        together. At its end, the parameters hold the node's own weights again. Raises TrainingError at its end if
        weights were changed inside."""
        self._check_restored()
        self.exchange.wait_for_delayed()
        self._warn_of_changes()
        if not self.differ:
            was_in_consensus, self._in_consensus = self._in_consensus, True
            try:
                yield
            finally:
                self._in_consensus = was_in_consensus
            return
        self.trained.take_changes()
        own = {parameter.name: parameter.tensor.detach().clone() for parameter in self.trained.parameters}
        self._run(lambda: self.exchange.place(self.exchange.agreed))
        self.trained.write()
        self._in_consensus, self.state.own_weights = True, own
        versions = self.trained.list_versions()
        try:
            yield
        finally:
            changed = self.trained.list_changed(versions)
            with torch.no_grad():
                for parameter in self.trained.parameters:
                    parameter.tensor.copy_(own[parameter.name])
            self._in_consensus, self.state.own_weights = False, {}
            self.trained.write()
        if changed:
            raise TrainingError(
                f"{changed[0]} was changed inside optimizer.consensus(); the node's own weights are back",
                next_step="evaluate or save in the context; change weights before the first step",
            )

    def restore(self) -> None:
        """Restore the node's own weights and optimizer state, if a state was loaded. All ranks call this together,
        after the model and the optimizer have loaded their states."""
        if self.state.is_loaded:
            self.trained.take_changes()
            self.state.restore()
            self.trained.write()

    def refuse_own_masters(self) -> None:
        """Raise TrainingError if a state dict would hold masters that are those of this node."""
        if self.differ and self.trained.has_masters:
            raise TrainingError(
                "state_dict() was called outside optimizer.consensus(): the masters are those of this node",
                cause="a saved state holds the masters that all nodes agree on, and with them what each node has not"
                " sent",
                next_step="call model.state_dict() and optimizer.state_dict() inside optimizer.consensus()",
            )

    def _refuse_in_consensus(self, call: str) -> None:
        if self._in_consensus:
            raise TrainingError(
                f"{call} was called inside optimizer.consensus()", next_step=f"call {call} after the context has ended"
            )

    def _check_restored(self) -> None:
        if self.state.is_loaded:
            raise TrainingError(
                "the node's weights were loaded but not restored",
                next_step="call optimizer.restore_node_weights() on every rank, after model and optimizer are loaded",
            )


def refuse_if_nodes_differ(tensors: list[torch.Tensor]) -> None:
    """Raise TrainingError if one of `tensors` is a weight that differs between nodes on purpose."""
    for node_weights in list(_all):
        if node_weights.differ and (name := node_weights.trained.find_shared(tensors)):
            raise TrainingError(
                f"{name} cannot be broadcast: every node trains weights of its own",
                cause="the optimizer has made a step with error feedback in the weights",
                next_step="call topkube.broadcast_parameters before the first step",
            )
