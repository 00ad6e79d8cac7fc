"""Sums, casts and the test for NaN, on tensors of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topkube.errors import ArgumentError
from topkube.kernels.arguments import check_same_length
from topkube.kernels.cuda_library import MOST_INPUTS
from topkube.kernels.device.launches import Launches

if TYPE_CHECKING:
    import torch


class SumKernels(Launches):
    """The functions of topkube.kernels.dense on tensors of a device."""

    def sum_(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        if not 1 <= len(inputs) <= MOST_INPUTS:
            raise ArgumentError(
                f"{len(inputs)} inputs; a GPU adds 1 to {MOST_INPUTS} at once", next_step="add them in several calls"
            )
        self.check_tensor(out, "out")
        for i, x in enumerate(inputs):
            self.check_tensor(x, f"inputs[{i}]")
            check_same_length(f"inputs[{i}]", x.numel(), "out", out.numel())
            if x.dtype != inputs[0].dtype:
                raise ArgumentError(
                    f"inputs[{i}] has dtype {x.dtype}, inputs[0] has {inputs[0].dtype}",
                    next_step="pass inputs of one dtype",
                )
            self.check_apart("out", out, f"inputs[{i}]", x, same_allowed=True)
        pointers = [x.data_ptr() for x in inputs]
        device, stream = self.find_stream(out)
        self.library.sum(
            device, stream, out.data_ptr(), self.dtype_codes[out.dtype], pointers, self.dtype_codes[inputs[0].dtype],
            out.numel(), scale,
        )  # fmt: skip

    def check_copy(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Raise ArgumentError if x cannot be copied to out."""
        self.check_tensor(out, "out")
        self.check_tensor(x, "x")
        check_same_length("x", x.numel(), "out", out.numel())
        self.check_apart("out", out, "x", x)

    def flag_finite(self, x: torch.Tensor) -> Any:
        """Return 1 if no element is NaN or infinite, else 0, as one int32 on the device."""
        self.check_tensor(x, "x")
        flag = self.allocate(x, 1, self.torch.int32)
        self.library.call(
            "is_finite", *self.find_stream(x), x.data_ptr(), self.dtype_codes[x.dtype], x.numel(), flag.data_ptr()
        )
        return flag
