"""Selection by magnitude, on tensors of a device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from topkube.errors import ArgumentError
from topkube.kernels.arguments import check_count, check_indexable, check_iterations, check_same_length
from topkube.kernels.cuda_library import STATE_BYTES, CudaLibrary, EffortRead
from topkube.kernels.device.launches import Launches
from topkube.kernels.previous_threshold import PreviousThreshold

if TYPE_CHECKING:
    import torch

_ALL_ARE_CANDIDATES = 16384
"""Up to this length, every entry is a candidate (csrc/cuda/selection/state.hpp)."""


class _Passes(NamedTuple):
    """How many passes over memory a selection makes if it selects from candidates, and if it selects from the data. The
    device decides which."""

    from_candidates: int
    from_data: int


class SelectionKernels(Launches):
    """The functions of topkube.kernels.selection on tensors of a device, and the effort of the last selection."""

    def __init__(self, library: CudaLibrary) -> None:
        super().__init__(library)
        self._last = threading.local()

    def topk(
        self, x: torch.Tensor, k: int, previous: PreviousThreshold | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_tensor(x, "x")
        check_indexable(x.numel(), "x")
        k = check_count(k, x.numel())
        indices, values = self.allocate_entries(x, k, x.dtype)
        self._launch_selection(
            "topk", x, x.data_ptr(), self.dtype_codes[x.dtype], x.numel(), k, indices.data_ptr(), values.data_ptr(),
            previous=previous,
        )  # fmt: skip
        self._last.passes = _Passes(3, 3) if _skips_candidates(k, x.numel()) else _Passes(1, 4)
        return indices, values

    def compress_(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor,
        k: int,
        out: torch.Tensor | None,
        previous: PreviousThreshold | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        float32 = self.torch.float32
        self.check_tensor(gradient, "gradient")
        check_indexable(gradient.numel(), "gradient")
        self.check_tensor(residual, "residual", (float32,))
        if out is None and gradient.dtype != float32:
            raise ArgumentError(
                f"gradient has dtype {gradient.dtype}: the sum with the residual is float32 and cannot be stored in the"
                " gradient",
                next_step="pass out=torch.empty(gradient.numel(), device=gradient.device)",
            )
        total = gradient if out is None else out
        self.check_tensor(total, "out", (float32,))
        check_same_length("residual", residual.numel(), "gradient", gradient.numel())
        check_same_length("out", total.numel(), "gradient", gradient.numel())
        self.check_apart("gradient", gradient, "residual", residual)
        self.check_apart("out", total, "residual", residual)
        self.check_apart("gradient", gradient, "out", total, same_allowed=True)
        k = check_count(k, gradient.numel())
        indices, values = self.allocate_entries(gradient, k, float32)
        self._launch_selection(
            "compress", gradient, gradient.data_ptr(), self.dtype_codes[gradient.dtype], residual.data_ptr(),
            total.data_ptr(), gradient.numel(), k, indices.data_ptr(), values.data_ptr(), previous=previous,
        )  # fmt: skip
        self._last.passes = _Passes(4, 4) if _skips_candidates(k, gradient.numel()) else _Passes(1, 4)
        return indices, values

    def mstopk(
        self, x: torch.Tensor, k: int, iterations: int, seed: int, previous: PreviousThreshold | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_tensor(x, "x")
        check_indexable(x.numel(), "x")
        k, iterations = check_count(k, x.numel()), check_iterations(iterations)
        indices, values = self.allocate_entries(x, k, x.dtype)
        self._launch_selection(
            "mstopk", x, x.data_ptr(), self.dtype_codes[x.dtype], x.numel(), k, iterations, seed % 2**64,
            indices.data_ptr(), values.data_ptr(), previous=previous,
        )  # fmt: skip
        # The kernels search for the (k + 1)-th magnitude (csrc/cuda/mstopk.hpp).
        skips_candidates = _skips_candidates(min(k + 1, x.numel()), x.numel())
        self._last.passes = _Passes(5, 5) if skips_candidates else _Passes(2, 6)
        return indices, values

    def read_effort(self) -> tuple[int, EffortRead]:
        """Return the passes over memory of this thread's last selection, and its state. Waits for the selection."""
        state = self._last.state
        if state.is_cuda:
            self.torch.cuda.synchronize(state.device)  # the stream of the selection need not be the current one
        read = self.library.read_effort(bytes(state.cpu().numpy()))
        passes = self._last.passes
        return passes.from_data if read.is_from_data else passes.from_candidates, read

    def _launch_selection(self, name: str, like: Any, *arguments: Any, previous: PreviousThreshold | None) -> None:
        """Launch the selection `name`. Append two arguments: the addresses of the previous threshold (0 if there is
        none) and of a new state."""
        previous_address = 0 if previous is None else previous.find_address(like)
        state = self.allocate(like, STATE_BYTES, self.torch.uint8)
        self.launch(name, like, *arguments, previous_address, state.data_ptr())
        self._last.state = state


def _skips_candidates(k: int, length: int) -> bool:
    """Return True if the selection does not collect candidates first (csrc/cuda/launch_select.hpp)."""
    return length > _ALL_ARE_CANDIDATES and k > length // 4
