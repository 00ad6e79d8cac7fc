"""The number of tensors that use the same memory."""

from __future__ import annotations

import torch


def _count_users(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()  # this handle counts as a user: it must exist while torch counts
    return int(torch._C._storage_Use_Count(storage._cdata))


_USERS_OF_OWN_STORAGE = _count_users(torch.zeros(1))
"""The use count of a storage that a single tensor uses: the tensor, and the handle of the query."""


def is_shared(tensor: torch.Tensor, others: int = 0) -> bool:
    """Return True if more than `others` other tensors use the memory of this tensor."""
    return _count_users(tensor) > _USERS_OF_OWN_STORAGE + others
