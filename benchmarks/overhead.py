"""Measure the cost of TopKube without an exchange: the char_gpt loop on one rank against plain torch, and the memory.

    python benchmarks/overhead.py

Time: loops over the same data with the same model, each in a process of its own. They alternate every few steps, so
that other work of the machine affects all of them: plain torch, as it is and with a heap that keeps what a step frees
(topkube/heap.py); torch's DistributedDataParallel over gloo; DistributedOptimizer and run.progress with dense
aggregation (nothing is sent on one rank); and with compression forced on (hitopk, density 0.01). There is one torch
thread. Results are medians over steps.

Memory: peak resident size of a process per variant, on a large model. The claim is two float32 shards (the residual
and its copy; on one rank a shard is the whole model) and two buckets above plain torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import topkube
from topkube import heap
from topkube.examples.char_gpt import GPT, CharacterWindows
from topkube.settings import Settings
from topkube.training.exchange.buckets.fusion import BUCKET_BYTES
from topkube.training.exchange.buckets.parameter import SMALL_ELEMENTS

VARIANTS = ("plain", "ddp", "dense", "hitopk")
PLAIN_WITH_HEAP = "plain, heap of TopKube"
TIMED = (*VARIANTS, PLAIN_WITH_HEAP)
LIMIT_PERCENT = {"dense": 1.0, "hitopk": 10.0}
WARM_STEPS = 3
BATCH, CONTEXT = 8, 128


def run_steps(variant: str, model: GPT, context: int) -> Iterator[None]:
    """Run the training loop of the example; yield after every step."""
    dataset = CharacterWindows(context)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if variant in ("plain", "ddp", PLAIN_WITH_HEAP):
        if variant == "ddp" and not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        called = DistributedDataParallel(model) if variant == "ddp" else model
        loader = DataLoader(dataset, batch_size=BATCH, sampler=torch.randperm(len(dataset)).tolist())
        for codes, targets in loader:
            loss = called(codes, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            plain.step()
            plain.zero_grad()
            yield
        return
    optimizer = topkube.DistributedOptimizer(
        plain, model.named_parameters(), aggregation=variant, density=0.01, warmup_steps=0, wire="bf16"
    )
    sampler = topkube.data.DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    with topkube.checkpointing(model, optimizer, sampler, settings=Settings()) as run:
        for codes, targets in run.progress(loader):
            loss = model(codes, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def open_variant(variant: str) -> None:
    """Prepare this process for a variant. Only TopKube's begin with `topkube.init`."""
    torch.set_num_threads(1)
    if variant == PLAIN_WITH_HEAP:
        heap.keep_freed_memory(heap.count_kept_bytes(1))
    elif variant not in ("plain", "ddp"):
        topkube.init()


def follow_orders(variant: str) -> None:
    """Make as many steps as each line of stdin says, and print their seconds as a line of JSON."""
    open_variant(variant)
    torch.manual_seed(0)
    loop = run_steps(variant, GPT(), CONTEXT)
    for line in sys.stdin:
        seconds = []
        gc.collect()
        gc.disable()
        for _ in range(int(line)):
            start = time.perf_counter()
            next(loop)
            seconds.append(time.perf_counter() - start)
        gc.enable()
        print(json.dumps(seconds), flush=True)


def measure_time(count: int, turn: int) -> dict[str, object]:
    """Return the seconds of a step of every variant, each in a process of its own. They alternate every `turn` steps;
    the first step of a turn does not count."""
    command = [sys.executable, __file__, "--loop-of"]
    pipe = subprocess.PIPE
    loops = {v: subprocess.Popen([*command, v], stdin=pipe, stdout=pipe, text=True) for v in TIMED}

    def make_steps(variant: str, steps: int) -> list[float]:
        process = loops[variant]
        assert process.stdin is not None
        assert process.stdout is not None
        print(steps, file=process.stdin, flush=True)
        return list(json.loads(process.stdout.readline()))

    try:
        seconds: dict[str, list[float]] = {variant: [] for variant in TIMED}
        for variant in TIMED:
            make_steps(variant, WARM_STEPS)
        for round_number in range(count // turn):
            first = round_number % len(TIMED)
            for variant in TIMED[first:] + TIMED[:first]:
                seconds[variant] += make_steps(variant, 1 + turn)[1:]
    finally:
        for process in loops.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    medians = {variant: statistics.median(values) for variant, values in seconds.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in GPT().parameters()),
        "batch": BATCH,
        "context": CONTEXT,
        "torch_threads": 1,
        "steps": count,
        "median_seconds": medians,
        "overhead_percent": {v: 100 * (medians[v] / medians["plain"] - 1) for v in TIMED[1:]},
        "limit_percent": LIMIT_PERCENT,
        "date": time.strftime("%Y-%m-%d"),
    }


def measure_peak_bytes(variant: str) -> dict[str, int]:
    """Train a larger model for a few steps, and return the peak resident size. Run in a separate process."""
    open_variant(variant)
    model = GPT(layers=8, width=512, heads=8, context=32)
    loop = run_steps(variant, model, 32)
    for _ in range(4):
        next(loop)
    large = [p.numel() for p in model.parameters() if p.ndim > 1 and p.numel() >= SMALL_ELEMENTS]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": peak, "parameters": sum(p.numel() for p in model.parameters()), "large": sum(large)}


def measure_memory(repeats: int) -> dict[str, object]:
    peaks, about = {}, {}
    for variant in VARIANTS:
        values = []
        for _ in range(repeats):
            command = [sys.executable, __file__, "--peak-of", variant]
            about = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            values.append(about["peak_bytes"])
        peaks[variant] = statistics.median(values)
    claimed = 2 * 4 * about["large"] + 2 * BUCKET_BYTES
    return {
        "parameters": about["parameters"],
        "peak_bytes": peaks,
        "above_plain_bytes": {variant: peaks[variant] - peaks["plain"] for variant in VARIANTS[1:]},
        "two_shards_and_two_buckets_bytes": claimed,
        "above_plain_share_of_claim": (peaks["hitopk"] - peaks["plain"]) / claimed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of TopKube on one rank.")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--turn", type=int, default=3, help="steps of one variant at a time (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes per variant for memory (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    parser.add_argument("--peak-of", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--loop-of", choices=TIMED, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("time", "memory"), help="measure only this, and keep the other result")
    args = parser.parse_args()
    if args.peak_of:
        print(json.dumps(measure_peak_bytes(args.peak_of)))
        return
    if args.loop_of:
        follow_orders(args.loop_of)
        return
    result = json.loads(args.output.read_text()) if args.output.exists() else {}
    if args.only != "memory":
        result["time"] = measure_time(args.steps, args.turn)
    if args.only != "time":
        result["memory"] = measure_memory(args.repeats)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
