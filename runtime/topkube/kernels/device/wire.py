"""The wire format and scatter-add, on tensors of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topkube import _kernels
from topkube.errors import ArgumentError
from topkube.kernels.arguments import WIRES, check_indexable, check_length, check_same_length, find_wire_code
from topkube.kernels.cuda_library import VERDICT_WORDS
from topkube.kernels.device.launches import Launches

if TYPE_CHECKING:
    import torch

_ANY_LENGTH = 2**64 - 1
NO_FAULT = 0xFFFFFFFF
"""The first word of a verdict without a fault."""


class WireKernels(Launches):
    """The functions of topkube.kernels.wire on tensors of a device.

    They return a verdict on the device, (4,) int32, which `read_verdict` reads: the position of the first invalid index
    or the fault of a buffer, else NO_FAULT; 0 if a value was not finite; the number of entries; the declared length.
    """

    def scatter_add_(
        self, dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the verdict, and the indices that it refers to."""
        self.check_floats(dense, "dense")
        self.check_floats(values, "values")
        check_indexable(values.numel(), "values")
        at = self.convert_indices(indices)
        check_same_length("values", values.numel(), "indices", at.numel())
        self.check_apart("dense", dense, "values", values)
        self.check_apart("dense", dense, "indices", at)
        verdict = self.allocate_verdict(dense)
        self.library.call(
            "scatter_add", *self.find_stream(dense), dense.data_ptr(), self.dtype_codes[dense.dtype], dense.numel(),
            at.data_ptr(), values.data_ptr(), self.dtype_codes[values.dtype], at.numel(), verdict.data_ptr(),
        )  # fmt: skip
        return verdict, at

    def encode(
        self,
        indices: torch.Tensor,
        values: torch.Tensor,
        length: int,
        wire: str,
        residual: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the buffer (`out` if given), the verdict, and the indices that it refers to."""
        self.check_floats(values, "values")
        at, code, length = self.convert_indices(indices), find_wire_code(wire), check_length(length)
        check_same_length("values", values.numel(), "indices", at.numel())
        if residual is not None:
            self.check_floats(residual, "residual", (self.torch.float32,))
            if residual.numel() != length:
                raise ArgumentError(
                    f"residual has {residual.numel()} elements, length is {length}", next_step="pass the whole shard's"
                )
            self.check_apart("residual", residual, "values", values)
            self.check_apart("residual", residual, "indices", at)
        size = _count_wire_bytes(length, at.numel(), wire)
        buffer = self.allocate(values, size, self.torch.uint8) if out is None else self.flatten_buffer(out)
        check_same_length("out", buffer.numel(), "the encoded shard", size)
        verdict = self.allocate_verdict(values)
        arguments = (
            at.data_ptr(), values.data_ptr(), self.dtype_codes[values.dtype], at.numel(), length, code,
            0 if residual is None else residual.data_ptr(), buffer.data_ptr(), size, verdict.data_ptr(),
        )  # fmt: skip
        self.launch("encode", values, *arguments)
        return buffer, verdict, at

    def check_wire(self, buffer: torch.Tensor, length: int | None) -> Any:
        """Return the verdict on a wire buffer."""
        return self._launch_decode(buffer, length, 0, None, None)

    def decode(self, buffer: torch.Tensor, length: int | None, entries: int) -> Any:
        """Return (indices, values, verdict) of a buffer that holds this many entries."""
        indices, values = self.allocate_entries(buffer, entries, self.torch.float32)
        return indices, values, self._launch_decode(buffer, length, entries, indices, values)

    def decode_add_(self, dense: torch.Tensor, buffer: torch.Tensor, scale: float) -> Any:
        """Return the verdict: its word 1 is 0 if a value was not finite."""
        self.check_floats(dense, "dense")
        raw = self.flatten_buffer(buffer)
        self.check_apart("dense", dense, "buffer", raw)
        verdict = self.allocate_verdict(dense)
        self.launch(
            "decode_add", dense, raw.data_ptr(), raw.numel(), dense.data_ptr(), self.dtype_codes[dense.dtype],
            dense.numel(), scale, verdict.data_ptr(),
        )  # fmt: skip
        return verdict

    def sum_rows_(self, out: torch.Tensor, rows: torch.Tensor, size: int) -> Any:
        """Return the verdicts (rows, 4): word 1 of a row is 0 if one of its values was not finite."""
        self.check_floats(out, "out")
        raw = self.flatten_buffer(rows)
        self.check_apart("out", out, "rows", raw)
        verdicts = self.allocate(out, len(rows) * VERDICT_WORDS, self.torch.int32).fill_(-1)
        self.launch(
            "sum_rows", out, raw.data_ptr(), len(rows), rows.shape[1], size, out.data_ptr(),
            self.dtype_codes[out.dtype], out.numel(), verdicts.data_ptr(),
        )  # fmt: skip
        return verdicts.view(len(rows), VERDICT_WORDS)

    def _launch_decode(self, buffer: torch.Tensor, length: int | None, entries: int, indices: Any, values: Any) -> Any:
        raw = self.flatten_buffer(buffer)
        verdict = self.allocate_verdict(raw)
        self.launch(
            "decode", raw, raw.data_ptr(), raw.numel(), _ANY_LENGTH if length is None else length, entries,
            0 if indices is None else indices.data_ptr(), 0 if values is None else values.data_ptr(),
            verdict.data_ptr(),
        )  # fmt: skip
        return verdict


def _count_wire_bytes(length: int, entries: int, wire: str) -> int:
    """Return the size of an encoded shard in bytes (csrc/cpu/wire/wire.hpp)."""
    return int(_kernels.encoded_size(length, entries, WIRES[wire]))
