"""The step of a DistributedOptimizer: the wrapped optimizer's step, with what all ranks do before and after it."""

from __future__ import annotations

import time

import torch

from topkube.errors import TrainingError
from topkube.telemetry import phases
from topkube.training.exchange.autograd.gradient_hooks import is_owned
from topkube.training.optimizer_parts import OptimizerParts
from topkube.training.optimizers.wrapper import exchanged_parameters
from topkube.training.reporting.steps import StepReporter
from topkube.training.reporting.warning import warn


class OptimizerStep:
    """The steps of one optimizer. A step counts on all ranks or on none: all skip it if a gradient of some rank is not
    finite."""

    def __init__(self, parts: OptimizerParts) -> None:
        self._parts = parts
        self.named: list[tuple[str, torch.nn.Parameter]] = []
        """The parameters that the script has named; empty after the first step."""
        self._reports = StepReporter(parts.backward.world)
        self._exchanged_ids: list[int] = []
        """The ids of the parameters whose gradients are exchanged."""
        self.note_parameters()

    def change_parts(self, parts: OptimizerParts) -> None:
        """Make the next steps with other parts of the same optimizer."""
        self._parts = parts

    def note_parameters(self) -> None:
        """Note that the gradients of all parameters of the wrapped optimizer are exchanged."""
        self._exchanged_ids = _list_ids(self._parts.inner)

    def make(self) -> None:
        """Make the step, or skip it on all ranks. Raises TrainingError for gradients that were not exchanged, and for
        parameters that were added to the wrapped optimizer."""
        start, updating_before = time.perf_counter(), phases.current.total("update")
        self._check_gradients()
        self._warn_of_parameters_without_exchange()
        backward = self._parts.backward
        if backward.gradients.decide_step():
            self._update_parameters()
        else:
            backward.note_skipped_step()
        # If nodes exchange weights, most of the step is outside that of the wrapped optimizer.
        phases.current.add_span("update", start, time.perf_counter(), updating_before)
        counted = backward.in_force.steps, backward.gradients.skipped_steps
        self._reports.report_step(*counted, backward.density_used, backward.plan.tuning.summary or None)
        self._end_traced_step()

    def _end_traced_step(self) -> None:
        """Note the end of the step in the trace, if this step is traced."""
        backward = self._parts.backward
        if backward.queue.step_trace is None:
            return
        machines = backward.plan.tuning.machines
        if not backward.queue.step_trace.end_step(machines.latency if machines is not None else None):
            backward.queue.step_trace = None

    def _check_gradients(self) -> None:
        """Raise TrainingError if the gradients of some parameters were not exchanged."""
        if self._parts.backward.has_unsynchronized:
            raise TrainingError(
                "step() follows a backward() under no_sync(): the ranks would make different steps",
                next_step="run the last backward() before step() outside no_sync(), or call optimizer.synchronize()",
            )
        if _list_ids(self._parts.inner) != self._exchanged_ids:
            raise TrainingError(
                "the wrapped optimizer has other parameters than it had when it was wrapped",
                cause="add_param_group was called on the torch optimizer, or a parameter was replaced in its groups:"
                " gradients of the new parameters are not exchanged",
                next_step="call optimizer.add_param_group on the distributed optimizer, with named parameters; after"
                " parameters were replaced, call optimizer.unwrap() and wrap it again",
            )

    def _warn_of_parameters_without_exchange(self) -> None:
        """Warn on rank 0, at the first step, if a parameter that the script has named has a gradient that no optimizer
        of this process exchanges: something that reads the gradients of the whole model then differs between ranks."""
        named, self.named = self.named, []
        world = self._parts.backward.world
        if world.size == 1 or world.rank:
            return
        names = [name for name, p in named if p.requires_grad and p.grad is not None and not is_owned(p)]
        if names:
            named_parameters = f"{names[0]} and {len(names) - 1} more parameters" if len(names) > 1 else names[0]
            warn(
                f"no DistributedOptimizer exchanges the gradients of {named_parameters}: each rank keeps its own."
                " torch.nn.utils.clip_grad_norm_(model.parameters()) reads them, so it clips each rank differently, and"
                " the weights of ranks become different. Next: clip with optimizer.clip_grad_norm_; or freeze these"
                " parameters with requires_grad_(False), or give them to the optimizer."
            )

    def _update_parameters(self) -> None:
        """Update the parameters, and exchange the changes of weights if nodes have weights of their own."""
        parts, backward, node_weights = self._parts, self._parts.backward, self._parts.node_weights
        backward.check_exchanged()
        if node_weights is not None:
            node_weights.apply_exchange()
            node_weights.guard.set_period(parts.aggregation.settings_at(backward.in_force.steps).period)
            node_weights.begin_step(backward.in_force.steps)
        backward.weights.compare_first()
        with parts.guard.allow_step(), phases.current.timed("update"):
            if node_weights is not None:
                with node_weights.corrected():
                    parts.inner.step()
            elif parts.correction is not None:
                parts.correction.step(backward.list_sparse_parameters())
            elif parts.late is None:
                with backward.gradients.decisions.passing_flag():
                    parts.inner.step()
        if parts.late is not None:
            parts.late.step()
        if node_weights is not None:
            node_weights.end_step(backward.in_force.steps + 1)
        backward.note_step()


def _list_ids(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(tensor) for tensor in exchanged_parameters(optimizer)]
