"""Changes of tensors, also those that do not raise a tensor's version: writes through `.data`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.weak import TensorWeakRef

from topkube.training.exchange.buckets.parameter import view_real
from topkube.training.exchange.step.checksums import hash_bytes, sum_bits

Checksum = int | torch.Tensor
"""A checksum of a tensor's values. For a tensor on a device, it is a tensor there, which the host has not read."""


class Snapshot:
    """The identity, the version and the checksum of a tensor, to detect that the tensor was replaced or written."""

    def __init__(self, tensor: torch.Tensor, checksum: Checksum) -> None:
        self._tensor, self._version = TensorWeakRef(tensor), tensor._version
        self.checksum = checksum

    def is_same_tensor(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._tensor() is tensor

    def is_unchanged(self, tensor: torch.Tensor | None) -> bool:
        """Return True if torch has noticed no change. Writes through `.data` change only the checksum."""
        return self.is_same_tensor(tensor) and tensor is not None and self._version == tensor._version


@torch.no_grad()
def compute_checksum(tensor: torch.Tensor) -> Checksum:
    """Return a checksum of the values of a tensor, which also changes if values change places."""
    return compute_checksums([tensor])[0]


@torch.no_grad()
def compute_checksums(tensors: Sequence[torch.Tensor]) -> list[Checksum]:
    """Return what `compute_checksum` returns for each tensor, with fewer launches on a device."""
    values = [view_real(tensor) for tensor in tensors]
    devices = {tensor.device for tensor in values if tensor.device.type != "cpu"}
    sums = {device: iter(sum_bits([v for v in values if v.device == device])) for device in devices}
    return [hash_bytes(value) if value.device.type == "cpu" else next(sums[value.device]) for value in values]


@torch.no_grad()
def find_changed(tensors: Sequence[tuple[torch.Tensor, Checksum | None]]) -> list[bool]:
    """Return True for each tensor whose values do not have its checksum, and if the checksum is None. Waits for a
    device once."""
    now = compute_checksums([tensor for tensor, _ in tensors])
    equal = [before is not None and checksum == before for checksum, (_, before) in zip(now, tensors, strict=True)]
    on_device = [entry for entry in equal if isinstance(entry, torch.Tensor)]
    if on_device:
        read = iter(torch.stack([entry.to(on_device[0].device) for entry in on_device]).tolist())
        equal = [next(read) if isinstance(entry, torch.Tensor) else entry for entry in equal]
    return [not entry for entry in equal]
