"""The kernels on torch tensors of a GPU: arguments checked, outputs and workspace taken from torch's allocator, work
put on torch's current stream.

No function waits for the device, unless its docstring states it. Everything is allocated before the first
launch, so that running out of memory writes nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topkube import _kernels
from topkube.arrays import DTYPE_CODES, is_tensor
from topkube.errors import ArgumentError, DeviceError
from topkube.kernels import cuda_library
from topkube.kernels.arguments import (
    WIRES,
    check_count,
    check_indexable,
    check_iterations,
    check_length,
    check_same_length,
    find_wire_code,
    raise_overlap,
)
from topkube.kernels.cuda_library import MOST_INPUTS, STATE_BYTES, VERDICT_WORDS, CudaLibrary, EffortRead

if TYPE_CHECKING:
    import torch

_ANY_LENGTH = 2**64 - 1
NO_FAULT = 0xFFFFFFFF


def device_kernels(**arrays: Any) -> DeviceKernels | None:
    """Return the GPU's kernels if an argument is a CUDA tensor, None if all are arrays on the CPU. `arrays` are the
    arguments by name; None is ignored. Raises ArgumentError if they are on different devices, DeviceError if
    this build has no CUDA kernels."""
    devices = {name: x.device for name, x in arrays.items() if is_tensor(x) and x.device.type != "cpu"}
    if not devices:
        return None
    name, device = next(iter(devices.items()))
    for other, x in arrays.items():
        if x is None or (is_tensor(x) and x.device == device):
            continue
        place = x.device if is_tensor(x) else f"the CPU (it is a {type(x).__name__})"
        raise ArgumentError(
            f"{name} lies on {device}, {other} on {place}", next_step=f"move one of them: {other}.to({name}.device)"
        )
    if device.type != "cuda":
        raise ArgumentError(
            f"{name} lies on {device}; kernels run on CPU and CUDA tensors", next_step=f"pass {name}.cpu()"
        )
    return _of_cuda()


@functools.cache
def _of_cuda() -> DeviceKernels:
    return DeviceKernels(cuda_library.load())


class DeviceKernels:
    """The functions of topkube.kernels for tensors on devices of `library`."""

    def __init__(self, library: CudaLibrary) -> None:
        self.library = library
        self.torch: Any = sys.modules["torch"]
        torch = self.torch
        self._codes = {getattr(torch, dtype.name): code for dtype, code in DTYPE_CODES.items()}
        self._last = threading.local()

    # ---- dense

    def sum_(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        if not 1 <= len(inputs) <= MOST_INPUTS:
            raise ArgumentError(
                f"{len(inputs)} inputs; a GPU adds 1 to {MOST_INPUTS} at once", next_step="add them in several calls"
            )
        self._floats(out, "out")
        for i, x in enumerate(inputs):
            self._floats(x, f"inputs[{i}]")
            check_same_length(f"inputs[{i}]", x.numel(), "out", out.numel())
            if x.dtype != inputs[0].dtype:
                raise ArgumentError(
                    f"inputs[{i}] has dtype {x.dtype}, inputs[0] has {inputs[0].dtype}",
                    next_step="pass inputs of one dtype",
                )
            self._apart("out", out, f"inputs[{i}]", x, same_allowed=True)
        pointers = [x.data_ptr() for x in inputs]
        device, stream = self._place(out)
        self.library.sum(
            device, stream, out.data_ptr(), self._codes[out.dtype], pointers, self._codes[inputs[0].dtype],
            out.numel(), scale,
        )  # fmt: skip

    def check_copy(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Raise ArgumentError if x cannot be copied to out."""
        self._floats(out, "out")
        self._floats(x, "x")
        check_same_length("x", x.numel(), "out", out.numel())
        self._apart("out", out, "x", x)

    def finite_flag(self, x: torch.Tensor) -> Any:
        """Return 1 if no element is NaN or infinite, else 0, as one int32 on the device."""
        self._floats(x, "x")
        flag = self._new(x, 1, self.torch.int32)
        self.library.call("is_finite", *self._place(x), x.data_ptr(), self._codes[x.dtype], x.numel(), flag.data_ptr())
        return flag

    # ---- selection

    def topk(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._floats(x, "x")
        check_indexable(x.numel(), "x")
        k = check_count(k, x.numel())
        indices, values = self._entries(x, k, x.dtype)
        self._select("topk", x, x.data_ptr(), self._codes[x.dtype], x.numel(), k, indices.data_ptr(), values.data_ptr())
        self._last.passes = (3, 3) if _dense(k, x.numel()) else (1, 4)
        return indices, values

    def compress_(
        self, gradient: torch.Tensor, residual: torch.Tensor, k: int, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        float32 = self.torch.float32
        self._floats(gradient, "gradient")
        check_indexable(gradient.numel(), "gradient")
        self._floats(residual, "residual", (float32,))
        if out is None and gradient.dtype != float32:
            raise ArgumentError(
                f"gradient has dtype {gradient.dtype}: the sum with the residual is float32 and does not fit it",
                next_step="pass out=torch.empty(gradient.numel(), device=gradient.device)",
            )
        acc = gradient if out is None else out
        self._floats(acc, "out", (float32,))
        check_same_length("residual", residual.numel(), "gradient", gradient.numel())
        check_same_length("out", acc.numel(), "gradient", gradient.numel())
        self._apart("gradient", gradient, "residual", residual)
        self._apart("out", acc, "residual", residual)
        self._apart("gradient", gradient, "out", acc, same_allowed=True)
        k = check_count(k, gradient.numel())
        indices, values = self._entries(gradient, k, float32)
        self._select(
            "compress", gradient, gradient.data_ptr(), self._codes[gradient.dtype], residual.data_ptr(),
            acc.data_ptr(), gradient.numel(), k, indices.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        self._last.passes = (4, 4) if _dense(k, gradient.numel()) else (1, 4)
        return indices, values

    def mstopk(self, x: torch.Tensor, k: int, iterations: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._floats(x, "x")
        check_indexable(x.numel(), "x")
        k, iterations = check_count(k, x.numel()), check_iterations(iterations)
        indices, values = self._entries(x, k, x.dtype)
        self._select(
            "mstopk", x, x.data_ptr(), self._codes[x.dtype], x.numel(), k, iterations, seed % 2**64,
            indices.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        self._last.passes = (5, 5) if _dense(min(k + 1, x.numel()), x.numel()) else (2, 6)
        return indices, values

    def last(self) -> tuple[int, EffortRead]:
        """Return the passes over memory of the last selection, and its state. Waits for the selection."""
        read = self.library.effort(bytes(self._last.state.cpu().numpy()))
        return self._last.passes[read.from_the_data], read

    # ---- scatter and wire

    def scatter_add_(
        self, dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the verdict, and the indices that it refers to."""
        self._floats(dense, "dense")
        self._floats(values, "values")
        check_indexable(values.numel(), "values")
        at = self._indices(indices)
        check_same_length("values", values.numel(), "indices", at.numel())
        self._apart("dense", dense, "values", values)
        self._apart("dense", dense, "indices", at)
        verdict = self._verdict(dense)
        self.library.call(
            "scatter_add", *self._place(dense), dense.data_ptr(), self._codes[dense.dtype], dense.numel(),
            at.data_ptr(), values.data_ptr(), self._codes[values.dtype], at.numel(), verdict.data_ptr(),
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
        self._floats(values, "values")
        at, code, length = self._indices(indices), find_wire_code(wire), check_length(length)
        check_same_length("values", values.numel(), "indices", at.numel())
        if residual is not None:
            self._floats(residual, "residual", (self.torch.float32,))
            if residual.numel() != length:
                raise ArgumentError(
                    f"residual has {residual.numel()} elements, length is {length}", next_step="pass the whole shard's"
                )
            self._apart("residual", residual, "values", values)
            self._apart("residual", residual, "indices", at)
        size = wire_size(length, at.numel(), wire)
        buffer = self._new(values, size, self.torch.uint8) if out is None else self._buffer(out)
        check_same_length("out", buffer.numel(), "the encoded shard", size)
        verdict = self._verdict(values)
        arguments = (
            at.data_ptr(), values.data_ptr(), self._codes[values.dtype], at.numel(), length, code,
            0 if residual is None else residual.data_ptr(), buffer.data_ptr(), size, verdict.data_ptr(),
        )  # fmt: skip
        self._with_workspace("encode", values, *arguments)
        return buffer, verdict, at

    def check(self, buffer: torch.Tensor, length: int | None) -> Any:
        """Return the verdict on a wire buffer."""
        return self._decode(buffer, length, 0, None, None)

    def decode(self, buffer: torch.Tensor, length: int | None, entries: int) -> Any:
        """Return (indices, values, verdict) of a buffer that holds this many entries."""
        indices, values = self._entries(buffer, entries, self.torch.float32)
        return indices, values, self._decode(buffer, length, entries, indices, values)

    def decode_add_(self, dense: torch.Tensor, buffer: torch.Tensor, scale: float) -> Any:
        """Return the verdict: its word 1 is 0 if a value was not finite."""
        self._floats(dense, "dense")
        raw = self._buffer(buffer)
        self._apart("dense", dense, "buffer", raw)
        verdict = self._verdict(dense)
        self._with_workspace(
            "decode_add", dense, raw.data_ptr(), raw.numel(), dense.data_ptr(), self._codes[dense.dtype],
            dense.numel(), scale, verdict.data_ptr(),
        )  # fmt: skip
        return verdict

    def sum_rows_(self, out: torch.Tensor, rows: torch.Tensor, size: int) -> Any:
        """Return the verdicts (rows, 4): word 1 of a row is 0 if one of its values was not finite."""
        self._floats(out, "out")
        raw = self._buffer(rows)
        self._apart("out", out, "rows", raw)
        verdicts = self._new(out, len(rows) * VERDICT_WORDS, self.torch.int32).fill_(-1)
        self._with_workspace(
            "sum_rows", out, raw.data_ptr(), len(rows), rows.shape[1], size, out.data_ptr(), self._codes[out.dtype],
            out.numel(), verdicts.data_ptr(),
        )  # fmt: skip
        return verdicts.view(len(rows), VERDICT_WORDS)

    def _decode(self, buffer: torch.Tensor, length: int | None, entries: int, indices: Any, values: Any) -> Any:
        raw = self._buffer(buffer)
        verdict = self._verdict(raw)
        self._with_workspace(
            "decode", raw, raw.data_ptr(), raw.numel(), _ANY_LENGTH if length is None else length, entries,
            0 if indices is None else indices.data_ptr(), 0 if values is None else values.data_ptr(),
            verdict.data_ptr(),
        )  # fmt: skip
        return verdict

    def words(self, verdict: torch.Tensor) -> list[int]:
        """Return a verdict's words. Waits for the device. Raises ArgumentError during the capture of a graph, which
        makes that impossible."""
        if verdict.is_cuda and self.torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "this call waits for a verdict of the device, which a CUDA graph's capture forbids",
                next_step="pass wait=False while capturing",
            )
        return [word & 0xFFFFFFFF for word in verdict.tolist()]

    # ---- arguments

    def _floats(self, x: Any, name: str, dtypes: tuple[Any, ...] = ()) -> None:
        allowed = dtypes or tuple(self._codes)
        if x.dtype not in allowed:
            raise ArgumentError(
                f"{name} has dtype {x.dtype}; allowed: {', '.join(str(dtype) for dtype in allowed)}",
                next_step=f"convert it: {name}.to({allowed[0]})",
            )
        self._plain(x, name)

    def _plain(self, x: Any, name: str) -> None:
        if x.layout is not self.torch.strided:
            raise ArgumentError(f"{name} has layout {x.layout}, not strided", next_step=f"pass {name}.to_dense()")
        if not x.is_contiguous():
            raise ArgumentError(
                f"{name} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()})",
                cause="it is a transposed or sliced view",
                next_step=f"pass a contiguous copy: {name}.contiguous()",
            )

    def _indices(self, indices: Any) -> Any:
        """Return indices as uint32. A number that does not fit becomes 2^32 - 1, an index that the device refuses."""
        torch = self.torch
        if indices.dtype not in (torch.uint32, torch.int64, torch.int32, torch.uint64):
            raise ArgumentError(
                f"indices has dtype {indices.dtype}; allowed: uint32, int64, int32, uint64",
                next_step="pass indices as topk returns them",
            )
        self._plain(indices, "indices")
        check_indexable(indices.numel(), "indices")
        flat = indices.reshape(-1)
        if flat.dtype == torch.uint32:
            return flat
        wide = flat.view(torch.int64) if flat.dtype == torch.uint64 else flat.to(torch.int64)
        fits = (wide >= 0) & (wide < 2**32)
        return torch.where(fits, wide, 2**32 - 1).to(torch.uint32)

    def _buffer(self, buffer: Any) -> Any:
        if buffer.dtype != self.torch.uint8:
            raise ArgumentError(
                f"buffer has dtype {buffer.dtype}; allowed: uint8", next_step="pass what encode returned"
            )
        self._plain(buffer, "buffer")
        if buffer.data_ptr() % 8:
            raise ArgumentError(
                "buffer is not aligned to 8 bytes",
                cause="it is a view into a larger buffer at an odd offset",
                next_step="pass buffer.clone(), or place buffers at multiples of 8 bytes",
            )
        return buffer.reshape(-1)

    def _apart(self, name: str, x: Any, other_name: str, other: Any, *, same_allowed: bool = False) -> None:
        start, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
        other_start, other_end = other.data_ptr(), other.data_ptr() + other.numel() * other.element_size()
        if start >= other_end or other_start >= end:
            return
        if same_allowed and start == other_start and x.dtype == other.dtype:
            return
        raise_overlap(name, other_name)

    # ---- memory and streams

    def _place(self, x: Any) -> tuple[int, int]:
        """Return (device, stream) as the library takes them."""
        if not x.is_cuda:
            return 0, 0
        return x.device.index, self.torch.cuda.current_stream(x.device).cuda_stream

    def _new(self, like: Any, length: int, dtype: Any) -> Any:
        try:
            return self.torch.empty(length, dtype=dtype, device=like.device)
        except self.torch.cuda.OutOfMemoryError as error:
            free, total = self.torch.cuda.mem_get_info(like.device)
            raise DeviceError(
                f"{like.device} has no room for {length * dtype.itemsize:,} bytes ({free:,} of {total:,} are free);"
                " nothing was written",
                cause="the model, the batch or the selected entries fill the device",
                next_step="lower the batch size, or select from smaller buckets (bucket_bytes)",
            ) from error

    def _verdict(self, like: Any) -> Any:
        return self._new(like, VERDICT_WORDS, self.torch.int32).fill_(-1)

    def _entries(self, like: Any, k: int, dtype: Any) -> tuple[Any, Any]:
        return self._new(like, k, self.torch.uint32), self._new(like, k, dtype)

    def _with_workspace(self, name: str, like: Any, *arguments: Any) -> None:
        workspace = self._new(like, self.library.needed(name, *arguments), self.torch.uint8)
        self.library.call(name, *self._place(like), *arguments, workspace.data_ptr(), None)

    def _select(self, name: str, like: Any, *arguments: Any) -> None:
        state = self._new(like, STATE_BYTES, self.torch.uint8)
        self._with_workspace(name, like, *arguments, state.data_ptr())
        self._last.state = state


def _dense(k: int, length: int) -> bool:
    """Return True if the selection skips the candidates (csrc/cuda/launch_select.hpp)."""
    return length > 16384 and k > length // 4


def wire_size(length: int, entries: int, wire: str) -> int:
    """Return the size of an encoded shard in bytes (csrc/cpu/wire/wire.hpp)."""
    return int(_kernels.encoded_size(length, entries, WIRES[wire]))
