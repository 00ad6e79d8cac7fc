"""The program of every rank of benchmarks/timeline.py: it makes training steps and returns the events of one of them.

timeline_rank.py LIBRARY SOCKET LAYOUT        LIBRARY: mpich (TopKube) | gloo (DistributedDataParallel)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from allreduce import orders
from step_rank import POWERSGD_START, DdpTrainer, TopKubeTrainer, build_model_and_data
from topkube.bench.ddp import DdpHook, build_hook, wrap_in_ddp

LAST_STEPS = 11
"""The step of median duration is chosen among the last steps of a run."""
Event = tuple[str, str, float, float]
"""Track, kind, and the milliseconds of start and end, from the start of the step."""
TRACKS = {1: "compute", 2: "communication", 3: "communication"}


def pick_step(spans: list[Event], steps: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the step of median duration among the last steps: its milliseconds, and its events, from its start."""
    last = steps[-LAST_STEPS:]
    duration = median_low([end - start for start, end in last])
    start, end = next(step for step in last if step[1] - step[0] == duration)
    events_of_step = [
        (track, kind, round(max(begin, start) - start, 2), round(min(stop, end) - start, 2))
        for track, kind, begin, stop in spans
        if stop > start and begin < end
    ]
    return {"ms": round(duration, 2), "events": sorted(events_of_step, key=lambda event: event[2])}


def read_trace(path: Path) -> dict[str, Any]:
    """Return the chosen step of the trace that a rank of TopKube wrote."""
    events = json.loads(path.read_text())["traceEvents"]
    steps = [(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events if e.get("cat") == "step"]
    spans: list[Event] = []
    open_exchanges: dict[str, float] = {}
    for event in events:
        kind, start = _name_kind(event), event.get("ts", 0) / 1e3
        if event["ph"] == "X" and kind is not None:
            spans.append((TRACKS[event["tid"]], kind, start, start + event["dur"] / 1e3))
        elif event["ph"] == "b":
            open_exchanges[event["id"]] = start
        elif event["ph"] == "e":
            spans.append(("link", "exchange", open_exchanges.pop(event["id"]), start))
    return pick_step(spans, steps)


def _name_kind(event: dict[str, Any]) -> str | None:
    """Return what the picture shows for an event of a trace, None if it does not show it."""
    category, name = event.get("cat"), event["name"]
    if category in ("forward", "optimizer"):
        return category if name == category else None
    if name == "wait for exchanges" or (category == "stage" and name == "wait for messages"):
        return "wait"
    if category == "backward":
        return "backward" if name == "backward" else None
    return "work" if category == "stage" else None


class TracedTopKube(TopKubeTrainer):
    """Training whose steps the product traces."""

    def record(self, contender: str, steps: int) -> dict[str, Any]:
        """Make `steps` steps, and return the chosen step."""
        training = self.start_training(contender, "gpt")
        for _ in range(steps):
            training.step()
        return read_trace(Path(os.environ["TOPKUBE_TRACE_DIRECTORY"]) / f"rank-{self.rank}.json")


class TracedDdp(DdpTrainer):
    """Training with DistributedDataParallel, whose steps this class traces. An exchange of a bucket lasts from the call
    of its communication hook until the hook's future has its result."""

    def record(self, contender: str, steps: int) -> dict[str, Any]:
        """Make `steps` steps, and return the chosen step."""
        spans: list[Event] = []
        bounds: list[tuple[float, float]] = []
        model, codes, targets = build_model_and_data(self.rank, "gpt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        parallel = wrap_in_ddp(model, contender)
        parallel.register_comm_hook(None, self._trace_hook(build_hook(contender, POWERSGD_START), spans))
        produced: list[float] = []
        for tensor in model.parameters():
            tensor.register_hook(lambda gradient: produced.append(_read_time()))
        for _ in range(steps):
            start = _read_time()
            loss = parallel(codes, targets)
            after_forward = _read_time()
            produced.clear()
            loss.backward()
            after_backward = _read_time()
            optimizer.step()
            end = _read_time()
            optimizer.zero_grad()
            spans += [
                ("compute", "forward", start, after_forward),
                ("compute", "backward", after_forward, after_backward),
                ("compute", "wait", produced[-1], after_backward),
                ("compute", "optimizer", after_backward, end),
            ]
            bounds.append((start, _read_time()))
        return pick_step(spans, bounds)

    @staticmethod
    def _trace_hook(ddp_hook: DdpHook, spans: list[Event]) -> Callable[[Any, Any], Any]:
        """Return a hook that also adds the time of each exchange to `spans`."""

        def traced(_: Any, bucket: Any) -> Any:
            start = _read_time()

            def note_end(future: Any) -> Any:
                spans.append(("link", "exchange", start, _read_time()))
                return future.value()

            return ddp_hook.hook(ddp_hook.state, bucket).then(note_end)

        traced.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        return traced


def _read_time() -> float:
    """Return the time in milliseconds."""
    return time.perf_counter() * 1e3


def execute(backend: TracedTopKube | TracedDdp, order: dict[str, Any]) -> dict[str, Any]:
    """Return the chosen step of `order["steps"]` steps of `order["contender"]`, without the garbage collector, as in
    step_rank.py."""
    gc.disable()
    return backend.record(order["contender"], order["steps"])


def main(library: str, path: str) -> None:
    torch.set_num_threads(1)
    backend = TracedTopKube() if library == "mpich" else TracedDdp()
    orders.follow(path, backend.rank, lambda order: execute(backend, order))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
