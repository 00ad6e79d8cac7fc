"""Compare the data cache with its peers: an HTTP remote behind a shaped link, 2 nodes x 2 ranks, two kinds of epochs.

    python benchmarks/cache.py [--quick] [--json FILE] [--problem NAME ...] [--contender TEXT ...]
    python benchmarks/cache.py --resume --minutes 8     # again and again, while it reports that measurements remain

It needs root. nginx (installed if it is missing) serves from its own network namespace with a link of 1 Gbit/s; the two
nodes that read have links of 10 Gbit/s. One machine simulates all three, so its processors may limit a first epoch:
their load is reported, and large datasets are also read over 200 Mbit/s. All ranks read batches of 256 at the same
time. Every contender starts with an empty cache and without bytes that the disk still has to write, and every epoch is
checked to contain every sample once. `--quick`, `--problem`, `--fast-only` and `--contender` store nothing unless
--json is given. The results are stored after each contender, and `--resume` measures only what the file lacks.
`--minutes` ends the run before that time; the next run resumes. Everything takes about 30 minutes, most of it for the
peers. The processor time of the ranks and their workers is reported too: it is the better measure if other programs
use the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from allreduce.network import explain_why_unavailable
from allreduce.scratch import create_scratch
from datacache import million_objects, remote
from datacache.epochs import LINK, CacheBench, Reader
from datacache.problem import CacheProblem, write_dataset
from datacache.settings import CONTENDERS, OURS_DISK, OWN_SHARDS, REFERENCES, CacheSetting
from topkube.bench.report import describe_machine
from topkube.files import write_json

RESULTS = Path(__file__).parent / "results" / "cache.json"
SLOW_LINK = "200mbit"
SLOW_BYTES = 200_000_000
"""Datasets of at least this size are also read over the slow link."""
LONGEST_SECONDS = 150.0
"""What the longest measurement takes, with its dataset. With `--minutes`, a measurement begins only if this time is
left."""
PROBLEMS = (
    CacheProblem("files-150k", "files", size=150_000, samples=3_000),
    CacheProblem("shards-150k", "shards", size=150_000, samples=8 * 426),
    CacheProblem("shards-3k", "shards", size=3_072, samples=8 * 17_857),
    CacheProblem("files-3k", "files", size=3_072, samples=3_000),
)
QUICK = (
    CacheProblem("files-150k", "files", size=150_000, samples=300),
    CacheProblem("shards-3k", "shards", size=3_072, samples=3 * 17_857),
)


@dataclass(frozen=True)
class Measurement:
    """A measurement, stored at once. At the rate LINK: first and second epochs; at SLOW_LINK: the first epoch."""

    problem: CacheProblem
    contender: CacheSetting
    rate: str

    def is_stored(self, stored: dict[str, Any]) -> bool:
        """Return True if the results have this measurement."""
        key = (self.problem.name, self.contender.label, self.rate)
        return any((row["problem"], row["contender"], row["link"]) == key for row in stored.get("first", []))


def plan_measurements(problems: list[CacheProblem], texts: list[str], *, fast_only: bool = False) -> list[Measurement]:
    """Return all measurements in the order of the tables; with `texts`, only those of contenders whose label contains
    one of them."""
    measurements = []
    for problem in problems:
        is_slow = not fast_only and problem.samples * problem.size >= SLOW_BYTES
        for rate in (LINK, SLOW_LINK) if is_slow else (LINK,):
            measurements += [
                Measurement(problem, contender, rate)
                for contender in CONTENDERS
                if problem.form in contender.forms
                and (rate == LINK or contender is not OURS_DISK)
                and (not texts or any(text in contender.label for text in texts))
            ]
    return measurements


def leave_out_missing(waiting: list[Measurement]) -> list[Measurement]:
    """Return the measurements of contenders that are installed, and report the others."""
    missing_kinds = set()
    for kind in dict.fromkeys(
        measurement.contender.kind for measurement in waiting if measurement.contender.kind in OWN_SHARDS
    ):
        try:
            importlib.import_module("datacache.contenders").import_libraries(kind)
        except ImportError as error:
            missing_kinds.add(kind)
            print(f"skipping {kind} ({error}): {OWN_SHARDS[kind][1]}", flush=True)
    return [measurement for measurement in waiting if measurement.contender.kind not in missing_kinds]


def measure(
    bench: CacheBench, measurement: Measurement, link: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the first epoch and of second epochs. `link`: bytes per second of plain GETs at the rate of
    the measurement."""
    problem, contender = measurement.problem, measurement.contender
    first, second = [bench.measure_first_epoch(contender, problem, link, measurement.rate)], []
    if measurement.rate == LINK:
        reference = REFERENCES.get(contender.label)
        if reference is None:
            second = bench.measure_second_epochs([Reader(contender, {}, "")], problem)
        else:
            second = bench.measure_second_epochs(
                [
                    Reader(reference, {"like": contender.label}, ""),  # the same samples in the same order
                    Reader(contender, {}, reference.label),
                ],
                problem,
            )
            bench.close(reference, forget=False)
    bench.close(contender)
    return first, second


