"""Signs and integers with a scale per block, on tensors of a device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topkube.errors import ArgumentError
from topkube.kernels.arguments import check_message_size, check_same_length, check_sign_sizes
from topkube.kernels.device.launches import Launches

if TYPE_CHECKING:
    import torch

    from topkube.kernels.parts import PartLayout


class PackingKernels(Launches):
    """The functions of topkube.kernels.sign and topkube.kernels.quantised on tensors of a device.

    Packing returns a flag on the device, (1,) int32, which is 0 if a scale is NaN or infinite, else 1.
    """

    def sign_pack_(
        self, values: torch.Tensor, scales: torch.Tensor | None, bits: torch.Tensor | None, blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (scales, bits, flag) for values that have so many `blocks`."""
        torch = self.torch
        self.check_tensor(values, "values", (torch.float32,))
        length = values.numel()
        to_scales = self.allocate(values, blocks, torch.uint16) if scales is None else scales
        to_bits = self.allocate(values, -(-length // 8), torch.uint8) if bits is None else bits
        self._check_signs(to_scales, to_bits, "", length)
        self.check_apart("values", values, "scales", to_scales)
        self.check_apart("values", values, "bits", to_bits)
        self.check_apart("scales", to_scales, "bits", to_bits)
        flag = self._allocate_flag(values)
        self.library.call(
            "sign_pack", *self.find_stream(values), values.data_ptr(), length, to_scales.data_ptr(),
            to_bits.data_ptr(), flag.data_ptr(),
        )  # fmt: skip
        return to_scales, to_bits, flag

    def sign_unpack_add_(
        self, out: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], weights: Sequence[float]
    ) -> None:
        self.check_tensor(out, "out", (self.torch.float32,))
        check_same_length("weights", len(weights), "parts", len(parts))
        for i, (scales, bits) in enumerate(parts):
            self._check_signs(scales, bits, f" of parts[{i}]", out.numel())
            self.check_apart("out", out, f"the scales of parts[{i}]", scales)
            self.check_apart("out", out, f"the bits of parts[{i}]", bits)
        scale_addresses = _build_address_array([scales for scales, _ in parts])
        bit_addresses = _build_address_array([bits for _, bits in parts])
        factors = _build_float_array(weights)
        self.launch(
            "sign_unpack_add", out, out.data_ptr(), out.numel(), ctypes.addressof(scale_addresses),
            ctypes.addressof(bit_addresses), ctypes.addressof(factors), len(parts),
        )  # fmt: skip

    def quantised_pack_(self, values: torch.Tensor, bits: int, message: torch.Tensor, size: int) -> Any:
        """Return the flag. A message about `values` has `size` bytes."""
        self.check_tensor(values, "values", (self.torch.float32,))
        self._check_message(message, "message", values.numel(), bits, size)
        self.check_apart("values", values, "message", message)
        flag = self._allocate_flag(values)
        self.library.call(
            "quantised_pack", *self.find_stream(values), values.data_ptr(), values.numel(), bits, message.data_ptr(),
            flag.data_ptr(),
        )  # fmt: skip
        return flag

    def quantised_unpack_add_(
        self,
        out: torch.Tensor,
        bits: int,
        messages: Sequence[torch.Tensor],
        weights: Sequence[float],
        size: int,
        replaces: bool = False,
    ) -> None:
        """Add messages of `size` bytes each, or replace `out` by their sum."""
        self.check_tensor(out, "out", (self.torch.float32,))
        check_same_length("weights", len(weights), "messages", len(messages))
        for i, message in enumerate(messages):
            self._check_message(message, f"messages[{i}]", out.numel(), bits, size)
            self.check_apart("out", out, f"messages[{i}]", message)
        if replaces:
            out.zero_()
        addresses, factors = _build_address_array(messages), _build_float_array(weights)
        self.launch(
            "quantised_unpack_add", out, out.data_ptr(), out.numel(), bits, ctypes.addressof(addresses),
            ctypes.addressof(factors), len(messages),
        )  # fmt: skip

    def pack_parts_(self, values: torch.Tensor, message: torch.Tensor, layout: PartLayout) -> Any:
        """Return the flag of all parts."""
        self.check_tensor(values, "values", (self.torch.float32,))
        self._check_parts(values, message, "message", layout)
        self.check_apart("values", values, "message", message)
        flag = self._allocate_flag(values)
        self.library.call(
            f"{layout.kernel}_pack_parts", *self.find_stream(values), values.data_ptr(), *layout.options,
            message.data_ptr(), len(layout), *layout.addresses, flag.data_ptr(),
        )  # fmt: skip
        return flag

    def unpack_add_parts_(
        self,
        out: torch.Tensor,
        messages: Sequence[torch.Tensor],
        weights: Sequence[float],
        layout: PartLayout,
        replaces: bool = False,
    ) -> None:
        """Add at most MOST_PARTS messages to the parts, or replace the parts by their sum."""
        self.check_tensor(out, "out", (self.torch.float32,))
        check_same_length("weights", len(weights), "messages", len(messages))
        for i, message in enumerate(messages):
            self._check_parts(out, message, f"messages[{i}]", layout)
            self.check_apart("out", out, f"messages[{i}]", message)
        if replaces and len(layout):
            self.torch._foreach_zero_([out[place] for place in layout.places])
        addresses, factors = _build_address_array(messages), _build_float_array(weights)
        self.library.call(
            f"{layout.kernel}_unpack_add_parts", *self.find_stream(out), out.data_ptr(), *layout.options,
            len(messages), ctypes.addressof(addresses), ctypes.addressof(factors), len(layout), *layout.addresses,
        )  # fmt: skip

    def _allocate_flag(self, like: torch.Tensor) -> Any:
        return self.allocate(like, 1, self.torch.int32).fill_(1)

    def _check_parts(self, values: torch.Tensor, message: torch.Tensor, name: str, layout: PartLayout) -> None:
        self.check_tensor(message, name, (self.torch.uint8,))
        layout.check(values.numel(), message.numel(), name)
        if message.data_ptr() % 2:
            raise ArgumentError(f"{name} begins at an odd address", next_step="place messages at multiples of 8 bytes")

    def _check_signs(self, scales: torch.Tensor, bits: torch.Tensor, name_suffix: str, length: int) -> None:
        self.check_tensor(scales, f"scales{name_suffix}", (self.torch.uint16,))
        self.check_tensor(bits, f"bits{name_suffix}", (self.torch.uint8,))
        check_sign_sizes(scales.numel(), bits.numel(), name_suffix, length)

    def _check_message(self, message: torch.Tensor, name: str, length: int, bits: int, size: int) -> None:
        self.check_tensor(message, name, (self.torch.uint8,))
        check_message_size(name, message.numel(), size, length, bits)


def _build_address_array(tensors: Sequence[torch.Tensor]) -> Any:
    """Return the addresses of `tensors` as a C array."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _build_float_array(numbers: Sequence[float]) -> Any:
    """Return `numbers` as a C array."""
    return (ctypes.c_float * len(numbers))(*map(float, numbers))
