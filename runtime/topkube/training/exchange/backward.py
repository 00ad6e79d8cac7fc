"""The exchange of an optimizer's gradients during `backward()`.

Hooks see each gradient when it is ready. When all gradients of a bucket are ready, the communication thread exchanges
the bucket while backward continues. At the end of backward the remaining buckets follow, and all ranks agree whether
the step is finite. Changes of residuals become final when the optimizer steps, and are undone if the gradients are
discarded.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import replace

import torch

from topkube import algorithms
from topkube.collectives.device.memory import DeviceFlag
from topkube.errors import TrainingError
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.training.batches.uneven_batches import Turns
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.backward_pass import backward_pass
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.bucket_plan import BucketPlan
from topkube.training.exchange.buckets.parameter import Parameter, real_view
from topkube.training.exchange.device_decisions import DeviceDecisions, StepDecision
from topkube.training.exchange.gradient_hooks import GradientHooks
from topkube.training.exchange.late.late_updates import LateUpdates
from topkube.training.exchange.reduction.bucket_exchange import BucketExchange
from topkube.training.exchange.reduction.devices import exchange_device
from topkube.training.exchange.reduction.residuals import Momentum
from topkube.training.exchange.reduction.sparse_gradients import fill_with_nan, is_finite
from topkube.training.exchange.weights_check import WeightsCheck
from topkube.training.ranks.agreement import differing_ranks, names_of
from topkube.training.ranks.communication_thread import schedule
from topkube.training.reporting.norms import Norms
from topkube.training.reporting.step_trace import StepTrace
from topkube.world import World

_MANY_SKIPPED = 16
"""Skipped steps in a row that are reported; then twice as many, and so on. A GradScaler that begins with its usual
factor of 65,536 skips 16 at most before the factor is 1."""


class Backward:
    """The exchange of an optimizer's gradients.

    `steps` is the number of updates and `skipped_steps` the number of steps that all ranks skipped; a step about which
    the device decides counts as an update until `settle`. `density_used` is the density of the last exchange.
    `synchronize` is False while gradients only accumulate, and `unsynchronized` is True if some were not exchanged.
    `norms`, if set, measures exchanged gradients. `number` orders the optimizers of a process. With a `node_world`,
    gradients are exchanged among its ranks only; agreements are those of all ranks of `world`.
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
    ) -> None:
        self._steps = self.skipped_steps = 0
        self.density_used = 1.0
        self.synchronize, self.unsynchronized = True, False
        self.norms: Norms | None = None
        self.world = world
        self.turns = Turns(world)
        within = aggregation.within_node if aggregation.in_weights else aggregation
        if node_world is not None:
            settings = replace(settings, finite_check="host")  # the ranks of one node do not decide alone
        self.exchange = BucketExchange(
            node_world or world, within, momentum, exchange_device(parameters, settings), settings
        )
        self.decisions = DeviceDecisions()
        self.plan = BucketPlan(
            world,
            parameters,
            aggregation,
            self.turns.run_agreement,
            self.exchange.measure_nccl_link,
            settings.finite_check,
        )
        self.weights = WeightsCheck(parameters, settings.check_weights, settings.check_weights_every)
        self.parameters, self._aggregation = parameters, aggregation
        self._seen: list[int] = []
        self._futures: list[Future[bool]] = []
        self._left_out: list[Bucket] = []
        self._nonfinite = self._last_nonfinite = False
        self._skipped_in_a_row = 0
        self._first_gradient = 0.0
        self._loss_scale: torch.Tensor | float = 1.0
        self._compares_weights, self._first_weights = False, True
        self._weights_digest = 0.0
        self.traced: StepTrace | None = None
        """The recorder of a trace, None if no trace is recorded."""
        self.late: LateUpdates | None = None
        """What the next forward finishes, with DeAR."""
        self._hooks = GradientHooks(self, parameters)
        self.number = 0 if is_copy else backward_pass().register(self)

    @property
    def steps(self) -> int:
        """The number of updates. The aggregation follows it, by the job's schedule."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        if not self._aggregation.schedule:
            return
        in_force, begins = self._aggregation.at(steps), self._aggregation.begins_at(steps)
        self.exchange.algorithms.change_to(in_force.within_node if in_force.in_weights else in_force, begins)
        self.plan.tuning.change_to(in_force, self.plan.list_sizes())
        self.exchange.algorithms.adopt(self.plan.tuning.choice)
        if begins and self.world.rank == 0:
            words = algorithms.describe(in_force.algorithm, in_force.density)
            every = f", every {in_force.period} steps" if in_force.period > 1 else ""
            print(f"topkube: from step {steps} on, nodes exchange with {words}{every}", file=sys.stderr, flush=True)

    @property
    def density(self) -> float:
        """The current density: it falls during warm-up, and is 1 if aggregation is dense."""
        return (
            self._aggregation.at(self.steps).density_at(self.steps)
            if self.exchange.algorithms.large.compresses
            else 1.0
        )

    def sparse_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients leave residuals."""
        sparse = (bucket for bucket in self.plan.buckets if self.exchange.algorithms.is_sparse(bucket))
        return [parameter.tensor for bucket in sparse for parameter in bucket.parameters]

    def add(self, parameters: list[Parameter]) -> None:
        """Exchange these parameters too, from the next backward on."""
        self.parameters += parameters
        self._hooks.add(parameters)

    # ---- around the optimizer's step

    def takes_step(self) -> bool:
        """Return True if the optimizer may step. It may not if all ranks agreed that a gradient is not finite, unless
        the script has made the gradient finite since. Also forgets that agreement. It may step if the device decides:
        the step then changes nothing if a gradient is not finite."""
        if self.decisions.is_open and not self.decisions.are_possible:  # the script has changed the optimizer
            self.settle()
        skip, self._nonfinite = self._nonfinite and (self._last_nonfinite or self._holds_nonfinite()), False
        return not skip

    def check_exchanged(self) -> None:
        """Raise TrainingError if a gradient that the optimizer is about to use was never exchanged."""
        if backward_pass().is_broken_off(self):
            raise TrainingError(
                "the last backward() did not finish: its gradients were not aggregated over all ranks",
                cause="an exception in backward() that the script caught",
                next_step="call optimizer.zero_grad() and continue with the next batch, on every rank",
            )
        unexchanged = [
            p.name
            for p in self.parameters
            if p.tensor.grad is not None and not p.exchanged and not p.holds_delivered and p.tensor.grad.any()
        ]
        if unexchanged:
            raise TrainingError(
                f"the gradients of {unexchanged[0]}"
                + (f" and {len(unexchanged) - 1} more parameters" if len(unexchanged) > 1 else "")
                + " were not exchanged: the ranks would make different steps",
                cause="the script or a library such as FSDP2 assigned them, and backward() did not compute them; or"
                " the parameter was replaced after the optimizer was wrapped (model.to(...), model.half())",
                next_step="call optimizer.synchronize() before step() on every rank; wrap the optimizer after the"
                " model has its device and dtype",
            )

    def note_step(self) -> None:
        """Note that the optimizer made its step: changes of residuals become final."""
        self.steps += 1
        if self.exchange.residuals.are_tentative:
            self.exchange.residuals.discard_of(lambda parameter: parameter.tensor.grad is None)
        self.exchange.residuals.commit()
        self._loss_scale = 1.0
        for parameter in self.parameters:
            parameter.exchanged = False
        if self.world.size > 1 and self.weights.is_due(self.steps, False):
            self.finish_late()
            self._weights_digest, self._compares_weights = self.weights.digest(), True

    def finish_late(self) -> None:
        """Finish the gathers and updates that are left for the next forward."""
        if self.late is not None:
            self.late.finish()

    def note_skipped_step(self) -> None:
        """Note that the optimizer skipped its step: changes of residuals are undone."""
        self.exchange.residuals.discard()
        for parameter in self.parameters:
            parameter.exchanged = False

    def settle(self) -> None:
        """Read what the device has decided, which may wait for it, and correct the numbers of steps."""
        for closed in self.decisions.take_closed():
            self._count(closed)
        decision = self.decisions.take_open()
        if decision is not None:
            self._last_nonfinite = self._count(decision)
            self._nonfinite = self._last_nonfinite and not decision.steps  # else the device has skipped the step

    def _count(self, decision: StepDecision) -> bool:
        """Correct the numbers of steps. Return True if the gradients were not finite."""
        is_nonfinite = decision.flag.read()
        if is_nonfinite:
            self.skipped_steps += 1
            self._steps -= decision.steps
            self._compares_weights = self._compares_weights and not decision.steps  # as on ranks that knew it earlier
        return is_nonfinite

    def forget_gradients(self) -> None:
        """Note that gradients were zeroed: changes of residuals since the last step are undone."""
        self.decisions.close()
        self._nonfinite = self._last_nonfinite = self.unsynchronized = False
        self._loss_scale = 1.0
        self.exchange.residuals.discard()
        for parameter in self.parameters:
            parameter.forget()

    def end(self) -> None:
        """Exchange no more gradients."""
        self._hooks.remove()
        backward_pass().remove(self)

    def compare_first_weights(self) -> None:
        """Raise TrainingError, or warn, if ranks have different weights at the first step after the optimizer was
        created or loaded. All ranks call this together."""
        if not self._first_weights or self.world.size == 1 or not self.weights.is_due(0, True):
            return
        self._first_weights = False
        digest = self.weights.digest()
        high, low = self.turns.maximum([digest, -digest])
        self._report_weights(digest, high == -low, True)

    def wait_for_exchanges(self) -> None:
        """Wait for the buckets that an unfinished backward had handed over: they would still write into `.grad`."""
        wait(self._futures)
        if self._futures and self.exchange.is_pipelined:
            wait([schedule().submit(self.exchange.flush)])

    def synchronize_now(self) -> None:
        """Exchange gradients that no backward exchanged: the script assigned them, or they accumulated under
        `no_sync()`. All ranks call this together."""
        if self.exchange.residuals.are_tentative:
            self.exchange.residuals.discard_of(lambda parameter: not parameter.holds_delivered)
        for parameter in self.parameters:
            if parameter.tensor.grad is None:
                parameter.aggregated, parameter.stash = False, None
            elif not parameter.holds_delivered:
                parameter.aggregated = False
                parameter.has_rows = parameter.has_rows or parameter.tensor.grad.is_sparse
        self._seen = [p.index for p in self.parameters if p.tensor.grad is not None]
        self._exchange_all()

    def _holds_nonfinite(self) -> bool:
        return any(p.tensor.grad is not None and not is_finite(p.tensor.grad) for p in self.parameters)

    # ---- hooks

    def before(self, parameter: Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Prepare the accumulation of a gradient. Return its replacement, or None to accumulate the gradient itself."""
        backward_pass().reach(self)
        if gradient is None or not parameter.tensor.requires_grad:  # nothing is accumulated
            return None
        self._check_layout(parameter, gradient)
        if gradient.is_conj() or gradient.is_neg():
            return self._weighted(parameter, gradient.resolve_conj().resolve_neg(), replaced=True)
        return self._weighted(parameter, gradient)

    def _weighted(self, parameter: Parameter, gradient: torch.Tensor, replaced: bool = False) -> torch.Tensor | None:
        if parameter.tensor.grad is None:
            parameter.aggregated, parameter.stash = False, None
        elif parameter.aggregated and parameter.holds_delivered:
            parameter.stash, parameter.aggregated, parameter.tensor.grad = parameter.tensor.grad, False, None
        else:  # accumulated under no_sync(), or assigned by the script: this rank's own
            parameter.aggregated = False
        parameter.arrives = parameter.tensor.grad is None
        scale = self.turns.scale()
        if scale == 0:
            parameter.weightless = parameter.tensor.grad is None and parameter.stash is None
            return torch.zeros_like(gradient)  # 0 * NaN would be NaN
        parameter.weightless = False
        return gradient * scale if scale != 1 else gradient if replaced else None

    def after(self, parameter: Parameter) -> None:
        """Note that a gradient was accumulated, and hand over its bucket if it is full."""
        if self.traced is not None:
            self.traced.note_gradient(parameter.name, parameter.length, parameter.dtype.itemsize, parameter.small)
        if not self.synchronize:
            parameter.own_gradient()
            self.unsynchronized = True
            return
        bucket, buckets = self.plan.bucket_of(parameter), self.plan.buckets
        if bucket is None or not self.plan.is_agreed:
            parameter.own_gradient()
            self._seen.append(parameter.index)
            return
        if not (self.exchange.is_overlapped(bucket) and bucket.take_in(parameter)):
            parameter.own_gradient()
        if not backward_pass().several:
            bucket.waiting -= 1
            while len(self._futures) < len(buckets) and buckets[len(self._futures)].waiting <= 0:
                self._hand_over()

    def _check_layout(self, parameter: Parameter, gradient: torch.Tensor) -> None:
        if gradient.dtype != parameter.gradient_dtype:
            raise TrainingError(
                f"the gradient of {parameter.name} has dtype {gradient.dtype}, and not {parameter.gradient_dtype} as"
                " when the optimizer was wrapped",
                cause="grad_dtype of the parameter was changed after that, or it is None",
                next_step="set grad_dtype on every rank before you create the DistributedOptimizer",
            )
        bucket = self.plan.bucket_of(parameter)
        if bucket is None:
            parameter.has_rows = parameter.has_rows or gradient.is_sparse
        elif bucket.has_rows != gradient.is_sparse and bucket.length:
            if not self.plan.is_agreed:  # buckets of a loaded order: they are planned again
                parameter.has_rows = gradient.is_sparse
                return
            raise TrainingError(
                f"the gradient of {parameter.name} has layout {gradient.layout}, but had another layout before",
                cause="an embedding whose weight is used both sparsely (sparse=True) and densely",
                next_step="use sparse=False for it",
            )

    # ---- one backward

    def begin(self) -> None:
        """Begin a backward pass of this optimizer, before its first gradient is accumulated."""
        self._first_gradient = time.perf_counter()
        self.turns.forward_ended(self._first_gradient)
        if self.traced is not None:
            self.traced.begin_backward()
        self.finish_late()  # parameters that forward did not use
        self._loss_scale = backward_pass().loss_scale
        self._undo_discarded()
        has_gradients = not all(parameter.tensor.grad is None for parameter in self.parameters)
        if self.decisions.is_open and has_gradients:  # gradients add up: the host has to know the first decision
            self.settle()
        self.decisions.close()
        if not has_gradients:
            self._nonfinite = self._last_nonfinite = self.unsynchronized = False
        self._seen.clear()
        for bucket in self.plan.buckets:
            bucket.begin_backward()

    def _undo_discarded(self) -> None:
        """Undo exchanges whose gradients the script has zeroed since: some set to None, or all of them to zeros."""
        for parameter in self.parameters:
            if parameter.stash is not None and parameter.is_zero:
                parameter.stash = None
        if self.exchange.residuals.are_tentative:
            if all(parameter.is_zero for parameter in self.parameters):
                self.exchange.residuals.discard()
            else:
                self.exchange.residuals.discard_of(lambda parameter: parameter.tensor.grad is None)

    def abandon(self) -> None:
        """Undo a backward pass that did not finish. Raises TrainingError if other ranks have already exchanged a part
        of it, because they wait for the rest."""
        self._hooks.restore()
        handed_over, self._futures, self._left_out = self._futures, [], []
        for future in handed_over:
            future.result()
        if self.exchange.is_pipelined:
            schedule().submit(self.exchange.flush).result()
            self.exchange.follow()
        self.exchange.residuals.reject()
        if self.exchange.halves is not None:
            self.exchange.halves.take()
        if handed_over and self.world.size > 1:
            raise TrainingError(
                f"backward() began after another backward() that did not finish: {len(handed_over)} of"
                f" {len(self.plan.buckets)} buckets were exchanged",
                cause="an exception in backward()",
                next_step="end the process on an exception: the ranks are out of step",
            )

    def finish(self) -> None:
        """Finish the backward pass, in the thread that called it: exchange the remaining buckets, and agree whether the
        step is finite. Then run the script's hooks on the aggregated gradients."""
        if self.traced is not None:
            self.traced.end_gradients()
        if self.synchronize:
            self._exchange_all()
        phases.current.add("backward", time.perf_counter() - self._first_gradient)
        if self.traced is not None:
            self.traced.end_backward()
        ran = self._hooks.run_deferred(self.synchronize)
        stolen = [p.name for p in ran if p.tensor.grad is None]
        if stolen and self.exchange.residuals.are_tentative:
            raise TrainingError(
                f"a hook set the gradient of {stolen[0]} to None at the end of backward()",
                cause="an optimizer that steps inside backward(): the distributed optimizer cannot see that step, so it"
                " cannot update its residuals",
                next_step='use aggregation="dense" for it, or call optimizer.step() after backward()',
            )

    def _hand_over(self) -> None:
        bucket = self.plan.buckets[len(self._futures)]
        if self.plan.is_active(bucket):
            self._futures.append(self._submit(bucket))
        else:  # all its parameters were frozen when the ranks last compared
            self._left_out.append(bucket)
            self._futures.append(_done(True))

    def _submit(self, bucket: Bucket) -> Future[bool]:
        density, warming = self.density, self.steps < self._aggregation.warmup_steps
        scale = (
            self._loss_scale if self.exchange.algorithms.is_sparse(bucket) else 1.0
        )  # it may be on a device: not read yet
        run = self.exchange.run
        if self.traced is not None:
            number = next(n for n, planned in enumerate(self.plan.buckets) if planned is bucket)
            algorithm = self.exchange.algorithms.choose(bucket, density, warming).algorithm.name
            run = self.traced.around_exchange(run, number, bucket.length, bucket.dtype.itemsize, algorithm, density)
        if (
            self.world.size == 1 and not self.exchange.algorithms.large.compresses
        ):  # nothing to send: no thread is needed
            return _done(run(bucket, density, warming))
        mark = self.exchange.ready()
        return schedule().submit(lambda: run(bucket, density, warming, mark, scale))

    def _exchange_all(self) -> None:
        first = not self.plan.is_agreed
        self._seen += [p.index for p in self.parameters if p.local and self.plan.bucket_of(p) is None]
        if first:
            if self.world.size > 1:  # a rank may have loaded a state for all ranks
                self.steps = int(self.turns.maximum([self.steps])[0])
            self.plan.agree(self._seen)
            self.exchange.algorithms.adopt(self.plan.tuning.choice)
            self._first_weights = True
        self.settle()
        self.density_used = self.density
        while len(self._futures) < len(self.plan.buckets):
            self._hand_over()
        compares, self._compares_weights = self._compares_weights, False
        weights = self._weights_digest if compares else 0.0
        futures, self._futures = self._futures, []
        left_out, self._left_out = self._left_out, []
        nonfinite = self._wait(futures)
        idle = [p for p in self._trainable() if p.weightless or p.created or self._will_be_created(p)]
        trainable = self.plan.comparison.digest_trainable()
        unplanned = any(self.plan.bucket_of(self.parameters[index]) is None for index in self._seen)
        is_saved, self.plan.tuning.is_saved = self.plan.tuning.is_saved, False
        scale = self._host_loss_scale()
        flags = [nonfinite is True, bool(idle), trainable, -trainable, weights, -weights, unplanned]
        flags += [self.steps, -self.steps, is_saved, not self._can_hold()]
        flags += [scale, -scale] if scale != 1 else [-math.inf, -math.inf]  # a rank without a scaler may send zeros
        answers = self.turns.maximum(flags)
        if answers[7] != -answers[8]:
            self._raise_different_steps()
        if answers[2] != -answers[3]:
            self.plan.comparison.raise_different_trainable()
        if answers[11] != -answers[12] and answers[11] > -math.inf:
            self._raise_different_scales(scale)
        if isinstance(nonfinite, bool):
            nonfinite = bool(answers[0] > 0)
        elif not self._may_leave_to_device():
            nonfinite = nonfinite.read()
        if self.plan.update_trainable() or answers[6]:
            new = self.plan.extend(self._seen)
            late = [bucket for bucket in [*left_out, *new] if self.plan.is_active(bucket)]
            of_late = self._wait([self._submit(bucket) for bucket in late])
            answers[:2] = self.turns.maximum([_read(nonfinite) or _read(of_late), True])
            nonfinite = bool(answers[0] > 0)
            answers[10] = True
        if self.late is not None and self.exchange.halves is not None:
            if answers[[0, 1, 10]].any():
                schedule().submit(self.exchange.halves.gather_now).result()
            else:
                self.late.hold(self.exchange.halves.take())
        was_nonfinite = self._nonfinite
        self._finish_step(nonfinite, answers[1] > 0)
        count = self._skipped_in_a_row
        if self._nonfinite and not was_nonfinite and count >= _MANY_SKIPPED and count & (count - 1) == 0:
            self._report_skipped_steps()
        self._tune(answers[9] > 0)
        if compares:
            self._report_weights(weights, answers[4] == -answers[5], False)

    def _host_loss_scale(self) -> float:
        """Return the factor of a gradient scaler on the last loss; 1 if there is none, or if the host would have to
        wait for a device to know it."""
        scale = self._loss_scale
        return 1.0 if isinstance(scale, torch.Tensor) and scale.device.type != "cpu" else float(scale)

    def _can_hold(self) -> bool:
        """Return True if every use of the gradients on this rank, before they are gathered, is noticed."""
        halves = self.exchange.halves
        if self.late is None or halves is None or not self.late.can_hold:
            return False
        if backward_pass().several or self._hooks.are_deferred or (self.norms is not None and self.norms.due):
            return False
        return all(part.is_in_place for part in halves.parts)

    def _will_be_created(self, parameter: Parameter) -> bool:
        """Return True if a gather that comes later creates this gradient."""
        return self.late is not None and parameter.tensor.grad is None

    def _tune(self, is_saved: bool) -> None:
        """Compare the exchanges so far with their prediction, when that is due, and change what `auto` or `dense`
        stands for. `is_saved` is True if a rank has saved its state since the last exchange."""
        tuning = self.plan.tuning
        if is_saved:
            tuning.note_saved()
        if self.late is not None:
            tuning.settle()  # the times of two halves do not show if the prediction was right
        measured = tuning.note_step(time.perf_counter())
        if measured is not None and tuning.decide(self.turns.maximum(measured).tolist(), self.plan.list_sizes()):
            self.exchange.algorithms.adopt(tuning.choice)
            if not self.exchange.residuals.are_kept:  # residuals lie by bucket
                self.plan.plan_again()

    def _may_leave_to_device(self) -> bool:
        """Return True if this rank's host need not know whether the gradients are finite, and the optimizer can skip
        its step on the device. The first step of all ranks is different: they compare their weights if they make it."""
        measures = self.norms is not None and self.norms.due
        is_first = self._first_weights and self.world.size > 1 and self.weights.is_due(0, True)
        return self.decisions.are_possible and not (self._nonfinite or measures or is_first)

    def _wait(self, futures: Iterable[Future[bool]]) -> bool | DeviceFlag:
        """Wait for the exchanges. Return True if something that this rank saw was not finite; or a flag of the device,
        the same on all ranks, that is 1 if something that a rank saw was not finite."""
        finite = all([future.result() for future in futures])
        if self.exchange.agrees_on_device(self.plan.buckets):
            assert finite  # the flag has it
            flag = schedule().submit(self.exchange.flush_undecided).result()
            self.exchange.follow()
            return flag
        if self.exchange.is_pipelined:
            finite = schedule().submit(self.exchange.flush).result() and finite
            self.exchange.follow()
        return not finite

    def _trainable(self) -> list[Parameter]:
        return [p for bucket in self.plan.buckets for p in bucket.parameters if p.tensor.requires_grad]

    def _finish_step(self, nonfinite: bool | DeviceFlag, some_idle: bool) -> None:
        trainable = self._trainable()
        self.unsynchronized = False
        self._last_nonfinite = nonfinite is True
        if isinstance(nonfinite, DeviceFlag):  # there are no residuals: they would depend on the answer
            self.decisions.hold(nonfinite)
            self.exchange.spread_flag(nonfinite, [p.tensor.grad for p in trainable if p.tensor.grad is not None])
            if some_idle:
                self._drop_unused(trainable)
        elif nonfinite:
            self.exchange.residuals.reject()
            self.skipped_steps += not self._nonfinite
            self._skipped_in_a_row += not self._nonfinite
            self._nonfinite = True
            for parameter in trainable:  # the same on every rank, so that clipping and GradScaler decide the same
                if parameter.tensor.grad is not None:
                    fill_with_nan(parameter.tensor.grad)
        else:
            self._skipped_in_a_row = 0
            self.exchange.residuals.accept()
            if some_idle:
                self._drop_unused(trainable)
            if self.norms is not None and self.norms.due:
                gradients = [p.tensor.grad for p in trainable if p.tensor.grad is not None and not p.has_rows]
                self.norms.measure(gradients, self.exchange.residuals.arrays())
        for parameter in trainable:
            parameter.weightless = parameter.created = False

    def _drop_unused(self, parameters: list[Parameter]) -> None:
        """Set the gradient of a parameter that no rank used to None, as with one process, unless its residual was
        sent."""
        idle = [parameter.weightless or parameter.created for parameter in parameters]
        used = self.turns.maximum([not value for value in idle])
        for parameter, is_used, is_idle in zip(parameters, used, idle, strict=True):
            gradient = parameter.tensor.grad
            if is_idle and not is_used and gradient is not None and not (gradient.is_sparse or gradient.any()):
                parameter.tensor.grad = None
                parameter.forget()

    def _raise_different_steps(self) -> None:
        rows = self.turns.run_agreement(lambda agreement: agreement.gather([self.steps]))[:, 0]
        ranks = differing_ranks(rows)
        raise TrainingError(
            f"{names_of(ranks)} made a different number of optimizer steps than the other ranks ({int(rows.min())} to"
            f" {int(rows.max())})",
            cause="step() is called on some ranks only, or ranks loaded different states",
            next_step="call step() on every rank after the same backward()",
        )

    def _raise_different_scales(self, scale: float) -> None:
        rows = self.turns.run_agreement(lambda agreement: agreement.gather([scale]))[:, 0]
        raise TrainingError(
            f"the gradient scalers of {names_of(differing_ranks(rows))} have another factor than those of the other"
            f" ranks ({rows.min():g} to {rows.max():g}): the mean of their gradients has no meaning",
            cause="a rank has loaded the state of its GradScaler, or created it with another factor",
            next_step="load the same state of the scaler on every rank",
        )

    def _report_skipped_steps(self) -> None:
        """Warn on rank 0 that training has stopped to make steps. Raise TrainingError on all ranks if the weights of
        some ranks only are the cause: such a run never recovers. All ranks call this together."""
        is_bad = not all(is_finite(real_view(parameter.tensor)) for parameter in self.parameters)
        rows = self.turns.run_agreement(lambda agreement: agreement.gather([is_bad]))[:, 0]
        bad = [rank for rank in range(self.world.size) if rows[rank]]
        what = f"{self._skipped_in_a_row} steps in a row were skipped, because gradients were NaN or infinite"
        if 0 < len(bad) < self.world.size:
            raise TrainingError(
                f"{what}: weights of {names_of(bad)} are NaN or infinite, and those of the other ranks are not",
                cause="only some ranks changed their weights, or the memory of a machine is damaged",
                next_step="resume from the last checkpoint, without that machine if it happens again",
            )
        if self.world.rank == 0:
            print(
                f"topkube: warning: {what}. {'The weights are too. ' if bad else ''}Likely cause: the learning rate or"
                " the loss scale is too high, or batches contain NaN. Next: check the data; resume from the last"
                " checkpoint with a lower learning rate.",
                file=sys.stderr,
                flush=True,
            )

    def _report_weights(self, digest: float, equal: bool, first: bool) -> None:
        self.weights.differing = 0
        if not equal:
            difference = self.turns.run_agreement(lambda ranks: self.weights.describe_difference(ranks, digest, first))
            self.weights.report(difference, first, self.world.rank)


def _read(flag: bool | DeviceFlag) -> bool:
    return flag if isinstance(flag, bool) else flag.read()


def _done(finite: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(finite)
    return future
