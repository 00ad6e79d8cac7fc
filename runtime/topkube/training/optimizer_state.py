"""The state of a DistributedOptimizer: what a rank saves and loads, and what all ranks share."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from topkube.errors import TrainingError
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.backward import Backward
from topkube.training.exchange.reduction.residuals import list_foreign
from topkube.training.node_weights.node_weights import NodeWeights


class OptimizerState:
    """The state of the wrapped optimizer `inner`, of the exchange during backward, and of `node_weights` (None for
    algorithms without error feedback in the weights).

    States are dictionaries: the state of `inner`, and under "topkube" the state of the exchange.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        aggregation: AggregationSettings,
        backward: Backward,
        node_weights: NodeWeights | None,
    ) -> None:
        self._inner, self._aggregation, self._backward, self._node_weights = inner, aggregation, backward, node_weights

    @property
    def residual_copy(self) -> tuple[int, int]:
        """The number of the residual copy of which this rank holds a part, and the number of copies in the world."""
        residuals = self._node_weights.state if self._node_weights is not None else self._backward.exchange.residuals
        return residuals.copy, residuals.copies

    def save(self) -> dict[str, Any]:
        """Return the whole state of this rank, with its residuals by parameter name. Raises TrainingError if it would
        hold master weights that differ between nodes."""
        if self._node_weights is not None:
            self._node_weights.refuse_own_masters()
        backward = self._backward
        backward.plan.tuning.is_saved |= backward.plan.tuning.machines is not None  # otherwise nothing was chosen yet
        shared = self._save_exchange()
        copy, copies = self.residual_copy
        residuals: dict[str, Any] = {
            "copy": copy,
            "copies": copies,
            "rank": backward.world.rank,
            "ranks": backward.world.size,
            "pieces": backward.exchange.residuals.save(),
            "whole": backward.exchange.residuals.list_whole(),
        }
        if self._node_weights is not None:
            residuals |= self._node_weights.state.save()
        return {**self._inner.state_dict(), "topkube": {**shared, "residuals": residuals}}

    def load(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `save` returned, or the state of a plain optimizer (residuals are then zero). Warns if the
        residuals are another rank's, and does not load them. Raises TrainingError if another kind of algorithm
        left them."""
        state = dict(state_dict)
        own = state.pop("topkube", {})
        self._inner.load_state_dict(state)
        backward = self._backward
        self._load_counters(own)
        residuals = own.get("residuals", {})
        pieces, rank = residuals.get("pieces", {}), residuals.get("rank", backward.world.rank)
        if rank != backward.world.rank and pieces:
            warnings.warn(
                f"rank {backward.world.rank} loads the optimizer state of rank {rank}: residuals of"
                f" {residuals['ranks'] - 1} of {residuals['ranks']} ranks are lost, and with them gradients that were"
                " not sent yet. Save and load the state_dict() of every rank, or use topkube.checkpointing",
                stacklevel=3,  # the caller of DistributedOptimizer.load_state_dict
            )
            pieces, residuals = {}, {}
        foreign = list_foreign(pieces, (parameter.name for parameter in backward.parameters))
        if foreign and self._node_weights is None:
            warnings.warn(
                f"the optimizer state holds parts of gradients that were not sent yet, of {len(foreign)} parameters"
                f" that this optimizer does not have, such as {foreign[0]}: they are lost. Pass the names to"
                " DistributedOptimizer that the parameters had when the state was saved (with or without 'module.')",
                stacklevel=3,
            )
        self._load_residuals(residuals, pieces)
        backward.plan.restore(own)

    def _load_residuals(self, saved: dict[str, Any], pieces: dict[str, Any]) -> None:
        is_of_weights = bool({"weight", "mass"} & saved.keys())  # only error feedback in the weights saves these keys
        if (pieces or saved.get("differ")) and is_of_weights != self._aggregation.in_weights:
            raise TrainingError(
                "the state holds what another kind of algorithm has not sent yet: a part of the "
                + ("weights" if is_of_weights else "gradients"),
                cause="the state was saved with another algorithm",
                next_step="use the algorithm that saved the state, or load only the model's weights",
            )
        if self._node_weights is not None:
            self._node_weights.guard.set_period(self._aggregation.settings_at(self._backward.in_force.steps).period)
            self._node_weights.state.load({**saved, "pieces": pieces})
        elif not is_of_weights:
            self._backward.exchange.residuals.load(pieces, saved.get("whole", ()))

    def save_shared(self) -> dict[str, Any]:
        """Return the state without the residuals."""
        return {**self._inner.state_dict(), "topkube": self._save_exchange()}

    def load_shared(self, state: dict[str, Any]) -> None:
        """Load a state that `save_shared` returned on another rank. Residuals stay as they are. Raises TrainingError if
        nodes have different weights already."""
        if self._node_weights is not None and self._node_weights.differ:
            raise TrainingError(
                "the optimizer's state cannot be broadcast: every node has its own",
                next_step="call topkube.broadcast_optimizer_state before the first step",
            )
        state = dict(state)
        own, backward = state.pop("topkube"), self._backward
        self._inner.load_state_dict(state)
        self._load_counters(own)
        residuals = backward.exchange.residuals
        pieces, whole = residuals.save(), residuals.list_whole()
        backward.plan.restore(own)
        residuals.load(pieces, whole)

    def load_copy(self, own: dict[str, Any]) -> None:
        """Load what `save` returned under "topkube" into a copy of the optimizer. A copy has its own wrapped optimizer
        already, with its state."""
        backward = self._backward
        self._load_counters(own)
        residuals = own["residuals"]
        backward.exchange.residuals.load(residuals["pieces"], residuals.get("whole", ()))
        backward.plan.restore(own)

    def _load_counters(self, own: dict[str, Any]) -> None:
        backward = self._backward
        backward.in_force.steps, backward.gradients.skipped_steps = own.get("steps", 0), own.get("skipped_steps", 0)
        backward.exchange.algorithms.drained_steps = own.get("drained_steps", 0)

    def _save_exchange(self) -> dict[str, Any]:
        """Return the order of the buckets, steps (the position in the warm-up), skipped steps, and the number of steps
        that still send whole residuals."""
        backward = self._backward
        return {
            **backward.plan.save(),
            "steps": backward.in_force.steps,
            "skipped_steps": backward.gradients.skipped_steps,
            "drained_steps": backward.exchange.algorithms.drained_steps,
        }