def measure_all(
    bench: CacheBench,
    waiting: list[Measurement],
    stored: dict[str, Any],
    ends: float,
    store: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Make these measurements, and store the results after each. No measurement begins less than LONGEST_SECONDS before
    the time `ends`. Return the results."""
    for problem, group in groupby(waiting, lambda measurement: measurement.problem):
        if time.monotonic() + LONGEST_SECONDS > ends:
            break
        write_dataset(problem, bench.root)
        for measurement in group:
            if time.monotonic() + LONGEST_SECONDS > ends:
                break
            bench.shape(measurement.rate)
            name = "link_mb_per_s" if measurement.rate == LINK else "slow_link_mb_per_s"
            if problem.name not in stored.get(name, {}):
                link = bench.measure_link(problem, 3 if measurement.rate == LINK else 1)
                stored[name] = {**stored.get(name, {}), problem.name: round(link / 1e6, 1)}
                print(f"{problem.name:12} link {link / 1e6:.1f} MB/s by plain GETs of both nodes", flush=True)
            link = stored[name][problem.name] * 1e6
            stored = add_rows(stored, problem, *measure(bench, measurement, link))
            store(stored)
        for path in bench.root.glob(f"{problem.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return stored


def list_versions() -> str:
    versions_found = []
    for name in ("torch", "fsspec", "litdata", "mosaicml-streaming"):
        with contextlib.suppress(PackageNotFoundError):
            versions_found.append(f"{name} {version(name)}")
    return ", ".join(versions_found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small datasets, to check that everything works")
    parser.add_argument("--json", type=Path, help=f"result file (default {RESULTS} for the whole run)")
    parser.add_argument("--problem", action="append", choices=[problem.name for problem in PROBLEMS])
    parser.add_argument("--fast-only", action="store_true", help="leave the slow link out")
    parser.add_argument("--resume", action="store_true", help="measure only what the result file lacks")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end before this time; then resume")
    parser.add_argument("--contender", action="append", default=[], help="only those whose name has this text")
    options = parser.parse_args()
    reason = explain_why_unavailable() or remote.install_nginx()
    if reason:
        print(f"cannot measure here: {reason}", file=sys.stderr)
        return 2
    if options.minutes * 60 <= LONGEST_SECONDS:
        parser.error(f"--minutes must be more than {LONGEST_SECONDS / 60:g}: a measurement can take that long")
    problems = [p for p in (QUICK if options.quick else PROBLEMS) if not options.problem or p.name in options.problem]
    target = options.json or (
        None if options.quick or options.problem or options.contender or options.fast_only else RESULTS
    )
    stored = json.loads(target.read_text()) if options.resume and target and target.exists() else {}
    if stored.get("facts", describe_machine()) != describe_machine():
        print(f"{target} has figures of another machine; name another file with --json", file=sys.stderr)
        return 2
    waiting = [
        m
        for m in plan_measurements(problems, options.contender, fast_only=options.fast_only)
        if not m.is_stored(stored)
    ]
    waiting = leave_out_missing(waiting)

    def store(results: dict[str, Any]) -> None:
        if target:
            write_json(target, results, indent=1)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nodes and ranks are closed in order
    begun = time.monotonic()
    ends = begun + options.minutes * 60
    if waiting:
        with contextlib.ExitStack() as stack:
            bench = CacheBench(stack.enter_context(create_scratch()), stack)
            stored = measure_all(bench, waiting, stored, ends, store)
    remaining = [measurement for measurement in waiting if not measurement.is_stored(stored)]
    if "entries" not in stored and not remaining and time.monotonic() + LONGEST_SECONDS <= ends:
        stored["entries"] = million_objects.measure()
        print(stored["entries"], flush=True)
        store(stored)
    print(f"{time.monotonic() - begun:.0f} s in all" + (f"; kept in {target}" if target else ""), flush=True)
    if count := len(remaining) + ("entries" not in stored):
        print(f"{count} measurements remain: run it again with --resume", flush=True)
    return 0


def add_rows(
    stored: dict[str, Any], problem: CacheProblem, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the results with the rows of one more measurement, in the order of the tables."""
    description = {"form": problem.form, "sample_bytes": problem.size, "samples": problem.samples}
    names = [problem.name for problem in PROBLEMS]
    labels = [contender.label for own in CONTENDERS for contender in (REFERENCES.get(own.label, own), own)]

    def find_position(row: dict[str, Any]) -> tuple[int, bool, int]:
        return names.index(row["problem"]), row.get("link", LINK) != LINK, labels.index(row["contender"])

    described = {**stored.get("problems", {}), problem.name: description}
    return {
        **stored,
        "command": "python benchmarks/cache.py",
        "imports_are_timed": False,
        "date": time.strftime("%Y-%m-%d"),
        "problems": {name: described[name] for name in names if name in described},
        "first": sorted(stored.get("first", []) + first, key=find_position),
        "second": sorted(stored.get("second", []) + second, key=find_position),
        "facts": describe_machine(),
        "versions": list_versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
