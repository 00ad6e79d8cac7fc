"""Build, check and measure the CUDA kernels on the GPU of this machine.

    python benchmarks/gpu.py --prepare           on a machine with a network: collect wheels for a machine without one
    python benchmarks/gpu.py                     everything; writes benchmarks/results/gpu.jsonl and gpu.json
    python benchmarks/gpu.py --minutes 9         start no row after 9 minutes; the next call continues
    python benchmarks/gpu.py --stages facts,suite    these stages alone
    python benchmarks/gpu.py --quick             one size and few repeats, to check that everything works
    python benchmarks/gpu.py --dry               everything but the kernels of the GPU, on a machine without one

It needs torch for CUDA, nvcc 12 or newer, cmake, a C++ compiler, and an NVIDIA GPU whose driver is as new as nvcc. It
needs no network: it compiles with CMake alone, and takes packages that the machine lacks from the wheels that
`--prepare` has collected. It installs nothing into the environment: package and wheels go to a folder of their own, and
the script starts itself again for each stage with this folder on the path.

Each result is a line of gpu.jsonl, written at once. A call continues where the last one stopped. The stages are: facts,
checks at every size, kernels, sanitisers, counters (Nsight Compute), variants of the kernels, training, training on
several nodes that share the GPU, and the tests marked `gpu`. Each runs in a process group that is killed if it takes
too long. At the end the script compares the figures with the predictions in gpu_plan/predictions.py. Times are medians
of CUDA events; inputs rotate through more memory than the L2 cache holds. Rows of other sources, and of other options,
go to a file of their own.

Kernels are compiled for one device, on all cores, before the first stage. The build prints the time of each of its
stages, and a build that was interrupted continues with the files that are missing.

The exit code is 0 if every stage ended, 1 if a result is wrong or a stage failed, 2 if something is missing on this
machine; what is missing is printed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gpu_plan import machine, tools
from gpu_plan.predictions import judge_all
from gpu_plan.programs import run_group
from gpu_plan.rows import Row, Rows, read_rows

RESULTS = machine.ROOT / "benchmarks" / "results"
STAGES = {
    "facts": 1,
    "checks": 6,
    "kernels": 7,
    "sanitisers": 4,
    "counters": 3,
    "variants": 7,
    "training": 5,
    "nodes": 7,
    "suite": 5,
}
"""The stages in their order, and the minutes that each one may take. Sanitisers come after the times: they are slow,
and a device that they leave in a bad state must not cost a figure."""
GRACE_SECONDS = 30
"""After the time of a stage, its process is killed this much later."""


def list_missing(dry: bool) -> list[str]:
    """Return what is missing on this machine, each with the next step."""
    problems = []
    if importlib.util.find_spec("torch") is None:
        return ["torch is not installed. Next: python -m pip install torch"]
    import torch

    if not torch.cuda.is_available():
        cause = "is built for the CPU alone" if torch.version.cuda is None else "sees no GPU"
        problems.append(f"torch {torch.__version__} {cause}. Next: run this on a machine with an NVIDIA GPU")
    if machine.find_nvcc() is None:
        problems.append("there is no nvcc. Next: install the CUDA toolkit, or set CUDA_HOME")
    problems += [
        f"{', '.join(absent)} missing, needed for: {kind}. Next: run gpu.py --prepare on a machine on which pip works"
        for kind in machine.NEEDED
        if (absent := machine.list_absent_modules(kind))
    ]
    problems += [
        f"there is no {program}. Next: install {program}"
        for program in ("cmake", "c++")
        if shutil.which(program) is None
    ]
    return problems if not dry else [f"{line} (not needed for --dry)" if "GPU" in line else line for line in problems]


def run_stage(name: str, args: argparse.Namespace) -> None:
    """Run a stage in this process. Imports only what the stage needs."""
    rows = Rows(args.out, time.monotonic() + 60 * args.minutes)
    if name == "counters":
        tools.read_counters(rows, args.dry)
    elif name == "suite":
        tools.run_tests(rows, args.dry)
    elif name == "sanitisers":
        tools.run_sanitisers(rows, args.dry)
    else:
        _run_on_device(name, args, rows)


def _run_on_device(name: str, args: argparse.Namespace, rows: Rows) -> None:
    from gpu_plan.device import Device

    device = Device(args.dry, 5 if args.quick else 21)
    if name == "facts":
        rows.measure(
            "facts", lambda: {**device.read_facts(), **_read_driver(), "date": datetime.date.today().isoformat()}
        )
    elif name == "checks":
        from gpu_plan import checks

        checks.run(device, rows, args.quick)
    elif name == "variants":
        from gpu_plan import variants

        variants.run(device, rows, args.quick, args.work.resolve())
    elif name == "kernels":
        from gpu_plan import timing

        timing.run(device, rows, args.quick, args.sizes or tuple(timing.SIZES))
    elif name == "nodes":
        from gpu_plan import nodes

        nodes.run(device, rows, args.quick, args.work.resolve())
    else:
        from gpu_plan import training

        training.run(device, rows, args.quick)


def _read_driver() -> Row:
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit",
        "--format=csv,noheader",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {"driver": None}
    return {"driver": answer.strip().splitlines()[0]}


def find_other_package(package: Path, environment: dict[str, str]) -> str | None:
    """Return the file of the topkube that a stage would import, if it is not that of `package`."""
    query = [sys.executable, "-c", "import importlib.util; print(importlib.util.find_spec('topkube').origin)"]
    origin = subprocess.run(query, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    return None if Path(origin).is_relative_to(package) else origin


def run_all(args: argparse.Namespace) -> int:
    """Build, and run every stage in a process of its own."""
    end = time.monotonic() + 60 * args.minutes
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    carried = machine.unpack_wheels(args.wheels, work / "site")
    sys.path.insert(0, str(work / "site"))
    importlib.invalidate_caches()
    inherited_path = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(work / "site"), inherited_path]))}
    if (work / "site" / "lib" / "libmpi.so.12").exists():
        environment.setdefault("MPI4PY_LIBMPI", str(work / "site" / "lib" / "libmpi.so.12"))
    print(f"wheels used: {', '.join(carried) or 'none'}", flush=True)
    missing = list_missing(args.dry)
    for line in missing:
        print(f"missing: {line}", flush=True)
    has_nvcc, has_torch = machine.find_nvcc() is not None, importlib.util.find_spec("torch") is not None
    if not has_torch or (not args.dry and any("GPU" in line or "nvcc" in line for line in missing)):
        return 2
    architecture = args.architecture or machine.find_architecture() or "90"
    try:
        package = machine.build(work, environment, architecture if has_nvcc else None, end)
    except (OSError, machine.BuildError) as error:
        print(f"the build did not end: {error}", file=sys.stderr)
        return 2
    scripts = str(Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join([str(package), scripts, environment["PYTHONPATH"]])
    if other_package := find_other_package(package, environment):
        print(
            f"{other_package} is imported in place of the package that was built. Likely cause: this Python has an"
            " editable installation of topkube. Next: pip uninstall topkube, or use another Python",
            file=sys.stderr,
        )
        if not args.dry:
            return 2
    start_rows(args)
    failed = []
    for name in args.stages:
        minutes = STAGES[name]
        minutes_left = (end - time.monotonic()) / 60
        if minutes_left <= 0:
            print(f"the time is over before the stage {name}. Next: run the same command again", flush=True)
            break
        start = time.monotonic()
        status, _ = run_group(
            _build_stage_command(name, args, work, min(minutes_left, minutes)),
            60 * min(minutes_left, minutes) + GRACE_SECONDS,
            environment,
        )
        print(f"stage {name}: {time.monotonic() - start:.0f} s", flush=True)
        if status != 0:
            failed.append(name)
            print(f"the stage {name} {'ran too long' if status is None else f'ended with status {status}'}", flush=True)
    return finish(args, failed)


def _build_stage_command(name: str, args: argparse.Namespace, work: Path, minutes: float) -> list[str]:
    options = ["--stage", name, "--out", str(args.out), "--work", str(work), "--minutes", str(minutes)]
    flags = [option for option in ("--dry", "--quick") if getattr(args, option[2:])]
    if args.sizes is not None:
        options += ["--sizes", ",".join(args.sizes)]
    return [sys.executable, __file__, *options, *flags]


def start_rows(args: argparse.Namespace) -> None:
    """Let the file of rows begin with what was run. Move a file that began with something else out of the way: its rows
    would mix with those of these sources."""
    facts = {"sources": machine.digest_sources(), "dry": args.dry, "quick": args.quick}
    stored = next((row for row in read_rows(args.out) if row["key"] == "run"), None)
    if args.out.exists() and (stored is None or any(stored.get(name) != value for name, value in facts.items())):
        sources = "unknown" if stored is None else stored["sources"]
        kept = args.out.with_name(f"{args.out.stem}-{sources}-{time.time_ns()}.jsonl")
        args.out.rename(kept)
        print(f"rows of other sources or options are kept in {kept}", flush=True)
    Rows(args.out).measure("run", lambda: facts)


def finish(args: argparse.Namespace, failed: list[str]) -> int:
    """Write gpu.json for benchmarks/report.py, unless this was a dry run. Return the exit code."""
    rows = {row["key"]: row for row in read_rows(args.out)}
    wrong = [
        f"{key}: {row.get('error') or row['wrong']}"
        for key, row in rows.items()
        if row.get("error") or row.get("wrong")
    ]
    for line in wrong:
        print(f"WRONG {line}", flush=True)
    facts = rows.get("facts", {})
    earlier = keep_earlier_rows(args.out.with_suffix(".json"), rows, facts.get("device"))
    everything = {row["key"]: row for row in earlier} | rows
    timed = [row for key, row in everything.items() if key.startswith("time ") and "error" not in row]
    if timed and not args.dry and "error" not in facts:
        names = ("device", "multiprocessors", "driver", "torch", "date")
        step = everything.get("training step", {})
        document = {
            **{name: facts.get(name) for name in names},
            "command": f"python benchmarks/gpu.py{' --quick' if args.quick else ''}",
            "rows": [row for row in timed if row["dtype"] == "fp32"],
            "all rows": list(rows.values()),
            "step": step if "dense ms" in step else None,
            "earlier rows": earlier,
        }
        args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        print("then: python benchmarks/report.py", flush=True)
    for line in [] if args.dry else judge_all(rows):
        print(line, flush=True)
    print(f"{len(rows)} rows in {args.out}", flush=True)
    return 1 if wrong or failed else 0


def keep_earlier_rows(path: Path, rows: Mapping[str, Row], device: str | None) -> list[Row]:
    """Return the results in the file of an earlier run on the same kind of device that `rows` do not replace, because
    this run had other stages. Each names the sources and the date of its run."""
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    if stored["device"] != device:
        return []
    sources = next((row["sources"] for row in stored["all rows"] if row["key"] == "run"), "unknown")
    last = [{"sources": sources, "date": stored["date"], **row} for row in stored["all rows"]]
    kept: dict[str, Row] = {}
    for row in last + stored.get("earlier rows", []):
        if row["key"] not in rows:
            kept.setdefault(row["key"], row)
    return list(kept.values())


def parse_stages(text: str) -> tuple[str, ...]:
    """Return the names of stages that are joined by commas. Raises ArgumentTypeError if one does not exist."""
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(STAGES)):
        raise argparse.ArgumentTypeError(
            f"there is no stage {', '.join(unknown)}. Next: choose from {', '.join(STAGES)}"
        )
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="collect wheels for a machine without network")
    parser.add_argument("--python", default="3.12", help="the Python version of that machine (%(default)s)")
    parser.add_argument(
        "--processor", default="x86_64", choices=["x86_64", "aarch64"], help="its processor (%(default)s)"
    )
    parser.add_argument("--architecture", help="compile for this compute capability, such as 90 (that of the GPU here)")
    parser.add_argument("--wheels", type=Path, default=machine.WHEELS, help="the folder of wheels (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one size, few repeats")
    parser.add_argument(
        "--dry", action="store_true", help="everything but the kernels of the GPU; figures mean nothing"
    )
    parser.add_argument(
        "--stages",
        type=parse_stages,
        default=tuple(STAGES),
        help=f"run only these stages, in this order, joined by commas ({','.join(STAGES)})",
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: text.split(","),
        help="time the kernels on arrays of these sizes alone (0.82M,110M)",
    )
    parser.add_argument("--minutes", type=float, default=45, help="start no row after this time (%(default)s)")
    parser.add_argument("--out", type=Path, help="the file of rows (benchmarks/results/gpu.jsonl)")
    parser.add_argument("--work", type=Path, default=machine.ROOT / "build" / "gpu", help="build folder (%(default)s)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        failed = machine.prepare(args.python, args.processor, args.wheels)
        size = sum(wheel.stat().st_size for wheel in args.wheels.glob("*.whl"))
        print(f"{size / 1e6:.1f} MB in {args.wheels}" + (f"; no wheel for {', '.join(failed)}" if failed else ""))
        return 1 if failed else 0
    args.out = (args.out or (args.work / "dry.jsonl" if args.dry else RESULTS / "gpu.jsonl")).resolve()
    if args.stage:
        run_stage(args.stage, args)
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())
