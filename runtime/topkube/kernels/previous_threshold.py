"""The threshold of the previous selection, which is usually near the threshold of the next selection."""

from __future__ import annotations

from typing import Any

from topkube.errors import ArgumentError
from topkube.kernels.cuda_library import PREVIOUS_BYTES


class PreviousThreshold:
    """The k-th magnitude of the previous selection from an array (such as a shard of a bucket), for the next selection.

    If a selection on a GPU gets this object, it starts from the stored magnitude and takes no sample of the data. At
    its end the selection stores its own k-th magnitude. The result is exact in every case. If the stored magnitude was
    too far away, the selection reads the data again (4 passes over memory instead of 1), and the next selection takes a
    sample. A selection also takes a sample if the previous selection had another k or was from an array of another
    length. Kernels on the CPU do not use the object.

    RedSync (Fang et al., 2019) and Ok-Topk (Li and Hoefler, 2022) reuse a threshold for some steps and accept that the
    number of selected entries differs from k. This class only reuses it to find candidates.

    device: a torch device; None on the CPU, where nothing is stored. Selections that share an object must be on one
    stream, one after another.
    """

    def __init__(self, device: Any = None) -> None:
        self._memory: Any = None
        if device is not None:
            import torch

            self._memory = torch.zeros(PREVIOUS_BYTES, dtype=torch.uint8, device=device)

    @property
    def address(self) -> int:
        """The address of the memory on the device; 0 without a device."""
        return 0 if self._memory is None else int(self._memory.data_ptr())

    def find_address(self, x: Any) -> int:
        """Return the address for a selection from the tensor `x`. Raises ArgumentError if `x` is on another device than
        the memory."""
        if self._memory is not None and self._memory.device != x.device:
            raise ArgumentError(
                f"x lies on {x.device}, previous on {self._memory.device}",
                next_step="pass PreviousThreshold(x.device), one object for each array that is selected from",
            )
        return self.address
