"""The number of tensors that use the same memory."""

from __future__ import annotations

import sys

import torch


def _count_users(tensor: torch.Tensor) -> int:
    """Return how often torch refers to the memory of a tensor, plus how often Python does."""
    storage = tensor.untyped_storage()  # this handle counts as a user: it must exist while torch counts
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


def _count_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often torch and Python refer to the tensor of which `tensor` is a view."""
    base: torch.Tensor = tensor._base  # type: ignore[assignment]
    return base._use_count(), sys.getrefcount(base)  # type: ignore[attr-defined]


with torch.inference_mode(False):  # the first import may be inside inference mode, where views have no base
    _USERS_OF_OWN_STORAGE = _count_users(torch.zeros(1, device="cpu"))
    """The count of a storage that a single tensor uses: the tensor, and the handle of the query."""
    _HOLDERS_OF_BASE = (
        _count_holders(torch.zeros(1, device="cpu").view(1, 1)) if hasattr(torch.Tensor, "_use_count") else None
    )
    """What `_count_holders` returns for a view that alone refers to its base; None if torch does not count."""


def is_shared(tensor: torch.Tensor, allowed: torch.Tensor | None = None, others: int = 0) -> bool:
    """Return True if more than `others` other tensors use the memory of this tensor. The tensor `allowed` does not
    count. If `allowed` is a view, the tensor of which it is a view does not count either, unless something else refers
    to that tensor."""
    users = _count_users(tensor) - _USERS_OF_OWN_STORAGE - others
    if users <= 0 or allowed is None or allowed is tensor:
        return users > 0
    if tensor.untyped_storage()._cdata != allowed.untyped_storage()._cdata:
        return True
    if users == 2 and _HOLDERS_OF_BASE is not None and allowed._base is not None:
        return _count_holders(allowed) != _HOLDERS_OF_BASE
    return users > 1
