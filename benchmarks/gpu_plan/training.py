"""Training steps on one GPU: plain torch, dense and hitopk; and two synchronised backwards against a reference."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import topkube
from gpu_plan.device import Device
from gpu_plan.rows import Row, Rows
from topkube.examples.char_gpt import GPT, VOCABULARY

_WARMUP_STEPS = 4


def run(device: Device, rows: Rows, quick: bool) -> None:
    """Measure a step of a GPT with 113 million parameters, or of a small one."""
    topkube.init()
    small = quick or device.dry
    shape = (2, 64, 4, 32, 2) if small else (16, 768, 12, 512, 32)
    rows.measure("two backwards per step", lambda: _check_two_backwards(device))
    rows.measure("training step", lambda: _measure_steps(device, shape, 6 if small else 40))


def _check_two_backwards(device: Device) -> Row:
    """Compare gradients of two synchronised backwards per step with a reference on the same device: memory that the
    allocator reuses too early changes them."""
    weights = [torch.nn.Parameter(device.normal(device.elements(4_000_000))) for _ in range(6)]
    named = [(f"weight{i}", weight) for i, weight in enumerate(weights)]
    options: dict[str, Any] = {"aggregation": "hitopk", "density": 1.0, "warmup_steps": 0}
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(weights, lr=0.0), named, **options)
    wrong = 0
    for _ in range(2 if device.dry else 20):
        factors = [[device.normal(weight.numel()) for weight in weights] for _ in range(2)]
        for turn in factors:
            loss = sum((weight * factor).sum() for weight, factor in zip(weights, turn, strict=True))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
        for i, weight in enumerate(weights):
            wrong += not torch.equal(weight.grad if weight.grad is not None else weight, factors[0][i] + factors[1][i])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.unwrap()
    return {"wrong gradients": wrong, "wrong": ["gradients"] if wrong else []}


def _measure_steps(device: Device, shape: tuple[int, int, int, int, int], steps: int) -> Row:
    layers, width, heads, context, batch = shape
    contenders: dict[str, tuple[Any, Any]] = {}
    for name in ("torch", "dense", "hitopk"):
        torch.manual_seed(0)
        model = GPT(layers, width, heads, context).to(device.place)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not device.dry)
        if name != "torch":
            options: dict[str, Any] = {"aggregation": name, "density": 0.01, "warmup_steps": 0}
            optimizer = topkube.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        contenders[name] = model, optimizer
    codes = torch.randint(VOCABULARY, (batch, context), device=device.place)
    times: dict[str, list[float]] = {name: [] for name in contenders}

    def run_step(name: str) -> None:
        model, optimizer = contenders[name]
        with torch.autocast(device.place.type, torch.bfloat16):
            loss = model(codes, codes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(steps):
        for name in contenders:  # alternating, so that a change of the clock rate affects all of them
            device.synchronize()
            start = time.perf_counter()
            run_step(name)
            device.synchronize()
            if step >= _WARMUP_STEPS:
                times[name].append((time.perf_counter() - start) * 1e3)
    median = {name: statistics.median(milliseconds) for name, milliseconds in times.items()}
    kernels = {name: _profile_step(device, lambda name=name: run_step(name)) for name in contenders}
    return {
        "parameters": sum(p.numel() for p in contenders["dense"][0].parameters()),
        "layers": layers,
        "width": width,
        "context": context,
        "batch": batch,
        "torch ms": median["torch"],
        "dense ms": median["dense"],
        "hitopk 1% ms": median["hitopk"],
        "overhead %": 100 * (median["hitopk"] / median["dense"] - 1),
        "kernels of a step": kernels,
    }


def _profile_step(device: Device, run: Any) -> Row | None:
    """Return what a step does on the device, from torch's profiler: the kernels that it launches, the milliseconds from
    the first to the last of them, and the milliseconds in which no kernel ran. None in the dry mode."""
    if device.dry:
        run()
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        device.synchronize()
    spans = [(event.time_range.start, event.time_range.end) for event in profiler.events() or []]
    return measure_gaps(spans)


def measure_gaps(spans: list[tuple[float, float]]) -> Row:
    """Return the number of spans (start and end in microseconds), the milliseconds from the start of the first to the
    end of the last, and the milliseconds of the gaps between them. Spans of two streams may overlap."""
    gaps, reached = 0.0, min((start for start, _ in spans), default=0.0)
    first = reached
    for start, end in sorted(spans):
        gaps += max(0.0, start - reached)
        reached = max(reached, end)
    return {"launches": len(spans), "ms": (reached - first) / 1e3, "gaps ms": gaps / 1e3}
