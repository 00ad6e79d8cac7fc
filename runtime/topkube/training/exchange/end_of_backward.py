"""The end of a backward pass: the exchanges and decisions of all ranks before `backward()` returns."""

from __future__ import annotations

import math
import time

import torch

from topkube.algorithms import Choice
from topkube.collectives.device.memory import DeviceFlag
from topkube.training.exchange.autograd.backward_pass import current_pass
from topkube.training.exchange.bucket_queue import BucketQueue, read_exchange_seconds
from topkube.training.exchange.buckets.bucket import Bucket
from topkube.training.exchange.buckets.bucket_plan import BucketPlan
from topkube.training.exchange.buckets.parameter import Parameter
from topkube.training.exchange.end_agreement import EndReport, agree_at_end
from topkube.training.exchange.late.late_updates import LateUpdates
from topkube.training.exchange.reduction.bucket_exchange import BucketExchange
from topkube.training.exchange.settings_in_force import SettingsInForce
from topkube.training.exchange.step.step_gradients import StepGradients
from topkube.training.exchange.step.weights_comparison import WeightsComparison
from topkube.training.ranks import communication_thread
from topkube.training.ranks.queued_agreement import QueuedAgreement


class EndOfBackward:
    """The end of every backward of one optimizer: the remaining buckets are exchanged, all ranks agree if the gradients
    are finite, and the choice behind `auto` or `dense` is corrected. `density_used` is the density of the last
    exchange."""

    def __init__(
        self,
        parameters: list[Parameter],
        agreement: QueuedAgreement,
        plan: BucketPlan,
        exchange: BucketExchange,
        in_force: SettingsInForce,
        queue: BucketQueue,
        gradients: StepGradients,
        weights: WeightsComparison,
    ) -> None:
        self.density_used = 1.0
        self._parameters, self._agreement, self._plan, self._exchange = parameters, agreement, plan, exchange
        self._in_force, self._queue, self._gradients, self._weights = in_force, queue, gradients, weights

    def run(self, seen: list[int], late: LateUpdates | None, are_hooks_deferred: bool) -> None:
        """Exchange the remaining buckets, and agree on the step. All ranks call this together.

        `seen` holds the indices of the parameters without a bucket whose gradients this backward has produced; `late`
        is what the next forward finishes, with DeAR; `are_hooks_deferred` is True if hooks of the script still wait."""
        unplanned = (p for p in reversed(self._parameters) if p.is_local and self._plan.find_bucket(p) is None)
        seen = [*seen, *(parameter.index for parameter in unplanned)]
        if not self._plan.is_agreed:
            self._agree_on_plan(seen)
        self._gradients.settle()
        self.density_used = self._in_force.density
        self._queue.hand_over_rest()
        digest = self._weights.take_digest()
        nonfinite, left_out_buckets = self._queue.finish()
        may_differ = isinstance(nonfinite, DeviceFlag)  # between ranks: their hosts may read it or leave it
        can_gather_late = late is not None and not are_hooks_deferred and self._can_gather_late(late)
        own_report = self._report(nonfinite is True, seen, digest, late is not None, can_gather_late)
        agreed = agree_at_end(self._agreement, self._plan.comparison, own_report)
        has_idle, can_gather_late = agreed.has_idle, agreed.can_gather_late
        if isinstance(nonfinite, bool):
            nonfinite = agreed.is_nonfinite
        elif not self._gradients.may_leave_to_device:
            nonfinite = nonfinite.read()
        if self._plan.update_trainable() or agreed.has_unplanned:
            has_idle, can_gather_late = True, False
            more_nonfinite = self._exchange_new_buckets(seen, left_out_buckets)
            (any_nonfinite,) = self._agreement.maximum([_read(nonfinite) or _read(more_nonfinite)])
            nonfinite, may_differ = bool(any_nonfinite > 0), False
        if late is not None and self._exchange.reduced_parts is not None:
            if nonfinite or has_idle or not can_gather_late:
                communication_thread.run(self._exchange.reduced_parts.gather_now)
            else:
                late.begin_gathers(self._exchange.reduced_parts.take())
        self._gradients.end_backward(nonfinite, has_idle, may_differ)
        self._tune(agreed.is_saved, late)
        if digest is not None:
            self._weights.report(digest, agreed.has_equal_weights, first=False)

    def _agree_on_plan(self, seen: list[int]) -> None:
        """Plan the buckets, the same on all ranks, after the first backward since the optimizer was created or
        loaded."""
        algorithms, residuals = self._exchange.algorithms, self._exchange.residuals
        drained_steps = max(algorithms.drained_steps, int(residuals.has_loaded))
        if self._agreement.world.size > 1:  # a rank may have loaded a state for all ranks
            self._in_force.steps, drained_steps = map(
                int, self._agreement.maximum([self._in_force.steps, drained_steps])
            )
        self._plan.agree(seen)
        algorithms.begin_anew(drained_steps)
        algorithms.adopt(self._plan.tuning.choice)
        self._weights.expect_first_step()

    def _exchange_new_buckets(self, seen: list[int], left_out_buckets: list[Bucket]) -> bool | DeviceFlag:
        """Plan buckets for the parameters in `seen` that have none. Exchange these buckets, and the buckets that were
        left out because their parameters were frozen. Return True, or a flag, as `BucketQueue.exchange_more` does."""
        buckets = [*left_out_buckets, *self._plan.extend(seen)]
        return self._queue.exchange_more([bucket for bucket in buckets if self._plan.is_active(bucket)])

    def _report(
        self, is_nonfinite: bool, seen: list[int], digest: float | None, is_decoupled: bool, can_gather_late: bool
    ) -> EndReport:
        """Return what this rank reports, with the digest of its weights, if they are compared. If gathers come later
        (`is_decoupled`), they create gradients that are None now. A saved state is reported once: the note of it is
        cleared."""
        plan, trainable = self._plan, self._plan.list_trainable()
        is_saved, plan.tuning.is_saved = plan.tuning.is_saved, False
        idle = (p.is_weightless or p.is_created or (is_decoupled and p.tensor.grad is None) for p in trainable)
        return EndReport(
            is_nonfinite=is_nonfinite,
            has_idle=any(idle),
            has_unplanned=any(plan.find_bucket(self._parameters[index]) is None for index in seen),
            is_saved=is_saved,
            can_gather_late=can_gather_late,
            steps=self._in_force.steps,
            trainable_digest=plan.comparison.digest_trainable(),
            weights_digest=0.0 if digest is None else digest,
            loss_scale=self._read_host_loss_scale(),
        )

    def _read_host_loss_scale(self) -> float:
        """Return the factor of a gradient scaler on the last loss; 1 if there is none, or if the host would have to
        wait for a device to read it."""
        scale = self._queue.loss_scale
        return 1.0 if isinstance(scale, torch.Tensor) and scale.device.type != "cpu" else float(scale)

    def _can_gather_late(self, late: LateUpdates) -> bool:
        """Return True if every use of the gradients on this rank, before they are gathered, is noticed."""
        reduced_parts = self._exchange.reduced_parts
        if (
            reduced_parts is None
            or not late.can_gather_late
            or current_pass.has_several
            or self._gradients.measures_norms
        ):
            return False
        return all(part.is_in_place for part in reduced_parts.parts)

    def _is_changing(self, choice: Choice | None) -> bool:
        """Return True if the exchange of this backward was not yet that of the choice: it sent the residuals of an
        earlier one, or used its buckets, or the next step begins or ends the exchange of weights. Backwards that come
        before a step, or before skipped steps, all send the residuals."""
        begins_or_ends_weights = choice is not None and choice.algorithm.in_weights != self._in_force.in_weights
        algorithms = self._exchange.algorithms
        is_of_earlier = algorithms.large.residual is None and (algorithms.uses_residuals or self._plan.is_outdated)
        return is_of_earlier or begins_or_ends_weights

    @property
    def _sends_nothing(self) -> bool:
        """True if this rank exchanges nothing between nodes, because other nodes have fewer ranks."""
        world = self._agreement.world
        return world.nodes > 1 and world.cross_comm is None

    def _tune(self, is_saved: bool, late: LateUpdates | None) -> None:
        """Compare the exchanges so far with their prediction, when that is due, and change what `auto` or `dense`
        stands for. `is_saved` is True if a rank has saved its state since the last exchange."""
        tuning = self._plan.tuning
        if is_saved:
            tuning.note_saved()
        used_residuals = self._exchange.algorithms.uses_residuals
        # Nodes with weights of their own exchange them in the optimizer's step.
        exchange = read_exchange_seconds() if self._in_force.in_weights else self._queue.exchange_seconds
        measured = tuning.note_step(time.perf_counter(), exchange, self._is_changing(tuning.choice))
        if measured is not None and self._sends_nothing:
            measured[-2] = -math.inf  # a rank of the largest node: the least time of the others counts
        if measured is not None and tuning.decide(self._agreement.maximum(measured).tolist(), self._plan.list_sizes()):
            self._exchange.algorithms.adopt(tuning.choice)
            self._plan.is_outdated = True
        if self._plan.is_outdated and not used_residuals:  # residuals are stored by bucket
            if late is not None:
                late.finish()  # the gathers that have begun are those of the present buckets
            self._exchange.residuals.leave_buckets()
            self._plan.plan_again()


def _read(flag: bool | DeviceFlag) -> bool:
    return flag if isinstance(flag, bool) else flag.read()
