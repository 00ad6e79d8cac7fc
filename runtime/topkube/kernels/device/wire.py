"""The wire format and scatter-add, on tensors of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from topkube import _kernels
from topkube.errors import ArgumentError
from topkube.kernels.arguments import WIRE_CODES, check_indexable, check_length, check_same_length, find_wire_code
from topkube.kernels.cuda_library import VERDICT_WORDS
from topkube.kernels.device.launches import Launches

if TYPE_CHECKING:
    import torch

_ANY_LENGTH = 2**64 - 1
NO_FAULT = 0xFFFFFFFF
"""The first word of a verdict without a fault."""
_FAULT_AND_FINITE = slice(0, 2)


class Verdict(NamedTuple):
    """The words of a verdict that was copied to the host. `WireKernels` describes them."""

    fault: int
    is_finite: bool
    entries: int
    length: int


class WireKernels(Launches):
    """The functions of topkube.kernels.wire on tensors of a device.

    They return a verdict on the device, (4,) int32, which `read_verdict` reads. Its words are:
    fault: the position of the first invalid index, or the number of a buffer's fault; NO_FAULT if all is valid
    finite: 0 if a value was not finite (only from functions that add values)
    entries: the number of entries that the buffer declares
    length: the length of the dense shard that the buffer declares
    """

    def read_verdict(self, verdict: torch.Tensor) -> Verdict:
        """Return the contents of a verdict. Waits for the device. Raises ArgumentError during the capture of a CUDA
        graph, which must not wait."""
        fault, finite, entries, length = self.read_words(verdict)
        return Verdict(fault, finite != 0, entries, length)

    def flag_valid_and_finite(self, verdicts: torch.Tensor) -> torch.Tensor:
        """Return True if no verdict states a fault or a value that is not finite, as a bool tensor of shape () on the
        device. verdicts: (4,) or (rows, 4)."""
        return (verdicts[..., _FAULT_AND_FINITE] == -1).all()

    def scatter_add_(
        self, dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the verdict, and the indices (uint32) in which the verdict's fault is a position."""
        self.check_tensor(dense, "dense")
        self.check_tensor(values, "values")
        check_indexable(values.numel(), "values")
        flat_indices = self.convert_indices(indices)
        check_same_length("values", values.numel(), "indices", flat_indices.numel())
        self.check_apart("dense", dense, "values", values)
        self.check_apart("dense", dense, "indices", flat_indices)
        verdict = self.allocate_verdict(dense)
        self.library.call(
            "scatter_add", *self.find_stream(dense), dense.data_ptr(), self.dtype_codes[dense.dtype], dense.numel(),
            flat_indices.data_ptr(), values.data_ptr(), self.dtype_codes[values.dtype], flat_indices.numel(),
            verdict.data_ptr(),
        )  # fmt: skip
        return verdict, flat_indices

    def encode(
        self,
        indices: torch.Tensor,
        values: torch.Tensor,
        length: int,
        wire: str,
        residual: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the buffer (`out` if it is passed), the verdict, and the indices (uint32) in which the verdict's fault
        is a position."""
        self.check_tensor(values, "values")
        flat_indices, code, length = self.convert_indices(indices), find_wire_code(wire), check_length(length)
        check_same_length("values", values.numel(), "indices", flat_indices.numel())
        if residual is not None:
            self.check_tensor(residual, "residual", (self.torch.float32,))
            if residual.numel() != length:
                raise ArgumentError(
                    f"residual has {residual.numel()} elements, length is {length}",
                    next_step="pass the residual of the whole shard",
                )
            self.check_apart("residual", residual, "values", values)
            self.check_apart("residual", residual, "indices", flat_indices)
        size = _count_wire_bytes(length, flat_indices.numel(), wire)
        buffer = self.allocate(values, size, self.torch.uint8) if out is None else self.flatten_buffer(out)
        check_same_length("out", buffer.numel(), "the encoded shard", size)
        for name, tensor in (("indices", flat_indices), ("values", values), ("residual", residual)):
            if out is not None and tensor is not None:
                self.check_apart(name, tensor, "out", buffer)
        verdict = self.allocate_verdict(values)
        arguments = (
            flat_indices.data_ptr(), values.data_ptr(), self.dtype_codes[values.dtype], flat_indices.numel(), length,
            code, 0 if residual is None else residual.data_ptr(), buffer.data_ptr(), size, verdict.data_ptr(),
        )  # fmt: skip
        self.launch("encode", values, *arguments)
        return buffer, verdict, flat_indices

    def check_wire(self, buffer: torch.Tensor, length: int | None) -> Any:
        """Return the verdict on a wire buffer."""
        return self._launch_decode(buffer, length, 0, None, None)

    def decode(self, buffer: torch.Tensor, length: int | None, entries: int) -> Any:
        """Return (indices, values, verdict) of a buffer that holds this many entries."""
        indices, values = self.allocate_entries(buffer, entries, self.torch.float32)
        return indices, values, self._launch_decode(buffer, length, entries, indices, values)

    def decode_add_(self, dense: torch.Tensor, buffer: torch.Tensor, scale: float) -> Any:
        """Return the verdict."""
        self.check_tensor(dense, "dense")
        raw = self.flatten_buffer(buffer)
        self.check_apart("dense", dense, "buffer", raw)
        verdict = self.allocate_verdict(dense)
        self.launch(
            "decode_add", dense, raw.data_ptr(), raw.numel(), dense.data_ptr(), self.dtype_codes[dense.dtype],
            dense.numel(), scale, verdict.data_ptr(),
        )  # fmt: skip
        return verdict

    def sum_rows_(self, out: torch.Tensor, rows: torch.Tensor, size: int) -> Any:
        """Return the verdicts of all rows, (rows, 4) int32."""
        self.check_tensor(out, "out")
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
    return int(_kernels.encoded_size(length, entries, WIRE_CODES[wire]))
