"""The exchange of an optimizer's gradients during `backward()`.

Hooks see each gradient when it is ready. When all gradients of a bucket are ready, the communication thread exchanges
the bucket while backward continues. At the end of backward the remaining buckets follow, and all ranks agree if the
gradients are finite. Changes of residuals become final when the optimizer steps, and are undone if the gradients are
discarded.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from topkube.errors import TrainingError
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.training.batches.uneven_batches import UnevenBatches
from topkube.training.exchange.accumulation import Accumulation
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.autograd.backward_pass import current_pass
from topkube.training.exchange.autograd.ddp_models import refuse_ddp_models
from topkube.training.exchange.autograd.gradient_hooks import GradientHooks
from topkube.training.exchange.bucket_queue import BucketQueue
from topkube.training.exchange.buckets.bucket_plan import BucketPlan
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.end_of_backward import EndOfBackward
from topkube.training.exchange.late.late_updates import LateUpdates
from topkube.training.exchange.reduction.bucket_exchange import BucketExchange
from topkube.training.exchange.reduction.devices import find_exchange_device
from topkube.training.exchange.reduction.residuals import Momentum
from topkube.training.exchange.settings_in_force import SettingsInForce
from topkube.training.exchange.step.step_gradients import StepGradients
from topkube.training.exchange.step.weights_check import WeightsCheck
from topkube.training.exchange.step.weights_comparison import WeightsComparison
from topkube.training.exchange.tuning.tuning import Tuning
from topkube.training.reporting.warning import warn
from topkube.world import World


class Backward:
    """The exchange of an optimizer's gradients.

    `in_force` has the number of updates, and `gradients` holds the gradients that the next step uses. `synchronizes` is
    False while gradients only accumulate, and `has_unsynchronized` is True if some gradients were not exchanged.
    `number` orders the optimizers of a process; with `is_copy`, it is given when the first backward begins. With a
    `node_world`, gradients are exchanged among its ranks only; agreements are those of all ranks of `world`. A Backward
    that replaces an `earlier` one of the same optimizer takes over its counters, its announced batches, and what `auto`
    stands for.
    """

    def __init__(
        self,
        world: World,
        parameters: list[Parameter],
        aggregation: AggregationSettings,
        momentum: Momentum,
        settings: Settings,
        is_copy: bool = False,
        node_world: World | None = None,
        weights_check: WeightsCheck | None = None,
        earlier: Backward | None = None,
    ) -> None:
        self.synchronizes, self.has_unsynchronized = True, False
        self.world, self.parameters = world, parameters
        self.batches: UnevenBatches = earlier.batches if earlier is not None else UnevenBatches(world)
        agreement = self.batches.agreement
        within = aggregation.within_node if aggregation.in_weights else aggregation
        if node_world is not None:
            settings = replace(settings, finite_check="host")  # a flag on the device would cover one node only
        self.exchange = BucketExchange(
            node_world or world, within, momentum, find_exchange_device(parameters, settings), settings
        )
        if earlier is not None:
            tuning = earlier.plan.tuning
            tuning.measure_device = self.exchange.measure_device  # the earlier exchange is not needed any more
        else:
            choices = self.exchange.algorithms.compressed_choices
            is_on_device = self.exchange.on_device is not None
            tuning = Tuning(world, aggregation, agreement, self.exchange.measure_device, choices, is_on_device)
        self.plan: BucketPlan = BucketPlan(world, parameters, aggregation, agreement, tuning, settings.finite_check)
        self.in_force = SettingsInForce(world, aggregation, self.exchange.algorithms, self.plan)
        self.queue = BucketQueue(world, self.plan, self.exchange, self.in_force)
        check = weights_check or WeightsCheck(parameters, settings.check_weights, settings.check_weights_every)
        self.weights = WeightsComparison(agreement, check)
        self.gradients = StepGradients(agreement, parameters, self.exchange, self.plan, self.in_force, self.weights)
        self._end = EndOfBackward(
            parameters,
            agreement,
            self.plan,
            self.exchange,
            self.in_force,
            self.queue,
            self.gradients,
            self.weights,
        )
        self._accumulation = Accumulation(parameters, self.batches, self.plan, self.exchange.residuals)
        self._seen: list[int] = []
        """The indices of the parameters without a bucket whose gradients this backward has produced, in their order."""
        self._untouched: list[Parameter] = []
        """Parameters whose gradients nothing writes before this backward ends."""
        self._first_gradient = self._updating_before = 0.0
        self._task = -1
        """The number of the backward pass that reached this optimizer last."""
        self.late: LateUpdates | None = None
        """What the next forward finishes, with DeAR."""
        self._unnoticed: set[int] = set()
        """The ids of the parameters that this backward found without their late update: no use of them was noticed in
        forward."""
        self._has_warned_of_graph = False
        self._hooks = GradientHooks(self, parameters)
        self.number = 0 if is_copy else current_pass.register(self)
        if earlier is not None:
            self._take_over(earlier)

    def _take_over(self, earlier: Backward) -> None:
        """Go on with the counters and the reports of an earlier Backward, which has ended."""
        self.in_force.steps = earlier.in_force.steps
        self.gradients.skipped_steps, self.gradients.norms = earlier.gradients.skipped_steps, earlier.gradients.norms
        self.queue.step_trace = earlier.queue.step_trace
        self._has_warned_of_graph = earlier._has_warned_of_graph

    @property
    def density_used(self) -> float:
        """The density of the last exchange."""
        return self._end.density_used

    def list_sparse_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients leave residuals."""
        sparse = (bucket for bucket in self.plan.buckets if self.exchange.algorithms.is_sparse(bucket))
        return [parameter.tensor for bucket in sparse for parameter in bucket.parameters]

    def add(self, parameters: list[Parameter]) -> None:
        """Exchange these parameters too, from the next backward on."""
        self.parameters += parameters
        self._hooks.add(parameters)

    def end(self) -> None:
        """Exchange no more gradients."""
        self._hooks.remove()
        current_pass.remove(self)

    # ---- around the optimizer's step

    def check_exchanged(self) -> None:
        """Raise TrainingError if a gradient that the optimizer is about to use was never exchanged."""
        if current_pass.is_broken_off(self):
            raise TrainingError(
                "the last backward() did not finish: its gradients were not aggregated over all ranks",
                cause="an exception in backward() that the script caught",
                next_step="call optimizer.zero_grad() and continue with the next batch, on every rank",
            )
        self.gradients.check_exchanged()

    def note_step(self) -> None:
        """Note that the optimizer made its step: changes of residuals become final."""
        self.in_force.steps += 1
        self.exchange.algorithms.note_step()
        self._accumulation.commit()
        self.queue.loss_scale = 1.0
        self.weights.note_step(self.in_force.steps, self.finish_late)

    def note_skipped_step(self) -> None:
        """Note that the optimizer skipped its step: changes of residuals are undone."""
        self._accumulation.discard()

    def forget_gradients(self) -> None:
        """Note that gradients were zeroed: changes of residuals since the last step are undone."""
        self.gradients.forget()
        self.has_unsynchronized = False
        self.queue.loss_scale = 1.0
        self._accumulation.forget()

    def finish_late(self) -> None:
        """Finish the gathers and updates that are left for the next forward."""
        if self.late is not None:
            self.late.finish()

    def synchronize_now(self) -> None:
        """Exchange gradients that no backward exchanged: the script assigned them, or they accumulated under
        `no_sync()`. All ranks call this together."""
        self._accumulation.adopt_assigned()
        self._seen = [p.index for p in self.parameters if p.tensor.grad is not None]
        self._exchange_all()

    # ---- hooks

    def prepare_gradient(self, parameter: Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Prepare the accumulation of a gradient. Return its replacement, or None to accumulate the gradient itself."""
        if torch._C._current_graph_task_id() != self._task:
            current_pass.reach(self)
        if gradient is None or not parameter.tensor.requires_grad:  # nothing is accumulated
            return None
        if id(parameter.tensor) in self._unnoticed:
            raise TrainingError(
                f"forward used {parameter.name} before its late update, when its values were NaN",
                cause='with overlap="dear", uses in torch.func and torch.vmap, in TorchScript, in other threads and'
                " through pointers are not noticed; or this graph is older than the last step",
                next_step="call optimizer.finish_step() after optimizer.step(), or train without dear",
            )
        return self._accumulation.prepare(parameter, gradient)

    def take_gradient(self, parameter: Parameter, arrived: torch.Tensor | None) -> None:
        """Note that the gradient `arrived` was accumulated, and hand over its bucket if it is full."""
        if not parameter.tensor.requires_grad:  # frozen after forward: nothing was accumulated, and no bucket waits
            return
        if self.queue.step_trace is not None:
            itemsize = parameter.dtype.itemsize
            self.queue.step_trace.note_gradient(parameter.name, parameter.length, itemsize, parameter.is_always_dense)
        bucket = self.plan.find_bucket(parameter)
        if not self.synchronizes:
            # DeAR needs all gradients side by side. A later backward adds to them where they are.
            if bucket is None or not self.exchange.is_decoupled or not bucket.take_in(parameter):
                self._untouched.append(parameter)
            self.has_unsynchronized = parameter.is_weighed = True
            return
        if bucket is None or not self.plan.is_agreed:
            self._untouched.append(parameter)
            self._seen.append(parameter.index)
            return
        if bucket.intake == "is only read":
            if parameter.stash is None:  # otherwise it is added to the stash, which the script may have chosen
                self._untouched.append(parameter)
        elif not bucket.take_in(parameter):
            parameter.copy_shared_gradient(arrived)
        if not current_pass.has_several:  # otherwise ranks agree at the end which optimizers took part
            bucket.waiting -= 1
            if bucket.waiting <= 0:
                self.queue.hand_over_full()

    # ---- a backward pass

    def begin(self) -> None:
        """Begin a backward pass of this optimizer, before its first gradient is accumulated."""
        self._task = torch._C._current_graph_task_id()
        if not self.plan.is_agreed:
            refuse_ddp_models(parameter.tensor for parameter in self.parameters)
        if torch.is_grad_enabled() and self.synchronizes:
            self._warn_of_graph()
        self._first_gradient, self._updating_before = time.perf_counter(), phases.current.total("update")
        self.batches.note_forward_end(self._first_gradient)
        if self.queue.step_trace is not None:
            self.queue.step_trace.begin_backward()
        self._unnoticed = set(map(id, self.late.list_hidden())) if self.late is not None else set()
        self.finish_late()  # parameters that forward did not use
        self.queue.loss_scale = current_pass.loss_scale
        self._accumulation.begin_backward()
        has_gradients = not all(parameter.tensor.grad is None for parameter in self.parameters)
        self.gradients.begin_backward(has_gradients)
        if not has_gradients:
            self.has_unsynchronized = False
        self._seen.clear()
        self._untouched.clear()
        for bucket in self.plan.buckets:
            bucket.begin_backward(self.exchange.choose_intake(bucket), self.exchange.is_decoupled)
        self._expect_gradients(has_gradients)

    def _warn_of_graph(self) -> None:
        """Warn on rank 0, once, that the gradients of this backward have a graph (`create_graph=True`)."""
        if self.world.size > 1 and self.world.rank == 0 and not self._has_warned_of_graph:
            warn(
                "after backward(create_graph=True), gradients are the mean of all ranks, but their graph is that of"
                " each rank's own batch. torch.autograd.grad of them, as in AdaHessian, differs between ranks, and so"
                " do the weights that a step computes from it. Next: put what you compute from"
                " torch.autograd.grad(loss, parameters, create_graph=True) into the loss, and call backward() without"
                " create_graph."
            )
        self._has_warned_of_graph = True

    def _expect_gradients(self, has_gradients: bool) -> None:
        """Tell the hooks what is known of the gradients of this backward."""
        expected = self._hooks.expected
        expected.are_first = not has_gradients and not self._accumulation.weighs
        if expected.are_first:
            for parameter in self.parameters:
                self._accumulation.begin_anew(parameter)
        expected.are_only_read = (
            expected.are_first
            and self.synchronizes
            and self.plan.is_agreed
            and self.queue.step_trace is None
            and not current_pass.has_several
            and all(bucket.intake == "is only read" for bucket in self.plan.buckets)
        )
        expected.task = self._task

    def abandon(self) -> None:
        """Undo a backward pass that did not finish. Raises TrainingError if other ranks have already exchanged a part
        of it, because they wait for the rest."""
        self._hooks.restore()
        self.queue.abandon()

    def finish(self) -> None:
        """Finish the backward pass, in the thread that called it: exchange the remaining buckets, and agree if the
        gradients are finite. Then run the script's hooks on the aggregated gradients."""
        if self.queue.step_trace is not None:
            self.queue.step_trace.end_gradients()
        for parameter in self.parameters if self._hooks.expected.are_only_read else self._untouched:
            parameter.copy_shared_gradient()
            if parameter.stash is not None and not self.synchronizes:
                parameter.note_zeros()
        self._untouched.clear()
        if self.synchronizes:
            self._exchange_all()
        phases.current.add_span("backward", self._first_gradient, time.perf_counter(), self._updating_before)
        if self.queue.step_trace is not None:
            self.queue.step_trace.end_backward()
        hooked = self._hooks.run_deferred(self.synchronizes)
        cleared = [p.name for p in hooked if p.tensor.grad is None]
        if cleared and self.exchange.residuals.are_tentative:
            raise TrainingError(
                f"a hook set the gradient of {cleared[0]} to None at the end of backward()",
                cause="an optimizer that steps inside backward(): the distributed optimizer cannot see that step, so it"
                " cannot update its residuals",
                next_step='use aggregation="dense" for it, or call optimizer.step() after backward()',
            )

    def _exchange_all(self) -> None:
        self._end.run(self._seen, self.late, self._hooks.are_deferred)
        self.has_unsynchronized = False
        for parameter in self.parameters:
            if not parameter.length:
                parameter.add_empty_gradient()
