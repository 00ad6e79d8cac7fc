"""The device of the stages: a GPU, or the CPU in the dry mode, where everything runs but the kernels of the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_SLEEP_CYCLES = 10_000_000
"""The device waits for so many of its clock cycles: about 5 milliseconds at 2 GHz."""
_DRY_ELEMENTS = 40_000


class Device:
    """The device of the plan's tensors. In the `dry` mode, tensors are small and on the CPU, and times are not those
    of a GPU."""

    def __init__(self, dry: bool, repeats: int) -> None:
        self.dry, self.repeats = dry, 1 if dry else repeats
        self.place = torch.device("cpu" if dry else "cuda")

    def limit_elements(self, elements: int) -> int:
        """Return `elements`; in the dry mode at most _DRY_ELEMENTS."""
        return min(elements, _DRY_ELEMENTS) if self.dry else elements

    def make_normal(self, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=self.place).normal_()

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def keep_busy(self) -> None:
        """Let the device work for about 5 milliseconds. The host does not wait."""
        if not self.dry:
            torch.cuda._sleep(_SLEEP_CYCLES)

    def free(self) -> None:
        """Return torch's cached memory to the device."""
        if not self.dry:
            torch.cuda.empty_cache()

    def measure_milliseconds(self, run: Callable[[int], Any], repeats: int | None = None) -> float:
        """Return the median time of `run(i)`, which uses the i-th of rotating inputs."""
        for i in range(1 if self.dry else 3):
            run(i)
        return statistics.median(self._time_call(run, i) for i in range(1 if self.dry else repeats or self.repeats))

    def _time_call(self, run: Callable[[int], Any], i: int) -> float:
        if self.dry:
            start = time.perf_counter()
            run(i)
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP_CYCLES)  # the host runs ahead, so that launches are not timed
        begin.record()
        run(i)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def measure_kernels(self, run: Callable[[], Any]) -> dict[str, float]:
        """Return the microseconds of each kernel that `run` launches, by name, from torch's profiler. Empty if the
        profiler cannot observe this device."""
        if self.dry:
            run()
            return {}
        from torch.profiler import ProfilerActivity, profile

        run()
        torch.cuda.synchronize()
        times: dict[str, float] = {}
        with suppress(RuntimeError):
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run()
                torch.cuda.synchronize()
            for event in profiler.events() or []:  # there are none before the profiler has ended
                times[event.name[:80]] = times.get(event.name[:80], 0.0) + float(event.device_time_total)
        return times

    def read_facts(self) -> dict[str, Any]:
        """Return the facts that a reader of the figures needs: device, driver and versions."""
        facts: dict[str, Any] = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda, "dry": self.dry}
        if not self.dry:
            properties: Any = torch.cuda.get_device_properties(0)
            facts |= {
                "device": properties.name,
                "multiprocessors": properties.multi_processor_count,
                "memory bytes": properties.total_memory,
                "compute capability": f"{properties.major}.{properties.minor}",
                "NCCL": ".".join(map(str, torch.cuda.nccl.version()))
                if torch.distributed.is_nccl_available()
                else None,
                "launch us": self._time_launch(),
                **{
                    f"{name} GB/s": self._measure_copy_rate(to_device)
                    for name, to_device in (("host to device", True), ("device to host", False))
                },
            }
        return facts

    def _time_launch(self) -> float:
        """Return the microseconds that the host needs to launch a small kernel."""
        x = torch.zeros(1, device=self.place)
        x.add_(1)  # loads the kernel
        self.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            x.add_(1)
        seconds = time.perf_counter() - start
        self.synchronize()
        return seconds * 1e3

    def _measure_copy_rate(self, to_device: bool) -> float:
        """Return the gigabytes per second of a copy of 256 MiB from pinned host memory to the device, or back."""
        size = 1 << 28
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(size, dtype=torch.uint8, device=self.place)
        to, source = (on_device, host) if to_device else (host, on_device)
        return size / self.measure_milliseconds(lambda _: to.copy_(source, non_blocking=True)) / 1e6
