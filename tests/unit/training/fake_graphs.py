"""CUDA graphs without a GPU: a graph records kernels of the emulated library, and operations of torch, by their
addresses.

While a graph is recorded, nothing that writes to existing memory runs, as on a GPU. A replay runs what was recorded on
the same memory, whatever that memory holds by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from topkube.kernels import selection, wire
from topkube.kernels.cuda_library import CudaLibrary
from topkube.kernels.device import DeviceKernels
from unit.kernels.emulation import compile_emulation

_recording = threading.local()


class FakeGraphs:
    """Records the calls of the kernels' library from Python, and counts the graphs. `emulates` is False while the
    kernels of the CPU take the place of the library. `refusal` is the error of the next recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.recorded = self.replayed = 0
        self.emulates, self.refusal = True, ""
        call, graphs = CudaLibrary.call, self

        def observe(library: CudaLibrary, name: str, *arguments: Any) -> None:
            graph: FakeGraph | None = getattr(_recording, "graph", None)
            if graph is not None:
                graph.work.append(lambda: call(library, name, *arguments))
                return
            graphs.calls.append(name)
            call(library, name, *arguments)

        class FakeGraph:
            def __init__(self) -> None:
                self.work: list[Callable[[], Any]] = []
                self._recorder = _Recorder(self.work)

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                if graphs.refusal:
                    raise RuntimeError(graphs.refusal)
                _recording.graph = self
                self._recorder.__enter__()

            def capture_end(self) -> None:
                self._recorder.__exit__(None, None, None)
                _recording.graph = None
                graphs.recorded += 1

            def replay(self) -> None:
                graphs.replayed += 1
                for run in self.work:
                    run()

        kernels = compile_emulation()

        def find_emulated_kernels(**_: Any) -> DeviceKernels | None:
            return kernels if graphs.emulates else None

        monkeypatch.setattr(CudaLibrary, "call", observe)
        monkeypatch.setattr(selection, "find_device_kernels", find_emulated_kernels)
        monkeypatch.setattr(wire, "find_device_kernels", find_emulated_kernels)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")


class _Recorder(TorchDispatchMode):
    """Records the operations of torch. Those that write to existing memory run in the replay only."""

    def __init__(self, work: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ]
        if written:
            self._work.append(lambda: func(*args, **kwargs))
            return args[written[0]] if written[0] < len(args) else kwargs[func._schema.arguments[written[0]].name]
        result = func(*args, **kwargs)
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        if isinstance(result, torch.Tensor) and not is_view and "empty" not in str(func.name()):
            self._work.append(lambda: result.copy_(func(*args, **kwargs)))
        elif isinstance(result, torch.Tensor):
            self._work.append(lambda: result)  # its memory stays the graph's
        return result
