"""Hooks on the accumulation of gradients: they see only what `backward()` adds to `.grad`.

The hooks are on the nodes of the graph that accumulate, not on the parameters. `torch.autograd.grad` accumulates
nothing, so it does not run them, and copies of a model do not have them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from topkube.errors import ArgumentError
from topkube.training.exchange.buckets.parameter import Parameter

_owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]] = {}
"""The exchange that a tensor belongs to, by the tensor's id."""


class GradientReceiver(Protocol):
    """The exchange that the hooks call."""

    def prepare_gradient(self, parameter: Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Prepare the accumulation of a gradient. Return its replacement, or None to accumulate the gradient itself."""

    def take_gradient(self, parameter: Parameter, arrived: torch.Tensor | None) -> None:
        """Note that a gradient was accumulated. `arrived` is the tensor that autograd holds until this call returns;
        None if hooks of the script may have kept it."""


@dataclass(slots=True)
class ExpectedGradients:
    """What is known when a backward begins. A hook then has little to do: between two operations of backward, most of
    what Python touches leaves the caches."""

    task: int = -1
    """The number of the backward pass; -1 if nothing is known."""
    are_first: bool = False
    """True if no parameter had a gradient when backward began, and gradients are not weighed."""
    are_only_read: bool = False
    """True if nothing happens to gradients before the end of backward."""


class GradientHooks:
    """Two hooks per parameter, before and after a gradient is accumulated. They hold a weak reference to the exchange,
    and end with it and its optimizer.

    Hooks of the script (`register_post_accumulate_grad_hook`) run at the end of a backward that exchanges, and see
    aggregated gradients: torch would run them before the exchange. Under `no_sync()` they do not run.

    Raises ArgumentError if a parameter belongs to another distributed optimizer.
    """

    def __init__(self, exchange: GradientReceiver, parameters: list[Parameter]) -> None:
        self._exchange = weakref.ref(exchange)
        self.expected = ExpectedGradients()
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # torch drops a node and its hooks if there is no reference to it
        self._deferred: dict[int, tuple[Parameter, dict[int, Callable[[torch.Tensor], None]]]] = {}
        self.add(parameters)
        weakref.finalize(self, _remove, self._handles)

    def add(self, parameters: list[Parameter]) -> None:
        """Hook these parameters too."""
        for parameter in parameters:
            if is_owned(parameter.tensor):
                gc.collect()  # only a reference cycle may keep the owner alive: schedulers create cycles
            if is_owned(parameter.tensor):
                raise ArgumentError(
                    f"parameter {parameter.name} belongs to another distributed optimizer",
                    cause="the model was wrapped twice: its gradients would be exchanged twice",
                    next_step="wrap the model once, or call unwrap() on the first distributed optimizer",
                )
        for key in [key for key, (tensor, _) in _owners.items() if tensor() is None]:
            del _owners[key]
        for parameter in parameters:
            _owners[id(parameter.tensor)] = weakref.ref(parameter.tensor), self._exchange
            self._hook(parameter)

    def remove(self) -> None:
        """Remove all hooks. The parameters then belong to no optimizer."""
        _remove(self._handles)
        self._handles.clear()
        self._nodes.clear()
        for key in [key for key, (_, owner) in _owners.items() if owner is self._exchange]:
            del _owners[key]

    def _hook(self, parameter: Parameter) -> None:
        exchange, hooks, tensor, expected = self._exchange, weakref.ref(self), parameter.tensor, self.expected
        find_task, dtype = torch._C._current_graph_task_id, parameter.gradient_dtype

        def before_accumulation(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
            gradient = gradients[0]
            if (
                expected.are_first
                and expected.task == find_task()
                and gradient is not None
                and gradient.dtype is dtype
                and not (gradient.is_sparse or parameter.has_rows or gradient.is_neg() or gradient.is_conj())
                and tensor.requires_grad
                and tensor.grad is None  # otherwise the script has assigned it during this backward
                and not tensor._post_accumulate_grad_hooks
            ):
                parameter.grad_was_none = True
                return None
            owner = exchange()
            if owner is None:
                return None
            replacement = owner.prepare_gradient(parameter, gradient)
            if tensor._post_accumulate_grad_hooks and (own := hooks()) is not None:
                own._defer(parameter)
            return None if replacement is None else (replacement,)

        def after_accumulation(_: Any, gradients: tuple[torch.Tensor | None, ...]) -> None:
            if expected.are_only_read and expected.task == find_task():
                return
            owner = exchange()
            if owner is not None:
                is_seen = tensor._backward_hooks or len(node_hooks() or ()) > 1  # a hook of the script may keep it
                owner.take_gradient(parameter, None if is_seen else gradients[0])

        frozen = not tensor.requires_grad
        tensor.requires_grad_(True)  # a frozen parameter has no node; it may be unfrozen later
        node: Any = get_gradient_edge(tensor).node
        tensor.requires_grad_(not frozen)
        self._nodes.append(node)
        after = node.register_hook(after_accumulation)
        node_hooks = after.hooks_dict_ref
        self._handles += [node.register_prehook(before_accumulation), after]

    def _defer(self, parameter: Parameter) -> None:
        hooks: Any = parameter.tensor._post_accumulate_grad_hooks
        self._deferred[parameter.index] = parameter, dict(hooks)
        hooks.clear()

    @property
    def are_deferred(self) -> bool:
        """True if hooks of the script wait for the end of this backward."""
        return bool(self._deferred)

    def restore(self) -> list[Parameter]:
        """Restore the script's hooks. Return the parameters that have hooks."""
        deferred, self._deferred = self._deferred, {}
        for parameter, hooks in deferred.values():
            existing: Any = parameter.tensor._post_accumulate_grad_hooks
            existing.update(hooks)
        return [parameter for parameter, _ in deferred.values()]

    def run_deferred(self, exchanged: bool) -> list[Parameter]:
        """Run the script's hooks on the aggregated gradients, if this backward `exchanged` any. Returns the parameters
        whose hooks ran."""
        parameters = self.restore()
        if not exchanged:
            return []
        for parameter in parameters:
            hooks: Any = parameter.tensor._post_accumulate_grad_hooks
            for hook in list(hooks.values()):
                if parameter.tensor.grad is not None:
                    hook(parameter.tensor)
        return parameters


def is_owned(tensor: torch.Tensor) -> bool:
    """Return True if a distributed optimizer of this process exchanges the gradients of a parameter."""
    owned, owner = _owners.get(id(tensor), (None, None))
    return owned is not None and owner is not None and owned() is tensor and owner() is not None


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
