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
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from allreduce.network import Network, explain_why_unavailable
from allreduce.scratch import create_scratch
from allreduce.worlds import RankWorld, Recipe
from datacache import million_objects, remote
from datacache.problem import CacheProblem, write_dataset
from topkube.bench.report import describe_machine
from topkube.files import write_json

RESULTS = Path(__file__).parent / "results" / "cache.json"
LAYOUT = (2, 2)
LINK, SLOW_LINK, NODES = "1gbit", "200mbit", "10gbit"
SLOW_BYTES = 200_000_000
"""Datasets of at least this size are also read over the slow link."""
EPOCHS = 5
"""The number of timed second epochs; the result is their median."""
PATIENCE_SECONDS = 60.0
"""After this time a contender reads no more second epochs."""
LONGEST_SECONDS = 150.0
"""What the longest measurement takes, with its dataset. With `--minutes`, a measurement begins only if this time is
left."""
RECIPE = Recipe(
    "cache",
    "mpich",
    Path(sys.executable),
    (("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "eth0")),
    script=Path(__file__).parent / "datacache" / "rank.py",
)
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
class CacheSetting:
    """A contender with its settings: its class in `contenders`, and the arguments of this class. It reads the datasets
    of these `forms`."""

    label: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ("files", "shards")


OURS, OURS_DISK = (
    CacheSetting("TopKube", "OurCache", {"memory": True}),
    CacheSetting("TopKube, disk only", "OurCache", {"memory": False}),
)
PEERS = (
    CacheSetting("DataLoader + fsspec filecache", "FileCache", {"workers": 0}, ("shards",)),
    CacheSetting("DataLoader + fsspec filecache, 2 workers", "FileCache", {"workers": 2}, ("files",)),
    CacheSetting("litdata", "LitData", {"workers": 0}),
    CacheSetting("litdata, 2 workers", "LitData", {"workers": 2}),
    CacheSetting("MosaicML Streaming", "Mosaic", {"workers": 0}),
    CacheSetting("MosaicML Streaming, 2 workers", "Mosaic", {"workers": 2}),
)
CONTENDERS = (OURS, OURS_DISK, *PEERS)
OWN_SHARDS = {
    "LitData": ("litdata", "pip install 'topkube[bench]'"),
    "Mosaic": ("mosaic", "pip install mosaicml-streaming"),
}
"""The peers that have a format of their own: the ending of its folder, and how to install the peer."""


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


class Reader(NamedTuple):
    """A contender that takes turns with others. `arguments` are passed in addition to those of its setting. `reference`
    is the label of the contender with which it is compared, "" if there is none."""

    contender: CacheSetting
    arguments: dict[str, Any]
    reference: str


class CacheBench:
    """The benchmark: ranks in two nodes, and the remote in a third node."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory, self.root = directory, directory / "remote"
        self.root.mkdir()
        self._network = stack.enter_context(Network(len(LAYOUT) + 1, NODES))
        self.shape(LINK)
        self.remote = stack.enter_context(remote.Remote(self._network.nodes[-1], self.root, directory / "nginx"))
        self._world = stack.enter_context(RankWorld(RECIPE, LAYOUT, directory, self._network))
        self._turn = 0
        self.repeated: dict[str, int] = {}
        """For each peer that repeats samples, the most samples that came twice in an epoch."""

    def find_own_shards(self, contender: CacheSetting, problem: CacheProblem) -> Path | None:
        """Return the folder with the dataset in the peer's own format; None if it reads the same objects as TopKube."""
        return self.root / f"{problem.name}.{OWN_SHARDS[contender.kind][0]}" if contender.kind in OWN_SHARDS else None

    def shape(self, rate: str) -> None:
        """Limit the link of the remote."""
        self._network.shape(rate, [len(LAYOUT)])

    def measure_link(self, problem: CacheProblem, times: int = 3) -> float:
        """Return the bytes per second that both nodes get over the link with plain GETs; the best of `times`."""
        url = f"{self.remote.uri}/{problem.name}.flat"
        rates = []
        for _ in range(times):
            answers = self._world.ask(do="link", url=url)
            rates.append(sum(a["bytes"] for a in answers) / _compute_seconds(answers))
        return max(rates)

    def read_epoch(
        self, contender: CacheSetting, problem: CacheProblem, number: int, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Read an epoch on all ranks. Every sample must come once. A peer that repeats samples is measured all the
        same, and its number of repeated samples is reported."""
        answers = self._world.ask(
            do="epoch",
            name=contender.label,
            kind=contender.kind,
            arguments={**contender.arguments, **arguments},
            problem=problem.to_data(),
            folder=f"caches/{self._turn}",
            uri=self.remote.uri,
            epoch=number,
        )
        if missing := answers[0]["missing"]:
            raise SystemExit(f"{contender.label} left out {missing} samples and is not measured")
        repeated = answers[0]["repeated"]
        if repeated >= sum(LAYOUT):  # torch's sampler gives every rank the same number of samples
            if contender not in PEERS:
                raise SystemExit(f"{contender.label} returned {repeated} samples twice and is not measured")
            self.repeated[contender.label] = max(repeated, self.repeated.get(contender.label, 0))
        return answers

    def close(self, contender: CacheSetting, *, forget: bool = True) -> None:
        """Close the contender on all ranks. With `forget`, the cache is emptied too."""
        self._world.ask(do="close", name=contender.label)
        self.repeated.pop(contender.label, None)
        if forget:
            shutil.rmtree(self.directory / "caches", ignore_errors=True)
            self._turn += 1

    def measure_first_epoch(
        self, contender: CacheSetting, problem: CacheProblem, link: float, rate: str = LINK
    ) -> dict[str, Any]:
        """Read the epoch that fills an empty cache, including opening. `link`: bytes per second of plain GETs at
        `rate`."""
        os.sync()  # otherwise this epoch waits until the disk has written the bytes of earlier contenders
        before, times_before = self.remote.count_sent_bytes(), _read_processor_times()
        answers = self.read_epoch(contender, problem, 0)
        busy, available = (now - then for now, then in zip(_read_processor_times(), times_before, strict=True))
        fetched, least = self.remote.count_sent_bytes() - before, problem.count_bytes(self.root)
        if (own := self.find_own_shards(contender, problem)) is not None:
            least = sum(path.stat().st_size for path in own.iterdir())
        seconds = _compute_seconds(answers)
        row = {
            "problem": problem.name,
            "contender": contender.label,
            "link": rate,
            "seconds": round(seconds, 2),
            "mb_per_s": round(least / seconds / 1e6, 1),
            "percent_of_link": round(100 * least / seconds / link, 1),
            "fetched_of_dataset": round(fetched / least, 4),
            "processors_percent": round(100 * busy / available),
            "processor_seconds": round(sum(answer["processor_seconds"] for answer in answers), 2),
            "missing": answers[0]["missing"],
            "repeated": self.repeated.get(contender.label, 0),
        }
        print(
            f"{problem.name:12} first epoch   {contender.label:42}{seconds:7.2f} s {row['mb_per_s']:8.1f} MB/s "
            f"{row['percent_of_link']:6.1f}% of the link ({rate}), {row['fetched_of_dataset']:.3f} x the dataset "
            f"fetched, {row['processor_seconds']:.1f} s of processors in the ranks, processors "
            f"{row['processors_percent']}% busy",
            flush=True,
        )
        return row

    def measure_second_epochs(
        self, readers: list[Reader], problem: CacheProblem, first: int = 1
    ) -> list[dict[str, Any]]:
        """Read further epochs; the readers alternate. The first epoch of each is not timed, unless it takes more than
        half of PATIENCE_SECONDS."""
        seconds: dict[str, list[float]] = {reader.contender.label: [] for reader in readers}
        fetched = dict.fromkeys(seconds, 0)
        for turn in range(EPOCHS + 1):
            for contender, arguments, _ in readers:
                before = self.remote.count_sent_bytes()
                epoch_seconds = _compute_seconds(self.read_epoch(contender, problem, first + turn, **arguments))
                # The first epoch may open the contender. A slow first epoch counts, because few others follow.
                if turn or epoch_seconds > PATIENCE_SECONDS / 2:
                    seconds[contender.label].append(epoch_seconds)
                    fetched[contender.label] += self.remote.count_sent_bytes() - before
            if max(sum(times) for times in seconds.values()) > PATIENCE_SECONDS:
                break
        megabytes = problem.samples * problem.size / 1e6
        rate = {label: megabytes / median(times) for label, times in seconds.items()}
        rows = []
        for contender, _, reference in readers:
            times = seconds[contender.label]
            rows.append(
                {
                    "problem": problem.name,
                    "contender": contender.label,
                    "mb_per_s": round(rate[contender.label], 1),
                    "min": round(megabytes / max(times), 1),
                    "max": round(megabytes / min(times), 1),
                    "epochs": len(times),
                    "of": reference,
                    "percent": round(100 * rate[contender.label] / rate[reference], 1) if reference else None,
                    "fetched_mb_per_epoch": round(fetched[contender.label] / len(times) / 1e6, 1),
                    "repeated": self.repeated.get(contender.label, 0),
                }
            )
            share = f" {rows[-1]['percent']:6.1f}% of {reference}" if reference else ""
            print(
                f"{problem.name:12} second epoch  {contender.label:42}{rate[contender.label]:18.1f} MB/s{share}",
                flush=True,
            )
        return rows


def _read_processor_times() -> tuple[float, float]:
    """Return the busy time and the whole time of this machine's processors since it started, in clock ticks."""
    times = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = times[3] + times[4]
    return float(sum(times) - idle), float(sum(times))


def _compute_seconds(answers: list[dict[str, Any]]) -> float:
    return float(max(a["end"] for a in answers) - min(a["start"] for a in answers))


ARRAY, PAGES = CacheSetting("NumPy array in memory", "InMemory"), CacheSetting("page cache, same samples", "PageCache")
REFERENCES = {OURS.label: ARRAY, OURS_DISK.label: PAGES}


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
