"""Builds, checks and measures the CUDA kernels on the GPU that is here, in one command of a few minutes.

    python benchmarks/gpu.py                     everything; writes benchmarks/results/gpu.json
    python benchmarks/gpu.py --quick             one size, few repeats: does it work at all?
    python benchmarks/gpu.py --no-build          with the library that is installed

Needs an NVIDIA GPU whose driver is as new as the nvcc (12 or newer), torch for CUDA, and the package's own
dependencies: `pip install -e '.[train,mpich,dev]'` where they are missing. What is built: the package with
TOPKUBE_CUDA=on, in place. What is checked: the tests marked `gpu`, and every kernel at every size (also one beyond 2^31
elements) against what torch says of its result. What is measured, in one run, medians of CUDA events: device-memory
bandwidth (a read and an in-place addition), topk, compress_, mstopk against torch; a char_gpt step with and without
compression. Inputs rotate through more memory than the L2 cache holds.

Ends with 0 when all was measured, 1 when a check failed, 2 when something is missing here (its words say what).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUITE = [
    *("test_cuda_selection.py", "test_cuda_wire.py", "test_cuda_refusals.py", "test_cuda_gpu.py"),
    "test_training_devices.py",
    "test_training_layerwise.py",
]
NEEDED = ["numpy", "ml_dtypes", "mpi4py", "pydantic", "xxhash", "pytest", "hypothesis"]
RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
SIZES = {"25.6M": 25_557_032, "110M": 110_000_000, "1B": 1_000_000_000}
DENSITIES = (0.001, 0.01)
ROTATED_BYTES = 1 << 30
GOALS = {"topk % of a read": 60, "topk × torch.topk": 5, "compress_ % of 12 bytes": 65, "mstopk × torch": 5}
STEP_GOAL_PERCENT = 3
BEYOND_2_31 = 2_200_000_000
SLEEP_CYCLES = 10_000_000


def missing(building: bool) -> str | None:
    """What this machine lacks, and the next step; None where nothing is."""
    installing = f"{sys.executable} -m pip install -e '{ROOT}[train,mpich,dev]'"
    try:
        import torch
    except ImportError:
        return f"torch is not installed. Next: {installing}"
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return (
                f"torch {torch.__version__} is built for the CPU alone. Next: where there is an NVIDIA GPU, install "
                "torch's build for CUDA (PyPI's for Linux is one: python -m pip install --force-reinstall torch), then "
                "run this again"
            )
        return (
            f"torch {torch.__version__} sees no GPU, so there is nothing to measure. Next: run it on a machine with an "
            "NVIDIA GPU and its driver; `nvidia-smi` there shows whether the driver works"
        )
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return f"these packages are missing: {', '.join(absent)}. Next: {installing}"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    if building and shutil.which("nvcc") is None and not toolkit.exists():
        return "there is no nvcc. Next: install the CUDA toolkit or set CUDA_HOME; or measure what is here: --no-build"
    return None


def build() -> bool:
    """The extension with CUDA, into the Python that runs this."""
    start = time.perf_counter()
    environment = {**os.environ, "TOPKUBE_CUDA": "on"}
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    if subprocess.run(command, env=environment, check=False).returncode:  # no scikit-build-core here: let pip fetch it
        command.remove("--no-build-isolation")
        if subprocess.run(command, env=environment, check=False).returncode:
            return False
    print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    return True


def check() -> bool:
    """The tests that run on every device, on this one."""
    start = time.perf_counter()
    suite = [f"tests/unit/{name}" for name in SUITE]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", *suite]
    passed = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    print(f"suite {'passed' if passed else 'FAILED'} in {time.perf_counter() - start:.0f} s", flush=True)
    return passed


def sanitise() -> bool | None:
    """Memory errors and races in one selection, by compute-sanitizer; None where it is not here or cannot run."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return None
    code = (
        "import torch, topkube.kernels as k; x = torch.randn(300_000).cuda();"
        "i, v = k.topk(x, 3000); k.compress_(x, torch.zeros_like(x), 3000); k.mstopk(x, 3000);"
        "k.decode(k.encode(i, v, x.numel(), wire='bf16')); torch.cuda.synchronize()"
    )
    clean = True
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "3", sys.executable, "-c", code]
        try:
            ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, timeout=60, text=True)
        except subprocess.TimeoutExpired:
            return None
        if ended.returncode not in (0, 3):
            return None
        if ended.returncode == 3:
            print(f"compute-sanitizer --tool {tool} says:\n{ended.stdout[-3000:]}")
            clean = False
    return clean


