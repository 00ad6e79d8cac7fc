"""Mixed precision with float32 master weights: the model computes in bfloat16 or float16, the optimizer in float32
(Micikevicius et al., "Mixed Precision Training", 2018).

float16 needs torch's GradScaler, which divides the gradients of the masters by the scale, in float32:

    optimizer = topkube.DistributedOptimizer(MasterWeights(AdamW(model.parameters())), model.named_parameters())
    scaler = torch.amp.GradScaler()
    ...
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(optimizer.master_parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from topkube.errors import ArgumentError, TrainingError
from topkube.training.optimizers.layerwise import evaluate_closure
from topkube.training.optimizers.tensor_changes import (
    Checksum,
    Snapshot,
    compute_checksum,
    compute_checksums,
    find_changed,
)
from topkube.training.optimizers.wrapper import OptimizerWrapper

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class _Pair:
    """A 16-bit parameter of the model and its float32 master."""

    parameter: torch.Tensor
    master: torch.Tensor
    taken: Snapshot | None = None
    """The 16-bit gradient that was copied last."""
    norm: torch.Tensor | None = None
    """The norm of the master's gradient right after that copy; None after a step, which consumes the gradient. It shows
    whether GradScaler has divided the gradient, an operation that does not raise the tensor's version."""
    written: Checksum | None = None
    """The checksum of `parameter` when it was last computed from the master, or the master from it; None if it is not
    known."""

    def has_changed_master(self) -> bool:
        """Return True if the master's gradient was written, or removed, between the last copy and the next step."""
        if self.norm is None:
            return False
        if self.master.grad is None:
            return True
        return not torch.allclose(self.master.grad.norm(), self.norm, rtol=1e-5, atol=0, equal_nan=True)

    def forget_gradient(self) -> None:
        """Note that the gradient of the master is not that of the parameter any more, or was zeroed."""
        self.taken = self.norm = None

    def __getstate__(self) -> dict[str, Any]:
        return {"parameter": self.parameter, "master": self.master}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class MasterWeights(OptimizerWrapper):
    """A wrapper of `optimizer` that keeps float32 masters of its 16-bit parameters. A step casts the gradients to
    float32, updates the masters, and rounds them back into the model. Both casts are one fused operation over all
    tensors.

    `param_groups` holds the masters, so schedulers, GradScaler and clipping work on float32. Reading `param_groups`,
    and `step()`, first copy the 16-bit gradients that changed since the last copy into the masters' gradients. A step
    also takes weights that the script wrote into the model. Checksums show writes through `.data` too.

    Use it inside DistributedOptimizer: `DistributedOptimizer(MasterWeights(LARS(model.parameters(), ...)), ...)`.
    Wrap before the first step. The state dict holds the masters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise ArgumentError(
                "the optimizer has taken steps: its state belongs to 16-bit weights",
                next_step="wrap the optimizer before its first step, or load its state afterwards",
            )
        super().__init__(optimizer)
        self._pairs: list[_Pair] = []
        for group in optimizer.param_groups:
            group["params"] = [self._make_master(parameter) for parameter in group["params"]]

    def _make_master(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.dtype not in _NARROW:
            return parameter
        master = parameter.detach().float().requires_grad_()
        self._pairs.append(_Pair(parameter, master))
        return master

    # ---- what schedulers, scalers and clipping read

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups: float32 masters and the model's wide parameters, with their gradients."""
        self.take_gradients()
        return self.inner.param_groups

    def master_parameters(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer updates: float32 masters and the model's wide parameters. Clip these
        after `scaler.unscale_(optimizer)`."""
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def find_master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the master of a 16-bit parameter of the model; another parameter itself."""
        return next((pair.master for pair in self._pairs if pair.parameter is parameter), parameter)

    def exchanged_parameters(self) -> list[torch.Tensor]:
        """Return the model's own parameters, 16-bit and wide, in the order of the groups."""
        narrow = {id(pair.master): pair.parameter for pair in self._pairs}
        return [narrow.get(id(tensor), tensor) for group in self.inner.param_groups for tensor in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        parameters = param_group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.inner.add_param_group({**param_group, "params": [self._make_master(tensor) for tensor in parameters]})

    # ---- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. Raises TrainingError if gradients of the 16-bit parameters were changed after GradScaler had
        unscaled those of the masters."""
        loss = evaluate_closure(closure)
        self._copy_gradients(self._find_written(also_used=True))
        self.take_weights()
        self.inner.step()
        self.write_weights()
        for pair in self._pairs:
            pair.norm = None
        return loss

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy the 16-bit gradients that are new or were written since the last copy."""
        copied = self._copy_gradients(self._find_written())
        gradients = [pair.master.grad for pair in copied if pair.master.grad is not None]
        norms = torch._foreach_norm(gradients) if gradients else ()
        for pair, norm in zip(copied, norms, strict=True):
            pair.norm = norm

    def _copy_gradients(self, written: list[bool]) -> list[_Pair]:
        """Copy the 16-bit gradients that are new, and those of the pairs for which `written` is True. Return the pairs
        whose gradients were copied."""
        copied: list[_Pair] = []
        for pair, was_written in zip(self._pairs, written, strict=True):
            gradient, taken = pair.parameter.grad, pair.taken
            if gradient is None:
                if taken is not None:
                    pair.forget_gradient()
                    pair.master.grad = None
            elif taken is None or was_written:
                # A new gradient tensor is a new backward. The same tensor, written again, was clipped.
                clipped = taken is not None and taken.is_same_tensor(gradient)
                if clipped and pair.has_changed_master():
                    raise TrainingError(
                        "gradients of 16-bit parameters changed after the gradients of their float32 masters had",
                        cause="clip_grad_norm_(model.parameters()) after scaler.unscale_(optimizer), a second"
                        " backward() after it, or model.zero_grad() in place of optimizer.zero_grad()",
                        next_step="clip the masters: clip_grad_norm_(optimizer.master_parameters(), max_norm)",
                    )
                copied.append(pair)
        if not copied:
            return []
        gradients, copies = [], []
        for pair in copied:
            assert pair.parameter.grad is not None
            if pair.master.grad is None:
                pair.master.grad = torch.empty_like(pair.master)
            gradients.append(pair.parameter.grad)
            copies.append(pair.master.grad)
        for pair, gradient, checksum in zip(copied, gradients, compute_checksums(gradients), strict=True):
            pair.taken = Snapshot(gradient, checksum)
        torch._foreach_copy_(copies, gradients)
        return copied

    def _find_written(self, *, also_used: bool = False) -> list[bool]:
        """Return True for each pair whose 16-bit gradient was written or replaced since it was copied. Without
        `also_used`, gradients that a step has used are compared by their versions only, which reads nothing."""
        written = [pair.taken is not None and not pair.taken.is_unchanged(pair.parameter.grad) for pair in self._pairs]
        compared = [
            (number, pair.parameter.grad, pair.taken.checksum)
            for number, pair in enumerate(self._pairs)
            if pair.taken is not None
            and pair.parameter.grad is not None
            and not written[number]
            and (also_used or pair.norm is not None)
        ]
        changed = find_changed([(gradient, checksum) for _, gradient, checksum in compared])
        for (number, _, _), is_changed in zip(compared, changed, strict=True):
            written[number] = is_changed
        return written

    @torch.no_grad()
    def write_weights(self) -> None:
        """Write the masters into the model, rounded to nearest even."""
        if self._pairs:
            torch._foreach_copy_([pair.parameter for pair in self._pairs], [pair.master for pair in self._pairs])
        checksums = compute_checksums([pair.parameter for pair in self._pairs])
        for pair, checksum in zip(self._pairs, checksums, strict=True):
            pair.written = checksum

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy weights that something other than `step()` wrote into the model, such as a broadcast, a loaded state
        dict or a clamp, to the masters. Elements that still equal the rounded master keep the precision of the
        master."""
        changed = find_changed([(pair.parameter, pair.written) for pair in self._pairs])
        for pair, is_changed in zip(self._pairs, changed, strict=True):
            if is_changed:
                # The script may have moved the model to a device after the optimizer was wrapped.
                is_rounded = (pair.parameter == pair.master.to(pair.parameter)).to(pair.master.device)
                pair.master.copy_(torch.where(is_rounded, pair.master, pair.parameter.to(pair.master)))
                pair.written = compute_checksum(pair.parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of the model and of the masters."""
        self.inner.zero_grad(set_to_none)
        for pair in self._pairs:
            pair.forget_gradient()
            if pair.parameter.grad is None:
                continue
            if set_to_none:
                pair.parameter.grad = None
            else:
                pair.parameter.grad.zero_()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with the masters under "masters" in the order of the parameters."""
        return {**self.inner.state_dict(), "masters": [pair.master.detach().clone() for pair in self._pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. A state without masters (of a plain optimizer) leaves the masters as
        they are."""
        state = dict(state_dict)
        masters = state.pop("masters", None)
        self.inner.load_state_dict(state)
        if masters is not None:
            if [tuple(saved.shape) for saved in masters] != [tuple(pair.master.shape) for pair in self._pairs]:
                raise ArgumentError(
                    "the saved masters do not fit this model's 16-bit parameters",
                    next_step="build the same model as when the state was saved",
                )
            for pair, saved in zip(self._pairs, masters, strict=True):
                pair.master.copy_(saved)
            self.write_weights()

    def __repr__(self) -> str:
        return f"MasterWeights({self.inner!r})"
