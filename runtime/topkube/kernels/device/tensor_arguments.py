"""Checks of tensors on a device, before a kernel is launched."""

from __future__ import annotations

import sys
from typing import Any

from topkube.arrays import DTYPE_CODES
from topkube.errors import ArgumentError
from topkube.kernels.arguments import check_indexable, raise_overlap


class TensorArguments:
    """The checks of tensors that a caller passes, and their conversion for the library. Checks raise ArgumentError.

    `dtype_codes` maps torch's dtypes to their codes in the library (`arrays.DTYPE_CODES`).
    """

    def __init__(self) -> None:
        self.torch: Any = sys.modules["torch"]
        torch = self.torch
        self.dtype_codes = {getattr(torch, dtype.name): code for dtype, code in DTYPE_CODES.items()}

    def check_tensor(self, x: Any, name: str, dtypes: tuple[Any, ...] = ()) -> None:
        """Check that x is contiguous and has one of `dtypes`, by default float32, bfloat16 or float16."""
        allowed = dtypes or tuple(self.dtype_codes)
        if x.dtype not in allowed:
            raise ArgumentError(
                f"{name} has dtype {x.dtype}; allowed: {', '.join(str(dtype) for dtype in allowed)}",
                next_step=f"convert it: {name}.to({allowed[0]})",
            )
        self.check_contiguous(x, name)

    def check_contiguous(self, x: Any, name: str) -> None:
        """Check that x is a contiguous strided tensor, and no view that negates what its memory holds."""
        if x.layout is not self.torch.strided:
            raise ArgumentError(f"{name} has layout {x.layout}, not strided", next_step=f"pass {name}.to_dense()")
        if not x.is_contiguous():
            raise ArgumentError(
                f"{name} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()})",
                cause="it is a transposed or sliced view",
                next_step=f"pass a contiguous copy: {name}.contiguous()",
            )
        if x.is_neg():
            raise ArgumentError(
                f"{name} is a view whose memory holds other values: torch negates them when they are read",
                cause="the imaginary part of a conjugate tensor",
                next_step=f"pass {name}.clone()",
            )

    def convert_indices(self, indices: Any) -> Any:
        """Return indices as a flat uint32 tensor. A number that does not fit becomes 2^32 - 1, which no array has as an
        index."""
        torch = self.torch
        if indices.dtype not in (torch.uint32, torch.int64, torch.int32, torch.uint64):
            raise ArgumentError(
                f"indices has dtype {indices.dtype}; allowed: uint32, int64, int32, uint64",
                next_step="pass indices as topk returns them",
            )
        self.check_contiguous(indices, "indices")
        check_indexable(indices.numel(), "indices")
        flat = indices.reshape(-1)
        if flat.dtype == torch.uint32:
            return flat
        wide = flat.view(torch.int64) if flat.dtype == torch.uint64 else flat.to(torch.int64)
        fits = (wide >= 0) & (wide < 2**32)
        return torch.where(fits, wide, 2**32 - 1).to(torch.uint32)

    def flatten_buffer(self, buffer: Any) -> Any:
        """Return a flat view of a uint8 buffer that is contiguous and aligned to 8 bytes."""
        if buffer.dtype != self.torch.uint8:
            raise ArgumentError(
                f"buffer has dtype {buffer.dtype}; allowed: uint8", next_step="pass what encode returned"
            )
        self.check_contiguous(buffer, "buffer")
        if buffer.data_ptr() % 8:
            raise ArgumentError(
                "buffer is not aligned to 8 bytes",
                cause="it is a view into a larger buffer at an odd offset",
                next_step="pass buffer.clone(), or place buffers at multiples of 8 bytes",
            )
        return buffer.reshape(-1)

    def check_apart(self, name: str, x: Any, other_name: str, other: Any, *, same_allowed: bool = False) -> None:
        """Check that the tensors share no memory. `same_allowed` accepts tensors of exactly the same elements."""
        start, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
        other_start, other_end = other.data_ptr(), other.data_ptr() + other.numel() * other.element_size()
        if start >= other_end or other_start >= end:
            return
        if same_allowed and start == other_start and x.dtype == other.dtype:
            return
        raise_overlap(name, other_name)
