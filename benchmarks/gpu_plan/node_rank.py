"""The program of each rank of gpu_plan/nodes.py.

node_rank.py ANSWER compare DEVICE           weights after training on DEVICE against those after training on the CPU
node_rank.py ANSWER time DEVICE SIZE [NAMES] milliseconds of a step of a GPT, of each algorithm and of torch's DDP
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import topkube
from topkube.bench.ddp import build_hook, wrap_in_ddp
from topkube.examples.char_gpt import GPT, VOCABULARY
from topkube.settings import Settings
from topkube.telemetry import phases

ALGORITHMS: dict[str, dict[str, Any]] = {
    "hierarchical": {},
    "flat": {},
    "hitopk": {"density": 0.01, "wire": "bf16"},
    "onebit": {},
    "onebit period 2": {"period": 2},
    "onebit delayed": {"delay": 1},
    "topk1bit": {},
    "localsgd": {"period": 2},
}
"""Names, each with the options of DistributedOptimizer. The first word is the algorithm."""
ERROR_FEEDBACK_IN_WEIGHTS = ("onebit", "onebit period 2", "onebit delayed", "topk1bit", "localsgd")
"""The contenders whose weights have the same bits as on CPUs with any number of nodes."""
TIMED: dict[str, dict[str, Any]] = {
    **{name: ALGORITHMS[name] for name in ("hierarchical", "hitopk", "onebit", "onebit delayed")},
    "int8": {},
    "int4": {},
    "int3": {},
    "auto": {},
    "auto with own weights": {"node_weights": "own"},
}
"""The contenders whose steps are timed, each with the options of DistributedOptimizer."""
SHAPES = ((300, 700), (1024, 257), (33,), (511, 129))
_LAST_BITS = 1e-5
"""What differences in the last bit of a mean may become in weights of a few units, after all steps."""
_POWERSGD_START = 2
PHASES = ("select", "inter", "intra")
"""The phases of an exchange that a run's summary shows."""
PEERS = ("ddp", "fp16", "powersgd1")
"""The hooks of DistributedDataParallel (topkube/bench/ddp.py)."""
_STEPS, _WARMUP, _TIMED_STEPS = 6, 4, 10
_TIMED_SECONDS = 4.0
"""Slow contenders make fewer steps: they begin none after this time."""
_LARGE = {"layers": 16, "width": 768, "heads": 12, "context": 512}
_SMALL = {"layers": 2, "width": 64, "heads": 4, "context": 32}


def compare(device: torch.device) -> dict[str, Any]:
    """Train the same matrices on `device` and on the CPU with each algorithm, from the same gradients."""
    row: dict[str, Any] = {"wrong": []}
    for name in ("int8", "int4", "int3"):  # buckets on a GPU are larger, and with them other elements share a scale
        row[f"all-reduce {name}"] = is_right = _compare_all_reduce(name, device)
        if not all(topkube.world.current().comm.allgather(is_right)):
            row["wrong"].append(name)
    for name, options in ALGORITHMS.items():
        try:
            trained = [_train(name, options, place) for place in (device, torch.device("cpu"))]
        except topkube.TopkubeError as error:
            row[name] = f"{type(error).__name__}: {error}"[:300]
            row["wrong"].append(name)
            continue
        equal = all(map(torch.equal, *trained))
        difference = max(float((a - b).abs().max()) for a, b in zip(*trained, strict=True))
        row[name] = "the same bits" if equal else difference
        # On a GPU, each node's values are multiplied by 1/3 before the nodes add them up, and buckets are larger, so
        # that other nodes are the first in the sum of `flat`: the last bit may differ.
        may_differ = topkube.size() > 2 and name not in ERROR_FEEDBACK_IN_WEIGHTS
        is_right = equal or (may_differ and difference < _LAST_BITS)
        if not all(topkube.world.current().comm.allgather(is_right)):
            row["wrong"].append(name)
    return row


