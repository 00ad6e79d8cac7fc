"""Gradients of several backwards in one `.grad`: what this rank adds, and what an exchange has already delivered."""

from __future__ import annotations

import torch

from topkube.errors import TrainingError
from topkube.training.batches.uneven_batches import UnevenBatches
from topkube.training.exchange.buckets.bucket_plan import BucketPlan
from topkube.training.exchange.buckets.parameter import Parameter, is_sharded
from topkube.training.exchange.reduction.residuals import Residuals


class Accumulation:
    """The accumulation of the gradients of `parameters`. A gradient that was exchanged before is set aside, so that the
    next exchange sends only what this rank has added since. Gradients count by the samples of their batch, which
    `batches` holds. Those that the script assigned count by the samples of the batch that was announced last."""

    def __init__(
        self, parameters: list[Parameter], batches: UnevenBatches, plan: BucketPlan, residuals: Residuals
    ) -> None:
        self._parameters, self._batches, self._plan, self._residuals = parameters, batches, plan, residuals
        self._scale = 1.0
        """The factor for gradients of this backward, by the share of this rank's samples."""

    def begin_backward(self) -> None:
        """Undo the exchanges of gradients that the script has discarded, and read the factor of the announced batch."""
        self._undo_discarded()
        self._take_assigned()
        self._scale = self._batches.find_scale()
        self._weigh_assigned()

    @property
    def weighs(self) -> bool:
        """True if gradients of this backward are scaled by the share of this rank's samples."""
        return self._scale != 1

    @staticmethod
    def begin_anew(parameter: Parameter) -> None:
        """Note that a parameter has no gradient when a backward begins."""
        parameter.is_aggregated, parameter.stash = False, None
        parameter.grad_was_none = parameter.is_weightless = False

    def prepare(self, parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Prepare `.grad` for a gradient that torch is about to add. Return the gradient's replacement, or None to add
        the gradient itself. Raises TrainingError for a gradient of another dtype or layout than before."""
        if gradient.dtype != parameter.gradient_dtype or gradient.is_sparse or parameter.has_rows:
            self._check_layout(parameter, gradient)
        self._set_aside_delivered(parameter)
        if gradient.is_conj() or gradient.is_neg():
            return self._weigh(parameter, gradient.resolve_conj().resolve_neg(), is_replacement=True)
        return self._weigh(parameter, gradient)

    @staticmethod
    def _set_aside_delivered(parameter: Parameter) -> None:
        """If an exchange has delivered the `.grad` of a parameter, move it to the parameter's stash."""
        if parameter.tensor.grad is None:
            parameter.is_aggregated, parameter.stash = False, None
        elif parameter.is_aggregated and parameter.holds_delivered:
            parameter.stash, parameter.is_aggregated, parameter.tensor.grad = parameter.tensor.grad, False, None
        else:  # accumulated under no_sync(), or assigned by the script: this rank's own
            parameter.is_aggregated = False

    def _weigh(self, parameter: Parameter, gradient: torch.Tensor, is_replacement: bool = False) -> torch.Tensor | None:
        """Scale a gradient by the share of this rank's samples. Return the replacement of torch's gradient; None if
        there is none. With `is_replacement`, `gradient` already replaces torch's gradient."""
        parameter.grad_was_none = parameter.tensor.grad is None
        scale = self._scale
        if scale == 0:
            parameter.is_weightless = parameter.tensor.grad is None and parameter.stash is None
            return torch.zeros_like(gradient)  # 0 * NaN would be NaN
        parameter.is_weightless = False
        if scale != 1:
            return gradient * scale
        return gradient if is_replacement else None

    def _check_layout(self, parameter: Parameter, gradient: torch.Tensor) -> None:
        if gradient.dtype != parameter.gradient_dtype:
            raise TrainingError(
                f"the gradient of {parameter.name} has dtype {gradient.dtype}, and not {parameter.gradient_dtype} as"
                " when the optimizer was wrapped",
                cause="grad_dtype of the parameter was changed after that, or it is None",
                next_step="set grad_dtype on every rank before you create the DistributedOptimizer",
            )
        bucket = self._plan.find_bucket(parameter)
        if bucket is None:
            parameter.has_rows = parameter.has_rows or gradient.is_sparse
        elif bucket.has_rows != gradient.is_sparse and bucket.length:  # a bucket without elements sends nothing
            if not self._plan.is_agreed:  # buckets of a loaded order: they are planned again
                parameter.has_rows = gradient.is_sparse
                return
            raise TrainingError(
                f"the gradient of {parameter.name} has layout {gradient.layout}, but had another layout before",
                cause="an embedding whose weight is used both sparsely (sparse=True) and densely",
                next_step="use sparse=False for it",
            )

    def adopt_assigned(self) -> None:
        """Take the gradients that the script assigned as this rank's own, for an exchange without a backward, and scale
        them by the share of this rank's samples."""
        self._scale = self._batches.find_scale()
        if self._residuals.are_tentative:
            self._residuals.discard_parameters(lambda parameter: not parameter.holds_delivered)
        for parameter in self._parameters:
            if parameter.tensor.grad is None:
                parameter.is_aggregated, parameter.stash = False, None
            elif not parameter.holds_delivered:
                parameter.has_rows = parameter.has_rows or parameter.tensor.grad.is_sparse
        self._take_assigned()
        self._weigh_assigned()

    def _take_assigned(self) -> None:
        """Take the gradients that the script assigned as this rank's own, also those of parameters that this backward
        does not use. Copy views that cannot be written: expanded tensors, and tensors that torch conjugates or negates
        when they are read."""
        for parameter in self._parameters:
            gradient = parameter.tensor.grad
            if gradient is None or parameter.holds_delivered:
                continue
            parameter.is_aggregated = False
            if _is_lazy_view(gradient):
                resolved = gradient.detach().resolve_conj().resolve_neg()
                parameter.replace_gradient(resolved.clone(memory_format=torch.contiguous_format))

    def _weigh_assigned(self) -> None:
        """Scale the gradients that the script assigned and that no backward has scaled since the last exchange."""
        if not self.weighs:
            return
        for parameter in self._parameters:
            gradient = parameter.tensor.grad
            if gradient is not None and not parameter.is_weighed and not parameter.holds_delivered:
                parameter.is_weightless = self._scale == 0
                weighed = torch.zeros_like(gradient) if self._scale == 0 else gradient.detach() * self._scale
                parameter.replace_gradient(weighed)  # the script may have assigned one tensor to several parameters
                parameter.is_weighed = True

    def _undo_discarded(self) -> None:
        """Undo the exchanges of gradients that the script has discarded since: it has set some of them to None, or all
        of them to None or zeros."""
        for parameter in self._parameters:
            if parameter.stash is not None and parameter.is_discarded:
                parameter.stash = None
        if self._residuals.are_tentative:
            if all(parameter.is_discarded for parameter in self._parameters):
                self._residuals.discard()
            else:
                self._residuals.discard_parameters(lambda parameter: parameter.tensor.grad is None)

    def forget(self) -> None:
        """Note that gradients were zeroed: changes of residuals since the last step are undone."""
        self._residuals.discard()
        for parameter in self._parameters:
            parameter.forget()

    def commit(self) -> None:
        """Note that the optimizer made its step: changes of residuals become final."""
        if self._residuals.are_tentative:
            self._residuals.discard_parameters(lambda parameter: parameter.tensor.grad is None)
        self._residuals.commit()
        self._note_used()

    def discard(self) -> None:
        """Note that the optimizer skipped its step: changes of residuals are undone."""
        self._residuals.discard()
        self._note_used()

    def _note_used(self) -> None:
        for parameter in self._parameters:
            parameter.is_exchanged = False


def _is_lazy_view(gradient: torch.Tensor) -> bool:
    """Return True if several elements of a strided tensor have one place in memory, or if its memory holds the
    conjugates or the negatives of its values."""
    if is_sharded(gradient) or gradient.layout is not torch.strided:
        return False
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True))
    return is_expanded or gradient.is_conj() or gradient.is_neg()
