"""The compiled CUDA kernels (csrc/cuda): a C library beside the extension, loaded when it is first needed.

The library takes device pointers and a stream as numbers, so it does not depend on torch. It exists if nvcc was found
when the package was built, and it loads without a driver.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkube import _kernels
from topkube.errors import DeviceError
from topkube.installation import build_reinstall_command

NAME = "libtopkube_cuda.so"
STATE_BYTES = 256  # room for a State (csrc/cuda/selection/state.hpp)
PREVIOUS_BYTES = 32  # room for a PreviousThreshold (csrc/cuda/selection/state.hpp)
VERDICT_WORDS = 4  # the words of a verdict (csrc/cuda/wire.hpp)
MOST_PARTS = 128  # the messages that one call of `..._unpack_add_parts` adds (csrc/cuda/parts.hpp)
MOST_INPUTS = 16  # the arrays that one call of `sum` adds (csrc/cuda/dense.hpp)

_int, _u32, _u64, _float, _pointer = (
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_float,
    ctypes.c_void_p,
)
_device_and_stream = [_int, _pointer]
_selection_results = [_pointer, _pointer, _pointer, _pointer]  # indices, values, previous, state
_workspace = [_pointer, _pointer]  # workspace, and where the needed size is written
_SIGNATURES: dict[str, list[Any]] = {
    "topk": [*_device_and_stream, _pointer, _int, _u64, _u64, *_selection_results, *_workspace],
    "compress": [*_device_and_stream, _pointer, _int, _pointer, _pointer, _u64, _u64, *_selection_results, *_workspace],
    "mstopk": [*_device_and_stream, _pointer, _int, _u64, _u64, _int, _u64, *_selection_results, *_workspace],
    "effort": [_pointer, _pointer, _pointer, _pointer, _pointer, _pointer],
    "sum": [*_device_and_stream, _pointer, _int, _pointer, _u32, _int, _u64, _float],
    "is_finite": [*_device_and_stream, _pointer, _int, _u64, _pointer],
    "encode": [
        *_device_and_stream,
        _pointer,
        _pointer,
        _int,
        _u64,
        _u64,
        _int,
        _pointer,
        _pointer,
        _u64,
        _pointer,
        *_workspace,
    ],
    "decode": [*_device_and_stream, _pointer, _u64, _u64, _u64, _pointer, _pointer, _pointer, *_workspace],
    "decode_add": [*_device_and_stream, _pointer, _u64, _pointer, _int, _u64, _float, _pointer, *_workspace],
    "sum_rows": [*_device_and_stream, _pointer, _u64, _u64, _u64, _pointer, _int, _u64, _pointer, *_workspace],
    "scatter_add": [*_device_and_stream, _pointer, _int, _u64, _pointer, _pointer, _int, _u64, _pointer],
    "sign_pack": [*_device_and_stream, _pointer, _u64, _pointer, _pointer, _pointer],
    "sign_unpack_add": [*_device_and_stream, _pointer, _u64, _pointer, _pointer, _pointer, _u64, *_workspace],
    "sign_pack_parts": [*_device_and_stream, _pointer, _pointer, _u64, *[_pointer] * 5],
    "sign_unpack_add_parts": [*_device_and_stream, _pointer, _u64, _pointer, _pointer, _u64, *[_pointer] * 4],
    "top_sign_write": [*_device_and_stream, _pointer, _u64, _pointer, _pointer, _u64, _pointer],
    "top_sign_unpack_add": [*_device_and_stream, _pointer, _u64, _u64, _pointer, _float, _pointer, *_workspace],
    "quantised_pack": [*_device_and_stream, _pointer, _u64, _int, _pointer, _pointer],
    "quantised_pack_parts": [*_device_and_stream, _pointer, _int, _pointer, _u64, *[_pointer] * 4],
    "quantised_unpack_add_parts": [
        *_device_and_stream,
        _pointer,
        _int,
        _u64,
        _pointer,
        _pointer,
        _u64,
        *[_pointer] * 3,
    ],
    "quantised_unpack_add": [*_device_and_stream, _pointer, _u64, _int, _pointer, _pointer, _u64, *_workspace],
}


@dataclass(frozen=True)
class EffortRead:
    """What a selection has written about its work, read after its stream has finished.

    is_from_data: True if the entries were selected from the data, False if from the candidates. is_reused: True if the
    selection began at the threshold of the previous selection. thresholds, above: the upper and the lower threshold of
    mstopk, and how many magnitudes reach each.
    """

    is_from_data: bool
    is_reused: bool
    candidates: int
    thresholds: tuple[float, float]
    above: tuple[int, int]


class CudaLibrary:
    """The C functions by name. Their error codes become DeviceError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"topkube_cuda_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        self._error, self._build = library.topkube_cuda_error, library.topkube_cuda_build
        self._error.argtypes, self._error.restype = [ctypes.c_int], ctypes.c_char_p
        self._build.argtypes, self._build.restype = [], ctypes.c_char_p

    @property
    def build(self) -> str:
        """The compiler that built the library, and the devices: "nvcc 13.0: sm_80 sm_90 compute_90"."""
        return str(self._build().decode())

    def count_workspace_bytes(self, name: str, *arguments: Any) -> int:
        """Return the bytes of workspace that `call` needs with the same arguments."""
        needed = _u64(0)
        self._raise_errors(name, self._functions[name](0, None, *arguments, None, ctypes.byref(needed)))
        return max(256, needed.value)

    def call(self, name: str, device: int, stream: int, *arguments: Any) -> None:
        """Launch the function `name` on `stream`. Raises DeviceError if CUDA reports an error."""
        self._raise_errors(name, self._functions[name](device, stream, *arguments))

    def sum(self, device: int, stream: int, out: int, code: int, inputs: Sequence[int], *arguments: Any) -> None:
        """Launch `out` = sum(`inputs`) * scale on `stream`. `out` and `inputs` are addresses."""
        pointers = (ctypes.c_void_p * len(inputs))(*inputs)
        self.call("sum", device, stream, out, code, ctypes.addressof(pointers), len(inputs), *arguments)

    def read_effort(self, state: bytes) -> EffortRead:
        """Return the contents of a state whose bytes were copied to the host."""
        is_from_data, is_reused, candidates = _u64(0), _u64(0), _u64(0)
        thresholds, above = (_float * 2)(), (_u64 * 2)()
        results = (is_from_data, is_reused, candidates, thresholds, above)
        self._functions["effort"](state, *map(ctypes.byref, results))
        return EffortRead(
            bool(is_from_data.value), bool(is_reused.value), candidates.value, tuple(thresholds), tuple(above)
        )

    def _raise_errors(self, name: str, code: int) -> None:
        if code:
            raise DeviceError(
                f"CUDA refused {name}: {self._error(code).decode()} (error {code})",
                cause="the driver is older than the library, an earlier kernel failed, or the device is unknown",
                next_step=f"run `topkube doctor`; the library is {self.path.name}, built by {self.build}",
            )


def find_library_path() -> Path | None:
    """Return the path of the library; None if the package was built without it."""
    library_path = Path(_kernels.__file__).with_name(NAME)
    return library_path if library_path.exists() else None


@functools.cache
def load() -> CudaLibrary:
    """Return the library. Raises DeviceError if it is missing or does not load."""
    library_path = find_library_path()
    if library_path is None:
        raise DeviceError(
            "a CUDA tensor was passed, but this build of TopKube has no CUDA kernels",
            cause="the package was built without nvcc",
            next_step="install the CUDA toolkit and reinstall with TOPKUBE_CUDA=on, or pass tensor.cpu()",
        )
    try:
        return CudaLibrary(library_path)
    except OSError as error:
        raise DeviceError(
            f"the CUDA kernels do not load: {error}", next_step=f"reinstall: {build_reinstall_command()}"
        ) from error