def right(elements: int, density: float, dtype: Any) -> bool:
    """Whether every kernel's result at this size is what torch's own operations say it must be."""
    import torch

    from topkube import kernels

    def places(indices: Any) -> Any:
        return indices.view(torch.int32).to(torch.int64) & 0xFFFFFFFF

    x = torch.empty(elements, dtype=dtype, device="cuda").normal_()
    k = kernels.entries_kept(elements, density)
    indices, values = kernels.topk(x, k)
    at = places(indices)
    least = values.abs().min()
    found = [
        bool((at[1:] > at[:-1]).all()),
        torch.equal(x[at], values),
        int((x.abs() > least).sum()) < k <= int((x.abs() >= least).sum()),
    ]
    buffer = kernels.encode(indices, values, elements, wire="fp32")
    decoded, exact = kernels.decode(buffer, length=elements)
    found += [torch.equal(decoded, indices), torch.equal(exact, values.float())]
    taken, kept = kernels.mstopk(x, k)
    taken = places(taken)
    upper = kernels.last_thresholds().upper
    found += [
        bool((taken[1:] > taken[:-1]).all()),
        torch.equal(x[taken], kept),
        int((kept.float().abs() >= upper).sum()) == int((x.float().abs() >= upper).sum()),
    ]
    if dtype == torch.float32:
        residual = torch.randn(elements, device="cuda")
        whole = x + residual
        indices, values = kernels.compress_(x, residual, k)
        at = places(indices)
        found.append(torch.equal(whole[at], values))
        whole[at] = 0
        found.append(torch.equal(whole, x))
    if not all(found):
        print(f"wrong at {elements:,} elements of {dtype}, density {density:g}: checks {found}")
    return all(found)


class Clock:
    """Medians of CUDA events around a call, inputs rotating."""

    def __init__(self, repeats: int) -> None:
        import torch

        self.torch, self.repeats = torch, repeats

    def milliseconds(self, run: Callable[[int], Any], repeats: int | None = None) -> float:
        """`run(i)` uses the i-th of the rotating inputs."""
        torch, found = self.torch, []
        for i in range(3):
            run(i)
        torch.cuda.synchronize()
        for i in range(repeats or self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)  # the host runs ahead, so that launches are not what is timed
            begin.record()
            run(i)
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        return statistics.median(found)


def torch_mstopk(x: Any, k: int) -> Any:
    """Algorithm 1 as torch operations."""
    import torch

    a = x.abs()
    mean, top = a.double().mean().float(), a.max()
    left, right = torch.zeros((), device=x.device), torch.ones((), device=x.device)
    upper, lower = torch.full((), torch.inf, device=x.device), torch.zeros((), device=x.device)
    for _ in range(30):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (top - mean)
        few = (a >= threshold).sum() <= k
        right, left = torch.where(few, ratio, right), torch.where(few, left, ratio)
        upper, lower = torch.where(few, threshold, upper), torch.where(few, lower, threshold)
    above = (a >= upper).nonzero().view(-1)
    between = ((a >= lower) & (a < upper)).nonzero().view(-1)[: k - above.numel()]
    indices = torch.cat([above, between]).sort().values
    return indices, x[indices]


def selection(name: str, elements: int, clock: Clock, quick: bool) -> list[dict[str, Any]]:
    """Every kernel at one size."""
    import torch

    from topkube import kernels

    copies = max(1, min(4, ROTATED_BYTES // (4 * elements)))
    inputs = [torch.randn(elements, device="cuda") for _ in range(copies)]
    residuals = [torch.randn(elements, device="cuda") for _ in range(copies)]
    read = clock.milliseconds(lambda i: inputs[i % copies].sum())
    add = clock.milliseconds(lambda i: inputs[i % copies].add_(residuals[i % copies], alpha=0.0))
    few = 5 if quick or elements > 5e8 else 9
    rows = []
    for density in DENSITIES:
        k = kernels.entries_kept(elements, density)
        magnitudes = inputs[0].abs()
        peer = clock.milliseconds(lambda i, k=k, m=magnitudes: torch.topk(m, k, sorted=False), few)
        del magnitudes
        topk = clock.milliseconds(lambda i, k=k: kernels.topk(inputs[i % copies], k))
        passes = kernels.last_effort().passes
        compress = clock.milliseconds(lambda i, k=k: kernels.compress_(inputs[i % copies], residuals[i % copies], k))
        for x in inputs:
            x.normal_()
        mstopk = clock.milliseconds(lambda i, k=k: kernels.mstopk(inputs[i % copies], k))
        composed = clock.milliseconds(lambda i, k=k: torch_mstopk(inputs[i % copies], k), few)
        rows.append(
            {
                "size": name,
                "elements": elements,
                "density": density,
                "read ms": read,
                "read GB/s": 4 * elements / read / 1e6,
                "add ms": add,
                "topk ms": topk,
                "topk passes": passes,
                "torch.topk ms": peer,
                "compress_ ms": compress,
                "mstopk ms": mstopk,
                "torch mstopk ms": composed,
                "topk % of a read": 100 * read / topk,
                "topk × torch.topk": peer / topk,
                "compress_ % of 12 bytes": 100 * add / compress,
                "mstopk × torch": composed / mstopk,
            }
        )
        print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()}), flush=True)
    return rows


