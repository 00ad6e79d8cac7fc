"""Changes of tensors, also those that do not raise a tensor's version: writes through `.data`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch.utils.weak import TensorWeakRef

from topkube.training.exchange.buckets.parameter import view_real
from topkube.training.exchange.step.weights_check import view_bytes

Checksum = int | torch.Tensor
"""A checksum of a tensor's values. For a tensor on a device, it is a tensor there, which the host has not read."""


class Snapshot:
    """The identity, the version and the checksum of a tensor, to detect that the tensor was replaced or written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = TensorWeakRef(tensor), tensor._version
        self.checksum = compute_checksum(tensor)

    def is_same_tensor(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._tensor() is tensor

    def is_unchanged(self, tensor: torch.Tensor | None) -> bool:
        """Return True if torch has noticed no change. Writes through `.data` change only the checksum."""
        return self.is_same_tensor(tensor) and tensor is not None and self._version == tensor._version


@torch.no_grad()
def compute_checksum(tensor: torch.Tensor) -> Checksum:
    """Return a checksum of the values of a tensor: a hash of its bytes; on a device, the bits of its sum in float64,
    which is one launch."""
    values = view_real(tensor)
    if values.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(view_bytes(values))
    return values.sum(dtype=torch.float64).view(torch.int64)


@torch.no_grad()
def find_changed(tensors: Iterable[tuple[torch.Tensor, Checksum | None]]) -> list[bool]:
    """Return True for each tensor whose values do not have its checksum, and if the checksum is None. Waits for a
    device once."""
    equal = [checksum is not None and compute_checksum(tensor) == checksum for tensor, checksum in tensors]
    on_device = [entry for entry in equal if isinstance(entry, torch.Tensor)]
    if on_device:
        read = iter(torch.stack([entry.to(on_device[0].device) for entry in on_device]).tolist())
        equal = [next(read) if isinstance(entry, torch.Tensor) else entry for entry in equal]
    return [not entry for entry in equal]
