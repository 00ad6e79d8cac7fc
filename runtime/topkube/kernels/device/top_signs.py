"""Signs of the largest elements, on tensors of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topkube.kernels.arguments import SIGN_BLOCK, check_top_sign_size
from topkube.kernels.device.selection import SelectionKernels

if TYPE_CHECKING:
    import torch


class TopSignKernels(SelectionKernels):
    """The functions of topkube.kernels.sign for the largest elements, on tensors of a device. Their arguments `count`
    and `size`, the bytes of a message, are checked."""

    def top_sign_pack_(self, values: torch.Tensor, count: int, message: torch.Tensor, size: int) -> Any:
        """Return a flag on the device, (1,) int32, which is 0 if a scale is NaN or infinite, else 1."""
        self._check_top_signs("values", values, count, message, size)
        flag = self.allocate(values, 1, self.torch.int32).fill_(1)
        indices, chosen = self.topk(values, count)
        bits = message.data_ptr() + 2 * -(-count // SIGN_BLOCK)
        place = self.find_stream(values)
        self.library.call(
            "sign_pack", *place, chosen.data_ptr(), count, message.data_ptr(), bits, flag.data_ptr()
        )  # leaves the rest in `chosen`
        self.library.call(
            "top_sign_write", *place, values.data_ptr(), values.numel(), indices.data_ptr(), chosen.data_ptr(), count,
            message.data_ptr(),
        )  # fmt: skip
        return flag

    def top_sign_unpack_add_(
        self, out: torch.Tensor, count: int, message: torch.Tensor, weight: float, size: int
    ) -> Any:
        """Return a flag on the device, (1,) int32, which is 0 if the message is damaged, else 1."""
        self._check_top_signs("out", out, count, message, size)
        flag = self.allocate(out, 1, self.torch.int32).fill_(1)
        self.launch(
            "top_sign_unpack_add", out, out.data_ptr(), out.numel(), count, message.data_ptr(), weight, flag.data_ptr()
        )
        return flag

    def _check_top_signs(self, name: str, x: torch.Tensor, count: int, message: torch.Tensor, size: int) -> None:
        self.check_floats(x, name, (self.torch.float32,))
        self.check_floats(message, "message", (self.torch.uint8,))
        check_top_sign_size(message.numel(), size, count, x.numel())
        self.check_apart(name, x, "message", message)