def _compare_all_reduce(name: str, device: torch.device) -> bool:
    """Return True if all-reduces with a residual have the same bits on `device` as on the CPU."""
    generator = torch.Generator().manual_seed(topkube.rank())
    on_cpu = torch.randn(700_003, generator=generator)
    tensor = on_cpu.to(device, copy=True)
    residuals = [
        torch.zeros(len(topkube.collectives.new_residual(name, len(on_cpu))), device=x.device) for x in (on_cpu, tensor)
    ]
    for _ in range(3):
        topkube.allreduce_(on_cpu, "mean", name, residual=residuals[0])
        topkube.allreduce_(tensor, "mean", name, residual=residuals[1])
    return torch.equal(on_cpu, tensor.cpu()) and torch.equal(residuals[0], residuals[1].cpu())


def _train(name: str, options: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
    named = [(f"weight{i}", weight) for i, weight in enumerate(weights)]
    inner = torch.optim.SGD(weights, lr=0.5)  # a power of two: the product with it is exact
    optimizer = topkube.DistributedOptimizer(
        inner, named, aggregation=name.split()[0], warmup_steps=0, settings=Settings(), **options
    )
    generator = torch.Generator().manual_seed(topkube.rank())
    for _ in range(_STEPS):
        factors = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
        loss = sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = [weight.detach().cpu().clone() for weight in weights]
    optimizer.unwrap()
    return trained


def measure(device: torch.device, size: str, names: Sequence[str] = ("plain", *PEERS, *TIMED)) -> dict[str, Any]:
    """Return the milliseconds of a step without an exchange (`plain`), of the peers and of each algorithm, the median
    over the steps and the slowest rank's. `names` has DDP."""
    shape = _LARGE if size == "large" else _SMALL
    codes = torch.randint(VOCABULARY, (16 if size == "large" else 2, shape["context"]), device=device)
    row: dict[str, Any] = {**shape, "batch": len(codes), "wrong": []}
    for name in names:
        torch.manual_seed(0)
        model: Any = GPT(shape["layers"], shape["width"], shape["heads"], shape["context"]).to(device)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        if name in PEERS:
            model = _wrap_in_ddp(model, name)
        elif name != "plain":
            optimizer = topkube.DistributedOptimizer(
                optimizer,
                model.named_parameters(),
                aggregation=name.split()[0],
                warmup_steps=0,
                **TIMED[name],
            )

        def step(model: Any = model, optimizer: Any = optimizer) -> float:
            _synchronize(device)
            topkube.barrier()
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(codes, codes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _synchronize(device)
            return (time.perf_counter() - start) * 1e3

        for _ in range(_WARMUP):
            step()
        if name.startswith("auto"):
            while not optimizer.tuning.is_settled:
                step()
            row[f"{name} is"] = optimizer.tuning.summary
        before = {phase: phases.current.total(phase) for phase in PHASES}
        times = [step()]
        most = topkube.world.current().comm.bcast(min(_TIMED_STEPS, 1 + int(1e3 * _TIMED_SECONDS / times[0])))
        times += [step() for _ in range(most - 1)]
        row[f"{name} ms"] = max(topkube.world.current().comm.allgather(statistics.median(times)))
        if isinstance(optimizer, topkube.DistributedOptimizer):
            row[f"{name} phases ms"] = {
                phase: 1e3 * (phases.current.total(phase) - start) / len(times) for phase, start in before.items()
            }
        if isinstance(optimizer, topkube.DistributedOptimizer):
            optimizer.unwrap()
        del model, optimizer, step
    torch.distributed.destroy_process_group()  # type: ignore[no-untyped-call]
    return row


def _wrap_in_ddp(model: torch.nn.Module, hook: str) -> torch.nn.Module:
    """Return the model in DistributedDataParallel over gloo, as NCCL refuses two ranks on one GPU."""
    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        store = distributed.FileStore(f"{sys.argv[1]}.store", topkube.size())
        distributed.init_process_group("gloo", store=store, rank=topkube.rank(), world_size=topkube.size())
    wrapped = wrap_in_ddp(model, hook)
    wrapped.register_comm_hook(*build_hook(hook, _POWERSGD_START))
    return wrapped


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _parse_contenders(arguments: Sequence[str]) -> tuple[Any, ...]:
    size, *names = arguments
    return (size, names[0].split(",")) if names else (size,)


def main() -> None:
    answer, task, name = Path(sys.argv[1]), *sys.argv[2:4]
    device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
    topkube.init()
    row = compare(device) if task == "compare" else measure(device, *_parse_contenders(sys.argv[4:]))
    if topkube.rank() == 0:
        answer.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
