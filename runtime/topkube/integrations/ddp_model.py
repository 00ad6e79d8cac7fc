"""The model whose buckets a hook gets. torch passes a hook neither the model nor its options."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from topkube.errors import TrainingError
from topkube.training.exchange.autograd.ddp_models import find_ddp_models


class HookedModel:
    """The model of a hook that averages over `ranks`: the check that all buckets are its own, and which of its
    parameters a backward used."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        """The parameters, by id."""
        self._is_found = False
        self.finds_unused = False
        """True if a backward may use only a part of the parameters, because the model has find_unused_parameters."""
        self._watched: set[int] = set()
        self._used: set[int] = set()
        """The ids of the parameters that have had a gradient since their last exchange."""

    def check(self, parameters: Sequence[torch.Tensor], is_first_pass: bool) -> None:
        """Check the parameters of a bucket. Raises TrainingError if they are those of another model than in the first
        pass, or if the model has another process group than the hook."""
        if not self._parameters:
            self._find(parameters[0])
        if is_first_pass and not self._is_found:
            self._add(parameters)
        reference = self._parameters.get(id(parameters[0]))
        if reference is None or reference() is not parameters[0]:
            raise TrainingError(
                "a hook got the gradients of a second model, and would mix up what was not sent of both models",
                cause="one hook of ddp_hook is registered on two models",
                next_step="call ddp_hook once per model",
            )

    def take_used(self, parameters: Sequence[torch.Tensor]) -> list[bool] | None:
        """Return for each parameter if it has had a gradient on this rank since its last exchange; None if all have.
        torch counts passes under no_sync() in the same way."""
        if not self.finds_unused:
            return None
        self._watch(parameters)
        used = [id(parameter) in self._used for parameter in parameters]
        self._used.difference_update(map(id, parameters))
        return used

    def _find(self, parameter: torch.Tensor) -> None:
        """Find the model that has `parameter`, and note its parameters and options."""
        models = find_ddp_models([parameter])
        for model in models:
            self._add(list(model.parameters()))
        self._is_found = bool(models)
        # A model that is not found, because gc.freeze() hides it, may have any options.
        self.finds_unused = not models or any(
            model.find_unused_parameters and not model.static_graph for model in models
        )
        groups = [dist.get_process_group_ranks(model.process_group) for model in models]
        if groups and self._ranks not in groups:
            raise TrainingError(
                f"the model averages its gradients over the ranks {groups[0][:16]}, and its hook over the ranks"
                f" {self._ranks[:16]}",
                cause="DistributedDataParallel and ddp_hook got different process groups",
                next_step="pass the same group to both: ddp_hook(process_group=model.process_group)",
            )

    def _add(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters.update((id(parameter), weakref.ref(parameter)) for parameter in parameters)

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note from now on when a gradient of `parameters` arrives."""
        for parameter in parameters:
            if id(parameter) in self._watched:
                continue
            self._watched.add(id(parameter))
            if parameter.grad is not None:  # so far nobody watched
                self._used.add(id(parameter))
            requires_grad = parameter.requires_grad
            parameter.requires_grad_(True)  # torch refuses hooks on a parameter that is frozen for a while
            parameter.register_hook(_build_note(parameter, self._used))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(requires_grad)


def _build_note(parameter: torch.Tensor, used: set[int]) -> Callable[[torch.Tensor | None], None]:
    """Return a hook that adds the id of `parameter` to `used`. It runs before the gradient is accumulated, and so
    before the hooks of DistributedDataParallel."""
    key, reference = id(parameter), weakref.ref(parameter)

    def note(gradient: torch.Tensor | None) -> None:
        # A part of the graph that the loss does not use has no gradient. torch then counts an older gradient as used.
        if gradient is not None or ((own := reference()) is not None and own.grad is not None):
            used.add(key)

    return note
