"""The events of training in a trace: layers in forward and backward, gradients, buckets, steps."""

from __future__ import annotations

import platform
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from topkube import __version__
from topkube.processors import count_cores
from topkube.settings import Settings
from topkube.telemetry import trace
from topkube.world import World

T = TypeVar("T")


def start_trace(
    world: World, parameters: list[tuple[str, torch.Tensor]], aggregation: Any, settings: Settings
) -> StepTrace | None:
    """Return the recorder of this process's trace if the settings ask for a trace and no optimizer records it yet.
    `aggregation` holds the AggregationSettings. Otherwise return None."""
    global _started
    if not settings.trace_directory or _started:
        return None
    _started = True
    facts = {
        "topkube": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "nodes": world.nodes,
        "ranksPerNode": [len(ranks) for ranks in world.node_ranks],
        "cores": count_cores(),
        "threads": torch.get_num_threads(),
        "device": parameters[0][1].device.type if parameters else "cpu",
        "algorithm": aggregation.algorithm,
        "density": aggregation.density,
        "wire": aggregation.wire,
        "overlap": aggregation.overlap,
        "bucketBytes": aggregation.bucket_bytes,
    }
    trace.active = trace.Trace(Path(settings.trace_directory), world.rank, world.node, settings.trace_steps, facts)
    return StepTrace(trace.active, parameters)


_started = False
"""True after the first optimizer of this process began to record. One trace has the steps of one optimizer."""


class StepTrace:
    """Records the steps of one optimizer. Backward runs through all layers in one graph; a layer's part of it ends
    when the last of the layer's gradients is ready. Methods run in the thread of the script or of autograd.

    Kernels of a GPU run later than the call that starts them, so each event waits for the device while steps are
    recorded.
    """

    def __init__(self, recorder: trace.Trace, parameters: list[tuple[str, torch.Tensor]]) -> None:
        self._recorder = recorder
        self._names = {id(tensor): name.rpartition(".")[0] or name for name, tensor in parameters}
        self._device = next((tensor.device for _, tensor in parameters if tensor.is_cuda), None)
        """The GPU of the model, which need not be the current device; None for a model in host memory."""
        self._layers: weakref.WeakKeyDictionary[torch.nn.Module, str | None] = weakref.WeakKeyDictionary()
        self._inside: list[tuple[torch.nn.Module, str, int, int]] = []
        """The modules whose forward has begun, the innermost last: module, name, and the clocks at the start."""
        self._backward: tuple[int, int] | None = None
        self._forward_end: tuple[int, int] | None = None
        self._segment: tuple[str, int, int] | None = None
        """The layer whose gradients arrive, and the clocks at its beginning."""
        self._last: tuple[int, int] = (0, 0)
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def _read_clocks(self) -> tuple[int, int]:
        """Return the time, and the processor time of this thread, in nanoseconds."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter_ns(), time.thread_time_ns()

    def _record_span(self, category: str, name: str, start: tuple[int, int], end: tuple[int, int], **args: Any) -> None:
        processor = None if self._device is not None else max(end[1] - start[1], 0)
        self._recorder.record_span(category, name, start[0], end[0], processor, trace.COMPUTE, **args)

    # ---- forward

    def _find_layer(self, module: torch.nn.Module) -> str | None:
        """Return the name of the layer if `module` has parameters of its own, else None."""
        if module not in self._layers:
            names = (self._names.get(id(p)) for p in module._parameters.values() if p is not None)
            self._layers[module] = next((name for name in names if name is not None), None)
        return self._layers[module]

    def _enter_module(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self._recorder.recording or not torch.is_grad_enabled() or self._backward is not None:
            return
        name = "forward" if not self._inside else self._find_layer(module)
        if name is not None:
            self._inside.append((module, name, *self._read_clocks()))

    def _leave_module(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not self._inside or self._inside[-1][0] is not module:
            return
        _, name, *start = self._inside.pop()
        end = self._read_clocks()
        self._record_span(trace.FORWARD, name, (start[0], start[1]), end)
        if not self._inside:
            self._forward_end = end

    # ---- backward

    def begin_backward(self) -> None:
        """Note the first gradient of a backward. Backward began when forward ended; a model whose forward was not seen
        begins its backward here."""
        self._inside.clear()
        self._backward = self._last = self._forward_end or self._read_clocks()
        self._forward_end = self._segment = None

    def note_gradient(self, name: str, elements: int, itemsize: int, is_always_dense: bool) -> None:
        """Record that a gradient of `elements` values of `itemsize` bytes is ready."""
        if not self._recorder.recording or self._backward is None:
            return
        now, layer = self._read_clocks(), name.rpartition(".")[0] or name
        if self._segment is None or self._segment[0] != layer:
            self._end_segment()
            self._segment = (layer, *self._last)
        self._last = now
        args = {"parameter": name, "elements": elements, "itemsize": itemsize, "small": is_always_dense}
        self._recorder.record_instant(trace.GRADIENT, "gradient ready", now[0], **args)

    def _end_segment(self) -> None:
        if self._segment is not None:
            layer, *start = self._segment
            self._record_span(trace.BACKWARD, layer, (start[0], start[1]), self._last)
            self._segment = None

    def end_gradients(self) -> None:
        """Note that backward has computed all gradients; what follows is the wait for the exchanges."""
        self._end_segment()
        self._last = self._read_clocks()

    def end_backward(self) -> None:
        """Note that all gradients are aggregated."""
        if self._backward is None:
            return
        now = self._read_clocks()
        self._record_span(trace.BACKWARD, "wait for exchanges", self._last, now)
        self._record_span(trace.BACKWARD, "backward", self._backward, now)
        self._backward = None

    # ---- buckets and steps

    def around_exchange(
        self, run: Callable[..., T], number: int, elements: int, itemsize: int, algorithm: str, density: float
    ) -> Callable[..., T]:
        """Record that a bucket is handed over, and return `run` as a function that records its work."""
        recorder = self._recorder
        recorder.record_instant(trace.BUCKET, f"bucket {number} ready", time.perf_counter_ns(), bucket=number)

        def recorded(*arguments: Any) -> T:
            args = {"elements": elements, "itemsize": itemsize, "algorithm": algorithm, "density": density}
            with recorder.record_bucket(number, **args):
                return run(*arguments)

        return recorded

    def end_step(self, latency: float | None) -> bool:
        """Note the end of an optimizer step. `latency` is the measured time of a short message between nodes in
        seconds, None if it was not measured. Return True if the trace continues."""
        if latency is not None:
            self._recorder.add_facts(latencySeconds=latency)
        self._recorder.end_step()
        if trace.active is self._recorder:
            return True
        for handle in self._handles:
            handle.remove()
        return False
