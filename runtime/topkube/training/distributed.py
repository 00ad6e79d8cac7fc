"""DistributedOptimizer: a wrapper of any torch optimizer. When `backward()` returns, gradients are aggregated over all
ranks (`exchange/backward.py`). `optimizer_parts.py` builds its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from topkube.algorithms import Stage
from topkube.errors import ArgumentError, TrainingError
from topkube.settings import Settings
from topkube.training.batches.samples import Samples
from topkube.training.batches.uneven_batches import UnevenBatches
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.tuning.tuning import Tuning
from topkube.training.gradient_clipping import clip_gradients
from topkube.training.node_weights.guard import DriftGuard
from topkube.training.optimizer_parts import OptimizerParts, build_parts, follow_choice, follow_state, share_norms
from topkube.training.optimizer_state import OptimizerState
from topkube.training.optimizer_step import OptimizerStep
from topkube.training.optimizers.parameters import name_group, name_parameters
from topkube.training.optimizers.wrapper import OptimizerWrapper
from topkube.training.reporting.norms import Norms
from topkube.world import World, current


class DistributedOptimizer(OptimizerWrapper):
    """A distributed optimizer around `optimizer`. Use it in place of `optimizer`, also with LR schedulers and
    GradScaler.

    Arguments that are None come from the job's spec.aggregation (`Settings`).

    named_parameters: the names of all parameters of `optimizer`, as `model.named_parameters()` returns them.
    aggregation: "auto", "dense" or the name of an algorithm.
    density: the share of a large tensor that is sent.
    warmup_steps: the steps over which the density falls from 1 to `density`.
    wire: "fp32", "bf16" or "fp16", the format of the values that compressing algorithms send between nodes.
    selection: "topk" or "mstopk".
    momentum_correction: if True and the exchange is sparse, the momentum of SGD, Adam or AdamW is applied before the
    selection (`momentum.py`).
    period: the steps from one exchange of the weights to the next (onebit, topk1bit, localsgd, diloco).
    dense_wire: "fp32", "bf16" or "fp16", the format of dense gradients between nodes.
    outer_learning_rate, outer_momentum: the learning rate and the momentum that apply to the mean change of all nodes
    (diloco).
    matrix_rank: the rank of the approximation of each matrix (powersgd, acpsgd).
    delay: 1 lets the exchange of weights overlap with the next step, which does not use the result of the exchange yet.
    node_weights: "equal", or "own", which lets "auto" take onebit: the script then evaluates and saves the model inside
    `consensus()`.
    overlap: "backward", or "dear", which updates parameters during the next forward (see `finish_step`).
    schedule: the stages of training in their order (`topkube.algorithms.Stage`), each with an algorithm, a density or a
    period of its own.
    bucket_bytes: the most bytes of a fused bucket. By default, the sizes of the tensors and the link decide.
    world: the ranks that exchange, by default all ranks. Pass a part of them (`topkube.new_world`) if another library
    already reduces among the others. Parameters that are DTensors (FSDP2, tensor parallelism) need such a world, of
    ranks that hold the same shard.

    Aggregation comes before the optimizer: momentum and Adam's moments see mean gradients, the same on all ranks, so
    the optimizer's state is the same everywhere. Aggregation needs memory for two shards of float32 (the residual
    and its copy) and a staging bucket. All ranks compare a checksum of the weights at the first step and at intervals
    (TOPKUBE_CHECK_WEIGHTS).

    Raises WorldError before `init()`; ArgumentError for invalid parameters; TrainingError for use that cannot produce
    correct gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        aggregation: str | None = None,
        density: float | None = None,
        warmup_steps: int | None = None,
        wire: str | None = None,
        selection: str | None = None,
        momentum_correction: bool | None = None,
        period: int | None = None,
        dense_wire: str | None = None,
        outer_learning_rate: float | None = None,
        outer_momentum: float | None = None,
        delay: int | None = None,
        matrix_rank: int | None = None,
        overlap: str | None = None,
        node_weights: str | None = None,
        schedule: Sequence[Stage] | None = None,
        bucket_bytes: int | None = None,
        settings: Settings | None = None,
        world: World | None = None,
    ) -> None:
        all_ranks = current()
        if isinstance(optimizer, DistributedOptimizer):
            raise ArgumentError("the optimizer is distributed already", next_step="wrap the plain torch optimizer once")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError(
                "LBFGS evaluates the loss again inside step(), and its line search would differ between ranks",
                next_step="use SGD, AdamW or another optimizer that needs only gradients",
            )
        settings = settings or Settings.from_environment()
        chosen = AggregationSettings.from_settings(
            settings,
            algorithm=aggregation,
            density=density,
            warmup_steps=warmup_steps,
            wire=wire,
            selection=selection,
            momentum_correction=momentum_correction,
            period=period,
            dense_wire=dense_wire,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            delay=delay,
            matrix_rank=matrix_rank,
            overlap=overlap,
            node_weights=node_weights,
            schedule=None if schedule is None else tuple(schedule),
            bucket_bytes=bucket_bytes,
        )
        named = list(named_parameters)
        names = [(p.name, p.tensor) for p in name_parameters(optimizer, named, sharded=world is not None)]
        self._build(optimizer, names, chosen, settings, world or all_ranks)
        self._step.named = named

    def _build(
        self,
        optimizer: torch.optim.Optimizer,
        names: list[tuple[str, torch.nn.Parameter]],
        aggregation: AggregationSettings,
        settings: Settings,
        world: World,
        is_copy: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self.aggregation, self._settings = aggregation, settings
        parts = build_parts(optimizer, names, aggregation, settings, world, is_copy)
        self._step = OptimizerStep(parts)
        self._use(parts)

    def _use(self, parts: OptimizerParts) -> None:
        """Use these parts from now on."""
        self._parts = parts
        self._backward, self._node_weights, self._late = parts.backward, parts.node_weights, parts.late
        self._step.change_parts(parts)
        self._own_state = OptimizerState(parts.inner, parts.aggregation, self._backward, self._node_weights)

    # ---- what the script calls

    @property
    def density(self) -> float:
        """The current density: it falls during warm-up, and is 1 if aggregation is dense."""
        return self._backward.in_force.density

    @property
    def density_used(self) -> float:
        """The density of the last exchange."""
        return self._backward.density_used

    @property
    def steps(self) -> int:
        """The number of updates. Skipped steps do not count and do not advance the warm-up. Waits for the device if it
        decides about the last step."""
        self._backward.gradients.settle()
        return self._backward.in_force.steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps that all ranks skipped because a gradient of some rank was NaN or infinite. Waits for the
        device if it decides about the last step."""
        self._backward.gradients.settle()
        return self._backward.gradients.skipped_steps

    @property
    def counted_skipped_steps(self) -> int:
        """The number of skipped steps, without the last step if the device decides about it. Does not wait."""
        return self._backward.gradients.skipped_steps

    @property
    def differing_ranks(self) -> int:
        """The number of ranks whose weights differed from those of most ranks in the last comparison."""
        return self._backward.weights.check.differing

    @property
    def turns(self) -> UnevenBatches:
        """The batches of all ranks, which `batch` and `join` announce."""
        return self._backward.batches

    @property
    def norms(self) -> Norms | None:
        """Norms of gradient and residual, measured at intervals; None, the default, measures none."""
        return self._backward.gradients.norms

    @norms.setter
    def norms(self, norms: Norms | None) -> None:
        self._backward.gradients.norms = norms

    @property
    def tuning(self) -> Tuning:
        """The algorithm that `auto` or `dense` stands for, and the reasons for it."""
        return self._backward.plan.tuning

    @property
    def guard(self) -> DriftGuard | None:
        """The guard of error feedback in the weights: it measures at intervals what nodes have not sent, and it has the
        period in force. None for other algorithms."""
        return self._node_weights.guard if self._node_weights is not None else None

    @property
    def residual_copy(self) -> tuple[int, int]:
        """The number of the residual copy of which this rank holds a part, and the number of copies in the world."""
        return self._own_state.residual_copy

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state by parameter, after the last step."""
        self.finish_step()
        return self.inner.state

    def finish_step(self) -> None:
        """Finish the last step now. Only needed with `overlap="dear"`, before code reads parameters in a way that torch
        does not see in Python: TorchScript, another thread, a pointer that was taken before. Everything else finishes a
        parameter at its first use: a layer's forward, `state_dict()`, `parameter.data`, a checkpoint."""
        self._backward.finish_late()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which the parameters hold the weights that all nodes agree on: use it to evaluate or save
        the model. All ranks enter it together. Parameters must not change inside, and `step()` raises an error.

        Only an algorithm with error feedback in the weights (such as onebit or localsgd) has such weights: those after
        the last exchange. With other algorithms all ranks have the same weights, and the context does nothing."""
        with self._node_weights.consensus() if self._node_weights is not None else nullcontext():
            yield

    def restore_node_weights(self) -> None:
        """Restore the node's own weights and optimizer state after the model and this optimizer have loaded their
        states. All ranks call this together, before the next forward; `topkube.checkpointing` does it by itself. Does
        nothing for algorithms without error feedback in the weights."""
        if self._node_weights is not None:
            self._node_weights.restore()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before. All ranks call this
        together, between `backward()` and `step()`. With MasterWeights, the gradients of the masters are scaled; with
        GradScaler, call it after `scaler.unscale_(optimizer)`.

        With error feedback in the weights (such as onebit or localsgd), each node has a gradient of its own. The
        norm is then the root of the mean of the squares of the nodes' norms, weighted by ranks: the same on all nodes,
        and at least the norm of the mean gradient. `torch.nn.utils.clip_grad_norm_` would clip each node by its own
        norm."""
        return clip_gradients(self._parts, max_norm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make each backward() inside this context only accumulate; the next backward() outside exchanges the sum.
        Unlike in DDP, only the place of backward() matters, not the place of forward."""
        backward = self._backward
        synchronized_before, backward.synchronizes = backward.synchronizes, False
        try:
            yield
        finally:
            backward.synchronizes = synchronized_before

    def synchronize(self) -> None:
        """Exchange the gradients that no backward() has exchanged: those that a script assigned to `.grad`, or that
        accumulated under `no_sync()`. All ranks call it together, before `step()`."""
        self._backward.finish_late()
        self._backward.synchronize_now()

    @property
    def accumulating(self) -> bool:
        """True if gradients of `no_sync()` wait for an exchange."""
        return self._backward.has_unsynchronized

    @property
    def awaits_step(self) -> bool:
        """True if gradients wait for a step: those of `no_sync()`, or exchanged ones that no step has used and that the
        script has not discarded. Reads gradients."""
        return self.accumulating or any(p.is_exchanged and not p.is_zero for p in self._backward.parameters)

    def batch(self, samples: int) -> int:
        """Announce this rank's next batch: the next gradients count by `samples`. Return the samples of all ranks.

        All ranks call this once per batch. A rank that has no more batches calls it with 0 and continues with any
        batch, whose gradients do not count, until the result is 0.
        """
        return self.turns.batch(samples)

    def join(self, loader: Iterable[Any], samples: Samples = None, device: torch.device | None = None) -> Iterator[Any]:
        """Yield the batches of `loader` and announce each. A rank that has no more batches gets its last batch again,
        with weight zero, until all ranks have finished: the steps equal those of one process with all batches.
        `samples`, a number or a function of the batch, is the number of samples in a batch. Raises TrainingError if
        that number is needed and not certain. With `device`, a GPU, the tensors of the next batch are copied there
        while it computes the current step."""
        return self.turns.iterate(loader, samples=samples, device=device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the wrapped optimizer's step; do nothing if all ranks agreed that a gradient is not finite.

        Raises TrainingError for gradients that were not exchanged, and for parameters that were added to the wrapped
        optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step.make()
        self.turns.note_step()
        if (parts := follow_choice(self._parts, self._settings)) is not self._parts:
            self._use(parts)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. If no step used them, the residuals of their exchange are undone."""
        self._backward.queue.wait_for_handed_over()
        if not (set_to_none and self._late is not None and self._late.zero_gradients()):
            self._backward.finish_late()
            self.inner.zero_grad(set_to_none)
        self._backward.forget_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their names: `{"params": list(layer.named_parameters("layer")), "lr": 0.1}`. All ranks
        call it before the same step. Raises ArgumentError for parameters without names."""
        if self._node_weights is not None:
            raise TrainingError(
                f"parameters cannot be added with {self._parts.aggregation.algorithm}: nodes already have different"
                " weights",
                next_step="give the optimizer all parameters when you create it, or choose another algorithm",
            )
        self._backward.finish_late()
        group, parameters = name_group(param_group, self._backward.parameters)
        if self._parts.correction is not None:
            self._parts.correction.check([*self.inner.param_groups, {**self.inner.defaults, **group}])
        if not any("param_names" in existing for existing in self.inner.param_groups):
            del group["param_names"]
        self.inner.add_param_group(group)
        self._backward.add(parameters)
        self._step.note_parameters()

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer and exchange no more gradients. The model can then be wrapped again. With error
        feedback in the weights, all ranks call this together; the parameters then hold the weights that all nodes agree
        on."""
        if self._node_weights is not None:
            self._node_weights.end()
        if self._late is not None:
            self._late.end()
        self._backward.end()
        self.tuning.leave()
        self._parts.guard.remove()
        share_norms(self.inner, None)
        return self.inner

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and under "topkube" the state of this rank: its residuals by
        parameter name, the order of the buckets, steps (the position in the warm-up) and skipped steps. Every rank must
        save its own state.
        """
        self._backward.finish_late()
        self._backward.gradients.settle()
        return self._own_state.save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, or the state of a plain optimizer (residuals are then zero). For a
        changed number of ranks see `topkube.checkpointing`.

        From a state that another rank saved, the residuals are not loaded, with a warning if there are any. Residuals
        are gradients that were not sent yet, and every rank must load its own.
        """
        self._prepare_load(state_dict)
        self._own_state.load(state_dict)

    def _prepare_load(self, state_dict: dict[str, Any]) -> None:
        """Finish the last step, and use parts of the kind that saved the state."""
        self._backward.finish_late()
        self._backward.gradients.settle()
        parts = follow_state(self._parts, state_dict.get("topkube", {}), self._settings)
        if parts is not self._parts:
            self._use(parts)

    def shared_state(self) -> dict[str, Any]:
        """Return the state that `topkube.broadcast_optimizer_state` copies to all ranks: everything but residuals."""
        self._backward.finish_late()
        self._backward.gradients.settle()
        return self._own_state.save_shared()

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Load a state that `shared_state` returned on another rank. Residuals stay as they are."""
        self._prepare_load(state)
        self._own_state.load_shared(state)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters, the wrapped optimizer, the settings and this rank's state, for pickle and deepcopy.
        The copy exchanges through the world of the process that loads it."""
        if self._backward.world is not current():
            raise TrainingError(
                "an optimizer with its own world= cannot be copied",
                next_step="save optimizer.state_dict() and create a new optimizer",
            )
        if self._node_weights is not None:
            raise TrainingError(
                f"an optimizer with {self._parts.aggregation.algorithm} cannot be copied: its node has weights of its"
                " own",
                next_step="save optimizer.state_dict() of every rank and create a new optimizer",
            )
        names = [(p.name, p.tensor) for p in self._backward.parameters]
        own = self.state_dict()["topkube"]
        return {"inner": self.inner, "names": names, "aggregation": self.aggregation, "own": own,
                "settings": self._settings}  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, aggregation = state["names"], state["aggregation"]
        self._build(state["inner"], names, aggregation, state["settings"], current(), is_copy=True)
        self._own_state.load_copy(state["own"])

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, {self.aggregation})"