def training(quick: bool) -> dict[str, Any] | None:
    """Milliseconds of a char_gpt step on one GPU, compression off and forced on, alternating; None without MPI."""
    import torch

    import topkube
    from topkube.examples.char_gpt import GPT, VOCABULARY

    try:
        topkube.init()
    except topkube.errors.WorldError as error:
        print(f"no training step was measured: {error}")
        return None
    device = topkube.device()
    layers, width, heads, context, batch = (4, 256, 4, 128, 8) if quick else (16, 768, 12, 512, 32)
    contenders = {}
    for name in ("dense", "hitopk"):
        torch.manual_seed(0)
        model = GPT(layers, width, heads, context).to(device)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        options = {"aggregation": name, "density": 0.01, "warmup_steps": 0}
        contenders[name] = model, topkube.DistributedOptimizer(plain, model.named_parameters(), **options)
    codes = torch.randint(VOCABULARY, (batch, context), device=device)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in range(8 if quick else 40):
        for name, (model, optimizer) in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(codes, codes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if step >= 4:
                times[name].append((time.perf_counter() - start) * 1e3)
    median = {name: statistics.median(found) for name, found in times.items()}
    return {
        "parameters": sum(p.numel() for p in contenders["dense"][0].parameters()),
        "layers": layers,
        "width": width,
        "context": context,
        "batch": batch,
        "dense ms": median["dense"],
        "hitopk 1% ms": median["hitopk"],
        "overhead %": 100 * (median["hitopk"] / median["dense"] - 1),
    }


def verdicts(rows: list[dict[str, Any]], step: dict[str, Any] | None) -> list[str]:
    """What falls short of the goals, line by line."""
    short = [
        f"{row['size']} at {row['density']:g}: {name} is {row[name]:.1f}, the goal is {goal}"
        for row in rows
        for name, goal in GOALS.items()
        if row[name] < goal
    ]
    if step is None:
        short.append("no training step was measured")
    elif step["overhead %"] > STEP_GOAL_PERCENT:
        short.append(
            f"a step with compression takes {step['overhead %']:.1f}% longer, the goal is {STEP_GOAL_PERCENT}%"
        )
    return short


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, few repeats")
    parser.add_argument("--no-build", action="store_true", help="measure the library that is installed")
    parser.add_argument("--json", type=Path, default=RESULT, help="where results go (%(default)s)")
    args = parser.parse_args()
    if words := missing(building=not args.no_build):
        print(f"benchmarks/gpu.py: {words}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    if not args.no_build and not build():
        print(
            "benchmarks/gpu.py: the build failed, its words are above. Next: install what they name (an nvcc that this "
            "compiler is not too new for, nanobind, scikit-build-core), or measure what is installed: --no-build",
            file=sys.stderr,
        )
        return 2
    if not check():
        return 1
    import torch

    sizes = {"25.6M": SIZES["25.6M"]} if args.quick else SIZES
    plan = [(elements, density, torch.float32) for elements in sizes.values() for density in DENSITIES]
    if not args.quick:
        plan.append((BEYOND_2_31, DENSITIES[0], torch.bfloat16))
    if not all(right(*case) for case in plan):
        return 1
    torch.cuda.empty_cache()
    print(f"results are right at every size, after {time.perf_counter() - start:.0f} s", flush=True)
    clean = None if args.quick else sanitise()
    clock = Clock(5 if args.quick else 21)
    properties = torch.cuda.get_device_properties(0)
    rows = [row for name, elements in sizes.items() for row in selection(name, elements, clock, args.quick)]
    step = training(args.quick)
    print(json.dumps(step), flush=True)
    found = {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/gpu.py{' --quick' if args.quick else ''}",
        "compute-sanitizer clean": clean,
        "rows": rows,
        "step": step,
        "seconds": time.perf_counter() - start,
    }
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    for line in verdicts(rows, step):
        print("short of the goal:", line)
    print(f"wrote {args.json} after {found['seconds']:.0f} s; then: python benchmarks/report.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
