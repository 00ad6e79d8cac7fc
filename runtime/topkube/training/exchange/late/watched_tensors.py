"""The detection of uses of tensors whose values are not complete yet.

A mode of torch sees every call of torch in Python before it runs, also the reads of attributes such as `.data`. If an
argument is a registered tensor, its owner completes it first. Calls that need no values, such as `.shape`, pass.

The mode belongs to a thread. Code that does not call torch through Python (TorchScript, another thread) is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Use(Enum):
    """The use of a tensor by a call, which reads or writes its values (VALUES) or replaces its gradient (GRADIENT)."""

    VALUES = 1
    GRADIENT = 2


_ATTRIBUTES = (
    "shape dtype device layout requires_grad is_leaf ndim grad_fn is_cuda is_sparse is_meta is_quantized is_mkldnn"
    " is_xpu is_mps name output_nr retains_grad"
)
_METHODS = (
    "size dim ndimension numel nelement element_size is_floating_point is_complex get_device __len__ register_hook"
    " register_post_accumulate_grad_hook"
)
_GRADIENT: Any = torch.Tensor.grad
_WITHOUT_VALUES = {
    _GRADIENT.__get__,
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_SETS_GRADIENT = {_GRADIENT.__set__, _GRADIENT.__delete__}

_overrides: Any = torch.overrides  # it has no annotations
_owners: dict[int, Callable[[torch.Tensor, Use], None]] = {}
_thread_state = threading.local()


def register_tensors(tensors: Iterable[torch.Tensor], complete: Callable[[torch.Tensor, Use], None]) -> None:
    """Call `complete(tensor, use)` before each use of a tensor, until `forget_tensors`. The caller keeps the tensors
    alive."""
    _owners.update((id(tensor), complete) for tensor in tensors)


def forget_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Stop watching the tensors."""
    for tensor in tensors:
        _owners.pop(id(tensor), None)


class _Watch(TorchFunctionMode):
    """The mode of a thread."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _owners and func not in _WITHOUT_VALUES:
            use = Use.GRADIENT if func in _SETS_GRADIENT else Use.VALUES
            _complete(args, use)
            if kwargs:
                _complete(kwargs.values(), use)
        return func(*args, **(kwargs or {}))


def _complete(values: Iterable[Any], use: Use) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            if (complete := _owners.get(id(value))) is not None:
                complete(value, use)
        elif isinstance(value, list | tuple):
            _complete(value, use)
        elif isinstance(value, dict):
            _complete(value.values(), use)


def watch() -> None:
    """Notice uses in this thread from now on. The mode is below all modes that the script may leave later."""
    if not is_watching():
        _thread_state.watch = watch = _Watch()
        modes = _list_modes()
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # torch keeps it at the bottom
        lowest = int(bool(modes) and modes[0] is default)
        _replace_modes([*modes[:lowest], watch, *modes[lowest:]])


def unwatch() -> None:
    """Stop watching uses in this thread, if no tensor is registered."""
    if _owners:
        return
    modes = _list_modes()
    _replace_modes([mode for mode in modes if not isinstance(mode, _Watch)])
    _thread_state.watch = None


def is_watched_thread() -> bool:
    """Return True if `watch` was called in this thread. While torch runs a call, its modes are suspended."""
    return getattr(_thread_state, "watch", None) is not None


def is_watching() -> bool:
    """Return True if the calls of this thread are seen at this point."""
    return any(isinstance(mode, _Watch) for mode in _list_modes())


def _list_modes() -> list[Any]:
    """Return the modes of this thread. Calls reach the last mode first."""
    return list(_overrides._get_current_function_mode_stack())


def _replace_modes(modes: list[Any]) -> None:
    for _ in _list_modes():
        _overrides._pop_mode()
    for mode in modes:
        _overrides._push_mode(mode)
