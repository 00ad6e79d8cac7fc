"""Signs of the largest elements, on tensors of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topkube.kernels.arguments import SIGN_BLOCK, check_top_sign_size
from topkube.kernels.device.selection import SelectionKernels

if TYPE_CHECKING:
    import torch


class TopSignKernels(SelectionKernels):
    """The functions of topkube.kernels.sign for the largest elements, on tensors of a device. The caller has checked
    `count` and computed `size`, the bytes of a message."""

    def top_sign_pack_(self, values: torch.Tensor, count: int, message: torch.Tensor, size: int) -> Any:
        """Return a flag on the device, (1,) int32, which is 0 if a scale is NaN or infinite, else 1."""
        self._check_top_signs("values", values, count, message, size)
        flag = self.allocate(values, 1, self.torch.int32).fill_(1)
        indices, chosen = self.topk(values, count)
        bits_address = message.data_ptr() + 2 * -(-count // SIGN_BLOCK)  # after the scales, of 2 bytes each
        device, stream = self.find_stream(values)
        # sign_pack subtracts the sent values from `chosen`, and top_sign_write copies the remainders to `values`.
        self.library.call(
            "sign_pack", device, stream, chosen.data_ptr(), count, message.data_ptr(), bits_address, flag.data_ptr()
        )
        self.library.call(
            "top_sign_write", device, stream, values.data_ptr(), values.numel(), indices.data_ptr(),
            chosen.data_ptr(), count, message.data_ptr(),
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
        self.check_tensor(x, name, (self.torch.float32,))
        self.check_tensor(message, "message", (self.torch.uint8,))
        check_top_sign_size(message.numel(), size, count, x.numel())
        self.check_apart(name, x, "message", message)
