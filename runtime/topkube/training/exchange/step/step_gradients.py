"""The gradients that the optimizer's next step uses. All ranks agree if the gradients are finite; otherwise all ranks
skip the step."""

from __future__ import annotations

from topkube.collectives.device.memory import DeviceFlag
from topkube.errors import TrainingError
from topkube.training.exchange.buckets.bucket_plan import BucketPlan
from topkube.training.exchange.buckets.parameter import Parameter, view_real
from topkube.training.exchange.reduction.bucket_exchange import BucketExchange
from topkube.training.exchange.reduction.sparse_gradients import fill_with_nan, is_finite
from topkube.training.exchange.settings_in_force import SettingsInForce
from topkube.training.exchange.step.device_decisions import DeviceDecisions, StepDecision
from topkube.training.exchange.step.weights_comparison import WeightsComparison
from topkube.training.ranks.agreement import name_ranks
from topkube.training.ranks.queued_agreement import QueuedAgreement
from topkube.training.reporting.norms import Norms
from topkube.training.reporting.warning import warn

_MANY_SKIPPED = 16
"""Skipped steps in a row that are reported; then twice as many, and so on. A GradScaler that begins with its usual
factor of 65,536 skips 16 at most before the factor is 1."""


class StepGradients:
    """The gradients of `parameters` between a backward and the optimizer's step.

    `skipped_steps` is the number of steps that all ranks skipped; a step about which the device decides counts as an
    update until `settle`. `norms`, if set, measures exchanged gradients.
    """

    def __init__(
        self,
        agreement: QueuedAgreement,
        parameters: list[Parameter],
        exchange: BucketExchange,
        plan: BucketPlan,
        in_force: SettingsInForce,
        weights: WeightsComparison,
    ) -> None:
        self.skipped_steps = 0
        self.norms: Norms | None = None
        self.decisions = DeviceDecisions()
        self._agreement, self._parameters, self._exchange, self._plan = agreement, parameters, exchange, plan
        self._in_force, self._weights = in_force, weights
        self._are_nonfinite = False
        """True if the next step must be skipped."""
        self._were_nonfinite = False
        """True if the last backward ended with gradients that were not finite."""
        self._was_skipped = False
        """True if the last step was skipped, and its gradients may still be there."""
        self._skipped_in_a_row = 0
        self._next_report = _MANY_SKIPPED
        """The number of skipped steps in a row that is reported next."""

    # ---- during a backward

    def begin_backward(self, has_gradients: bool) -> None:
        """Begin a backward. `has_gradients` is True if its gradients add up with gradients of earlier backwards."""
        if self.decisions.is_undecided and has_gradients:  # the host needs the first decision now
            self.settle()
        self.decisions.end_current()
        if not has_gradients:
            self._are_nonfinite = self._were_nonfinite = False

    @property
    def measures_norms(self) -> bool:
        """True if the norms of the next gradients are measured."""
        return self.norms is not None and self.norms.is_due

    @property
    def may_leave_to_device(self) -> bool:
        """True if this rank's host need not read if the gradients are finite, and the optimizer can skip its step on
        the device. The first step of all ranks is different: they compare their weights if they make it."""
        if not self.decisions.are_possible or self._are_nonfinite:
            return False
        return not self.measures_norms and not self._weights.is_first_due

    def end_backward(self, nonfinite: bool | DeviceFlag, has_idle: bool, may_differ: bool = False) -> None:
        """Accept the exchanged gradients, or reject them on all ranks if they are `nonfinite`: the same on all ranks.
        `has_idle` is True if a rank did not use one of its parameters. `may_differ` is True if other ranks may have a
        flag in place of the bool, or the reverse. All ranks call this together."""
        if self._skipped_in_a_row >= self._next_report:  # of earlier backwards, about which all ranks know the same
            self._next_report *= 2
            self._report_skipped_steps()
        trainable = self._plan.list_trainable()
        were_nonfinite, self._were_nonfinite = self._are_nonfinite, nonfinite is True
        self._was_skipped = False
        if isinstance(nonfinite, DeviceFlag):  # there are no residuals: they would depend on the answer
            self.decisions.hold(nonfinite)
            self._exchange.write_nan_if_flagged(
                nonfinite, [p.tensor.grad for p in trainable if p.tensor.grad is not None]
            )
            if has_idle:
                self._drop_unused(trainable)
        elif nonfinite:
            self._exchange.residuals.reject()
            if not were_nonfinite:
                self._note_decision(True)
            self._are_nonfinite = True
            for parameter in trainable:  # the same on every rank, so that clipping and GradScaler decide the same
                if parameter.tensor.grad is not None:
                    fill_with_nan(parameter.tensor.grad)
            if has_idle and may_differ:  # the ranks that have a flag do not know yet that gradients are not finite
                self._drop_unused(trainable)
        else:
            self._note_decision(False)
            self._exchange.residuals.accept()
            if has_idle:
                self._drop_unused(trainable)
            if self.norms is not None and self.norms.is_due:
                gradients = [p.tensor.grad for p in trainable if p.tensor.grad is not None and not p.has_rows]
                self.norms.measure(gradients, self._exchange.residuals.list_arrays())
        for parameter in trainable:
            parameter.is_weightless = parameter.is_weighed = parameter.is_created = False

    def _note_decision(self, is_skipped: bool) -> None:
        """Count a step that all ranks skip, or note that they make it."""
        self.skipped_steps += is_skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            self._next_report = _MANY_SKIPPED

    def _drop_unused(self, parameters: list[Parameter]) -> None:
        """Set the gradient of a parameter that no rank used to None, as with one process, unless its residual was
        sent."""
        idle = [parameter.is_weightless or parameter.is_created for parameter in parameters]
        used = self._agreement.maximum([not value for value in idle])
        for parameter, is_used, is_idle in zip(parameters, used, idle, strict=True):
            if is_idle and not is_used and parameter.tensor.grad is not None and parameter.is_zero:
                parameter.tensor.grad = None
                parameter.forget()

    def _report_skipped_steps(self) -> None:
        """Warn on rank 0 that training makes no steps any more. Raise TrainingError on all ranks if the weights of
        some ranks only are the cause: such a run never recovers. All ranks call this together."""
        is_bad = not all(is_finite(view_real(parameter.tensor)) for parameter in self._parameters)
        rows = self._agreement.gather([is_bad])[:, 0]
        world = self._agreement.world
        failed = [rank for rank in range(world.size) if rows[rank]]
        summary = f"{self._skipped_in_a_row} steps in a row were skipped, because gradients were NaN or infinite"
        if 0 < len(failed) < world.size:
            raise TrainingError(
                f"{summary}: weights of {name_ranks(failed)} are NaN or infinite, and those of the other ranks are not",
                cause="only some ranks changed their weights, or the memory of a machine is damaged",
                next_step="resume from the last checkpoint, without that machine if it happens again",
            )
        if world.rank == 0:
            weights_too = "The weights are too. " if failed else ""
            warn(
                f"{summary}. {weights_too}Likely cause: the learning rate or the loss scale is too high, or batches"
                " contain NaN. Next: check the data; resume from the last checkpoint with a lower learning rate."
            )

    # ---- around the optimizer's step

    def decide_step(self) -> bool:
        """Return True if the optimizer makes its step. It does not if all ranks agreed that a gradient is not finite,
        unless the script has made the gradient finite since. Also forgets that agreement: a second step with the same
        gradients reads them. If the device decides, the optimizer makes its step, which then changes nothing if a
        gradient is not finite."""
        if self.decisions.is_undecided and not self.decisions.are_possible:  # the script has changed the optimizer
            self.settle()
        is_certain = self._are_nonfinite and self._were_nonfinite
        skip = is_certain or ((self._are_nonfinite or self._was_skipped) and self._has_nonfinite())
        self._are_nonfinite, self._was_skipped = False, skip
        return not skip

    def _has_nonfinite(self) -> bool:
        return any(p.tensor.grad is not None and not is_finite(p.tensor.grad) for p in self._parameters)

    def check_exchanged(self) -> None:
        """Raise TrainingError if a gradient that the optimizer is about to use was never exchanged."""
        unexchanged = [
            p.name
            for p in self._parameters
            if p.tensor.grad is not None and not p.is_exchanged and not p.holds_delivered and p.tensor.grad.any()
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

    def settle(self) -> None:
        """Read what the device has decided, which may wait for it, and correct the numbers of steps."""
        for earlier in self.decisions.take_earlier():
            self._count(earlier)
        current = self.decisions.take_current()
        if current is not None:
            self._were_nonfinite = self._count(current)
            # If the optimizer has launched its step, the device has skipped that step already.
            self._are_nonfinite = self._were_nonfinite and not current.steps
            self._was_skipped = self._were_nonfinite and current.steps > 0

    def _count(self, decision: StepDecision) -> bool:
        """Correct the numbers of steps. Return True if the gradients were not finite."""
        is_nonfinite = decision.flag.read()
        self._note_decision(is_nonfinite)
        if is_nonfinite:
            self._in_force.retract(decision.steps)
            if decision.steps:
                self._weights.withdraw()  # as on ranks that have read the flag earlier
        return is_nonfinite

    def forget(self) -> None:
        """Note that gradients were zeroed."""
        self.decisions.end_current()
        self._are_nonfinite = self._were_nonfinite = self._was_skipped = False
