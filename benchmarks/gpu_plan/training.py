"""Training steps on one GPU: plain torch, DistributedDataParallel over NCCL, dense and hitopk, with and without CUDA
graphs; and checks that need streams: two synchronised backwards against a reference, steps that the device skips, and
graphs against launches one by one."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

import topkube
from gpu_plan.device import Device
from gpu_plan.rows import Row, Rows
from topkube.examples.char_gpt import GPT, VOCABULARY
from topkube.settings import Settings

_WARMUP_STEPS = 4


class _GptSize(NamedTuple):
    layers: int
    width: int
    heads: int
    context: int
    batch: int


def run(device: Device, rows: Rows, quick: bool) -> None:
    """Measure a step of a GPT with 113 million parameters, or of a small one."""
    topkube.init()
    small = quick or device.dry
    gpt = (
        _GptSize(layers=2, width=64, heads=4, context=32, batch=2)
        if small
        else _GptSize(layers=16, width=768, heads=12, context=512, batch=32)
    )
    rows.measure("two backwards per step", lambda: _check_two_backwards(device))
    rows.measure("steps that the device skips", lambda: _check_skipped_steps(device))
    rows.measure("graphs", lambda: _check_graphs(device))
    rows.measure("training step", lambda: _measure_steps(device, gpt, 6 if small else 40))


def _check_two_backwards(device: Device) -> Row:
    """Compare gradients of two synchronised backwards per step with a reference on the same device: memory that the
    allocator reuses too early changes them."""
    weights = [torch.nn.Parameter(_make_matrix(device, 4_000_000)) for _ in range(6)]
    named = [(f"weight{i}", weight) for i, weight in enumerate(weights)]
    options: dict[str, Any] = {"aggregation": "hitopk", "density": 1.0, "warmup_steps": 0, "wire": "fp32"}
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(weights, lr=0.0), named, **options)
    wrong = 0
    for _ in range(2 if device.dry else 20):
        factors = [[torch.randn_like(weight) for weight in weights] for _ in range(2)]
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


def _make_matrix(device: Device, elements: int) -> torch.Tensor:
    """Return random numbers in two dimensions: gradients with one dimension are never selected from."""
    return device.make_normal(device.limit_elements(elements)).view(-1, 100)


def _check_skipped_steps(device: Device) -> Row:
    """Compare bit by bit: steps for which the device checks that the gradients are finite, and steps for which the host
    checks it. `host ms` are the milliseconds that the host needs for a backward and a step while the device is busy,
    after it was idle: in steps without a pause, the host would wait for the device's work of the step before."""
    results, host_ms = [], {}
    for check in ("device", "host"):
        weights = [
            torch.nn.Parameter(torch.ones(device.limit_elements(4_000_000), device=device.place)) for _ in range(2)
        ]
        named = [(f"weight{i}", weight) for i, weight in enumerate(weights)]
        inner = torch.optim.AdamW(weights, lr=0.1, fused=True)
        settings = Settings(finite_check=check, node_exchange="torch")
        optimizer = topkube.DistributedOptimizer(inner, named, aggregation="dense", settings=settings)
        undecided, times = 0, []
        for step in range(12):
            loss = sum((weight * (torch.nan if step in (0, 4, 5) else step)).sum() for weight in weights)
            device.synchronize()
            device.keep_busy()
            start = time.perf_counter()
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
            times.append((time.perf_counter() - start) * 1e3)
            undecided += optimizer._backward.gradients.decisions.is_undecided
            optimizer.zero_grad()
        results.append((optimizer.steps, optimizer.skipped_steps, undecided, [weight.detach() for weight in weights]))
        host_ms[f"host ms, {check}"] = statistics.median(times)
        optimizer.unwrap()
    (steps, skipped, undecided, by_device), (host_steps, host_skipped, _, by_host) = results
    wrong = [] if all(map(torch.equal, by_device, by_host)) else ["weights"]
    # The gradients of 3 of the 12 steps are not finite. The host leaves all 12 decisions to the device.
    if not ((steps, skipped) == (host_steps, host_skipped) == (9, 3) and undecided == 12):
        wrong.append("steps")
    return {"steps": steps, "skipped": skipped, "left to the device": undecided, **host_ms, "wrong": wrong}


def _check_graphs(device: Device) -> Row:
    """Compare steps whose buckets are recorded as CUDA graphs with steps without graphs, bit by bit."""
    results, stopped, recorded = [], "", 0
    for has_graphs in (True, False):
        weights = [torch.nn.Parameter(_make_matrix(device, 1_000_000).zero_()) for _ in range(3)]
        named = [(f"weight{i}", weight) for i, weight in enumerate(weights)]
        settings = Settings(device_graphs=has_graphs, node_exchange="torch")
        options: dict[str, Any] = {"aggregation": "hitopk", "density": 0.01, "warmup_steps": 0, "wire": "bf16"}
        inner = torch.optim.SGD(weights, lr=0.1)
        optimizer = topkube.DistributedOptimizer(inner, named, settings=settings, **options)
        generator = torch.Generator(device.place).manual_seed(0)
        for _ in range(8):
            factors = [torch.randn(weight.shape, generator=generator, device=device.place) for weight in weights]
            loss = sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([weight.detach() for weight in weights])
        engine = optimizer._backward.exchange.on_device
        if engine is not None and engine.graphs is not None:
            stopped, recorded = engine.graphs.stopped, engine.graphs.recorded
        optimizer.unwrap()
    wrong = [] if all(map(torch.equal, *results)) else ["weights"]
    return {"recorded": recorded, "stopped": stopped, "wrong": wrong + (["stopped"] if stopped else [])}


def _measure_steps(device: Device, gpt: _GptSize, steps: int) -> Row:
    contenders: dict[str, tuple[Any, Any]] = {}
    for name in ("torch", "ddp", "dense", "hitopk", "hitopk graphs"):
        torch.manual_seed(0)
        model = GPT(gpt.layers, gpt.width, gpt.heads, gpt.context).to(device.place)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not device.dry)
        if name == "ddp":
            model = _wrap_in_ddp(model, device)
        elif name != "torch":
            algorithm, _, graphs = name.partition(" ")
            options: dict[str, Any] = {"aggregation": algorithm, "density": 0.01, "warmup_steps": 0}
            settings = Settings(device_graphs=bool(graphs))
            optimizer = topkube.DistributedOptimizer(optimizer, model.named_parameters(), settings=settings, **options)
        contenders[name] = model, optimizer
    codes = torch.randint(VOCABULARY, (gpt.batch, gpt.context), device=device.place)
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
    torch.distributed.destroy_process_group()  # type: ignore[no-untyped-call]
    return {
        "parameters": sum(p.numel() for p in contenders["dense"][0].parameters()),
        "layers": gpt.layers,
        "width": gpt.width,
        "context": gpt.context,
        "batch": gpt.batch,
        "torch ms": median["torch"],
        "DDP ms": median["ddp"],
        "dense ms": median["dense"],
        "hitopk 1% ms": median["hitopk"],
        "hitopk 1% with graphs ms": median["hitopk graphs"],
        "overhead %": 100 * (median["hitopk"] / median["dense"] - 1),
        "kernels of a step": kernels,
    }


def _wrap_in_ddp(model: torch.nn.Module, device: Device) -> torch.nn.Module:
    """Return the model in DistributedDataParallel, with a group of one rank: NCCL, or gloo in the dry mode."""
    distributed: Any = torch.distributed
    backend = "gloo" if device.dry else "nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    return torch.nn.parallel.DistributedDataParallel(model)


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
