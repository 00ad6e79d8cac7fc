"""Compare all-reduce of TopKube and its peers on this machine.

    python benchmarks/allreduce/run.py [--quick] [--json FILE] [--part 2x2|4x1|node ...]
    python benchmarks/allreduce/run.py --part 2x2 --rate 1gbit --contender hitopk --contender MPICH [--elements 16384]
    python benchmarks/allreduce/run.py --peer-settings

The second form is for quick experiments and stores nothing. The third form tries every setting of the dense peers at
1 Gbit/s.

With root, nodes are network namespaces with links of 100 Mbit/s, 1 and 10 Gbit/s, in two layouts (2 nodes x 2 ranks,
4 x 1). `node` (2 ranks, shared memory, no network) needs no root. Contenders alternate run by run. Each result is
checked. The bytes on every link are read from the interface counters and compared with the formula. Memory and links
are measured in between. A part that is run again replaces only its own rows in the JSON file. Everything takes about 12
minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from allreduce import contender_settings as settings
from allreduce import probes
from allreduce.bounds import Machine
from allreduce.contender_settings import Contender
from allreduce.network import RATES, Network, explain_why_unavailable
from allreduce.problem import SumProblem
from allreduce.scratch import create_scratch
from allreduce.worlds import RankWorld
from topkube.bench.report import BenchReport

LENGTH = 25_557_032
"""The number of parameters of ResNet-50."""
CURVE = (16_384, 262_144, 4_194_304)
"""64 KiB, 1 MiB and 16 MiB of float32."""
REPEATED_BYTES = 8 << 20
UNSHAPED = "unshaped"
LAYOUTS = {"2x2": (2, 2), "4x1": (1, 1, 1, 1), "node": (2,)}
RESULTS = Path(__file__).parents[1] / "results" / "allreduce.json"
COLUMNS = {
    "part": "layout",
    "rate": "link",
    "elements": "elements",
    "contender": "contender",
    "kind": "kind",
    "ms": "ms",
    "ms_min": "min",
    "ms_max": "max",
    "runs": "runs",
    "bound_ms": "bound, ms",
    "of_bound": "% of bound",
    "sent_mb": "sent per node, MB",
    "formula_mb": "formula, MB",
    "against_dense": "x best dense peer",
    "against_topk": "x torch.topk + all-gather",
    "select_ms": "select, ms",
    "intra_ms": "in the node, ms",
    "inter_ms": "between nodes, ms",
}


def choose_contenders(part: str, rate: str | None, elements: int, quick: bool) -> list[Contender]:
    """Return the contenders of one measurement: fewer on slow links, because a dense all-reduce at 100 Mbit/s takes ten
    seconds."""
    peers, hierarchical = settings.PEERS[part], settings.HIERARCHICAL
    if part == "node":
        return [*peers, hierarchical]
    sparse_peer = settings.SPARSE_PEERS[0]
    sparse_without_naive = [contender for contender in settings.OURS_SPARSE if contender is not settings.NAIVE]
    if quick:
        return [peers[0], peers[-1], sparse_peer, hierarchical, settings.HITOPK]
    if rate == "100mbit":
        return [*peers[1:], sparse_peer, hierarchical, *sparse_without_naive]  # without MPICH's default settings
    if elements != LENGTH or rate == UNSHAPED:
        return [*peers, sparse_peer, hierarchical, *sparse_without_naive]
    return [*peers, *settings.SPARSE_PEERS, *settings.OURS_DENSE, *settings.OURS_SPARSE]


def count_repeats(length: int) -> int:
    """Return how many calls in a row a run of small arrays has: as many as reduce 8 MiB. One call after a pause would
    measure how ranks wake up."""
    return max(1, REPEATED_BYTES // (4 * length))


class _Measured(NamedTuple):
    """The runs of all contenders with one link rate and one array length."""

    rate: str | None
    length: int
    link: dict[str, Any]
    """The link probe: lists of bytes and seconds."""
    runs: list[tuple[Contender, list[dict[str, Any]]]]


class AllreduceBench:
    """A layout: its network, its worlds and its measurements."""

    def __init__(self, part: str, directory: Path, network: Network | None, quick: bool, labels: list[str]) -> None:
        self.part, self.layout, self.directory, self.network = part, LAYOUTS[part], directory, network
        self.quick = quick
        self.labels = labels
        """Texts: only contenders whose label has one of them run. Empty: all run."""
        self.facts: dict[str, Any] = {}
        self.worlds: dict[str, RankWorld] = {}
        self._bandwidth = {"read": 0.0, "update": 0.0}
        self._measured: list[_Measured] = []

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()

    def start_world(self, contender: Contender) -> RankWorld:
        """Return the world of a contender, which the first call starts."""
        name = contender.world
        if name not in self.worlds:
            recipe = settings.PLAIN_MPICH if self.network is None and name == "mpich" else settings.RECIPES[name]
            self.worlds[name] = RankWorld(recipe, self.layout, self.directory, self.network)
        return self.worlds[name]

    def measure_memory(self) -> None:
        """Measure bandwidths with all ranks of this layout at once, over arrays larger than the caches; keep the
        best."""
        world, length = self.start_world(settings.HIERARCHICAL), LENGTH // 4
        for kind, bytes_per_element in (("read", 4), ("update", 12)):
            for _ in range(3):
                answers = world.ask(do="probe", kind=kind, length=length)
                seconds = max(a["end"] for a in answers) - min(a["start"] for a in answers)
                reached = world.size * length * bytes_per_element * answers[0]["passes"] / seconds
                self._bandwidth[kind] = max(self._bandwidth[kind], reached)
            self.facts[f"{self.part} memory {kind} GB/s"] = round(self._bandwidth[kind] / 1e9, 1)

    def measure_links(self, contenders: list[Contender], length: int) -> dict[str, Any]:
        """Measure the link with messages of the sizes that the contenders send. Return lists of bytes and seconds,
        empty without a network."""
        if self.network is None:
            return {"bytes": [], "seconds": []}
        sent = {int(contender.compute_bound(length, self.layout, Machine(1, 1)).sent_bytes) for contender in contenders}
        sizes = sorted({min(size, probes.LARGEST) for size in sent})
        answer = probes.time_link(self.network, sizes)
        if length == LENGTH or self.quick:
            name = f"{self.part} {self.network.rate or UNSHAPED}"
            self.facts[f"{name} link MB/s"] = round(sizes[-1] / answer["seconds"][-1] / 1e6, 1)
            self.facts[f"{name} latency us"] = round(answer["latency"] * 1e6, 1)
        return answer

    def measure(self, rate: str | None, length: int, rounds: int, warm: bool) -> None:
        chosen = choose_contenders(self.part, rate, length, self.quick)
        contenders = [contender for contender in chosen if self.is_available(contender)]
        if self.network:
            self.network.shape(None if rate == UNSHAPED else rate)
        problem = self.directory / f"problem-{length}"
        if not problem.exists():
            SumProblem.create(problem, length, self.layout, settings.DENSITIES if self.part != "node" else ())
        self.measure_memory()
        link = self.measure_links(contenders, length)
        runs: dict[str, list[dict[str, Any]]] = {contender.label: [] for contender in contenders}
        for turn in range(-1 if warm else 0, rounds):
            first = turn % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                is_first_or_last = turn in (-1 if warm else 0, rounds - 1)
                run = self.run_once(contender, problem, is_first_or_last, count_repeats(length))
                if turn >= 0:
                    runs[contender.label].append(run)
        pairs = [(contender, runs[contender.label]) for contender in contenders]
        self._measured.append(_Measured(rate, length, link, pairs))
        for row in self._build_rows(self._measured[-1]):
            _print_row(row)

    def build_rows(self) -> list[dict[str, Any]]:
        """Return all measurements with their bounds, by the best memory probe and the link probe of this layout."""
        return [row for measured in self._measured for row in self._build_rows(measured)]

    def _build_rows(self, measured: _Measured) -> list[dict[str, Any]]:
        link_bytes, link_seconds = tuple(measured.link["bytes"]), tuple(measured.link["seconds"])
        machine = Machine(**self._bandwidth, link_bytes=link_bytes, link_seconds=link_seconds)
        rows = [
            self.build_row(contender, measured.rate, measured.length, runs, machine)
            for contender, runs in measured.runs
        ]
        _compare(rows)
        return rows

    def is_available(self, contender: Contender) -> bool:
        if self.labels and not any(text in contender.label for text in self.labels):
            return False
        recipe = settings.RECIPES[contender.world]
        if recipe.python.exists():
            return True
        print(f"skipping {contender.label}: {recipe.python} is missing; run scripts/openmpi-environment.sh")
        return False

    def run_once(self, contender: Contender, problem: Path, check: bool, repeats: int = 1) -> dict[str, Any]:
        """Run the contender `repeats` times in a row. Return the means of the seconds, of the most bytes that a node
        sent, and of the seconds per phase."""
        world = self.start_world(contender)
        before = self.network.read_traffic() if self.network else []
        answers = world.ask(
            do="run", problem=str(problem), contender=contender.call, density=contender.density,
            check=check, reference=contender.reference, tolerance=contender.tolerance, repeats=repeats,
        )  # fmt: skip
        after = self.network.read_traffic() if self.network else []
        moved = [late - early for early, late in zip(before, after, strict=True)]
        phases = {name: max(a["phases"].get(name, 0.0) for a in answers) for name in ("select", "intra", "inter")}
        run = {
            "seconds": max(a["end"] for a in answers) - min(a["start"] for a in answers),
            "sent": max((m.sent for m in moved), default=0),
            **phases,
        }
        return {name: value / repeats for name, value in run.items()}

    def build_row(
        self, contender: Contender, rate: str | None, length: int, runs: list[dict[str, Any]], machine: Machine
    ) -> dict[str, Any]:
        bound = contender.compute_bound(length, self.layout, machine)
        ms = [run["seconds"] * 1e3 for run in runs]
        row: dict[str, Any] = {
            "part": self.part,
            "rate": rate,
            "elements": length,
            "contender": contender.label,
            "kind": ("ours" if contender.is_ours else "peer") + (" dense" if contender.is_dense else " sparse"),
            "ms": round(median(ms), 2),
            "ms_min": round(min(ms), 2),
            "ms_max": round(max(ms), 2),
            "runs": len(ms),
            "bound_ms": round(bound.seconds * 1e3, 2),
            "of_bound": round(100 * bound.seconds * 1e3 / median(ms), 1),
        }
        row["sent_mb"] = round(median(run["sent"] for run in runs) / 1e6, 3) if self.network else None
        row["formula_mb"] = round(bound.sent_bytes / 1e6, 3) if self.network else None
        if contender.is_ours:
            for phase in ("select", "intra", "inter"):
                row[f"{phase}_ms"] = round(median(run[phase] for run in runs) * 1e3, 2)
        return row


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add the speed of each row relative to the best dense peer and the best torch.topk + all-gather of its run."""
    for column, kind in (("against_dense", "peer dense"), ("against_topk", "peer sparse")):
        peers = [row["ms"] for row in rows if row["kind"] == kind]
        for row in rows:
            if peers and row["kind"].startswith("ours"):
                row[column] = round(min(peers) / row["ms"], 2)


def _print_row(row: dict[str, Any]) -> None:
    """Print a line for a row. The file has all columns."""
    line = f"{row['part']:4} {row['rate'] or 'memory':7} {row['elements']:>10,} {row['contender']:38}"
    line += f"{row['ms']:9.1f} ms ({row['ms_min']:.1f}-{row['ms_max']:.1f}) {row['of_bound']:4.0f}% of bound"
    if row["sent_mb"] is not None:
        line += f"  {row['sent_mb']:8.2f} MB sent, {row['formula_mb']:.2f} by the formula"
    for column, peer in (("against_dense", "dense"), ("against_topk", "topk")):
        if column in row:
            line += f"  {row[column]:.2f}x {peer}"
    phases = [f"{name} {row[f'{name}_ms']:.0f}" for name in ("select", "intra", "inter") if row.get(f"{name}_ms")]
    print(line + (f"  [{', '.join(phases)} ms]" if phases else ""), flush=True)


def time_peer_settings() -> list[dict[str, Any]]:
    """Time every world of `contender_settings.RECIPES` with the whole dense array at 1 Gbit/s: the median of three runs
    after a warm-up run."""
    rows = []
    for part in ("2x2", "4x1"):
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(create_scratch())
            network = stack.enter_context(Network(len(LAYOUTS[part]), "1gbit"))
            problem = directory / "problem"
            SumProblem.create(problem, LENGTH, LAYOUTS[part], ())
            for name, recipe in settings.RECIPES.items():
                bench = AllreduceBench(part, directory, network, quick=False, labels=[])
                contender = Contender(name, name, "dense", "ring")
                if bench.is_available(contender):
                    ms = [bench.run_once(contender, problem, check=turn == 0)["seconds"] * 1e3 for turn in range(4)][1:]
                    row = {"part": part, "world": name, "settings": recipe.settings_line, "ms": round(median(ms), 1)}
                    rows.append(row)
                    print(rows[-1], flush=True)
                bench.close()
    return rows


def run(part: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(create_scratch())
        network = None if part == "node" else stack.enter_context(Network(len(LAYOUTS[part])))
        bench = AllreduceBench(part, directory, network, options.quick, options.contender or [])
        stack.callback(bench.close)
        if options.rate:
            bench.measure(options.rate, options.elements, 5 if options.elements == LENGTH else 7, warm=True)
        elif options.quick:
            bench.measure(None if part == "node" else "1gbit", 400_000, 1, warm=True)
        elif part == "node":
            bench.measure(None, LENGTH, 11, warm=True)
        else:
            bench.measure("1gbit", LENGTH, 5, warm=True)
            for length in CURVE:
                bench.measure("1gbit", length, 7, warm=True)
            bench.measure("10gbit", LENGTH, 5, warm=False)
            for length in CURVE[:2]:
                bench.measure("10gbit", length, 7, warm=False)
            bench.measure(UNSHAPED, LENGTH, 5, warm=False)
            bench.measure("100mbit", LENGTH, 3, warm=False)
        return bench.build_rows(), bench.facts


@contextlib.contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C, so that ranks and namespaces are closed in order."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a small array and one run each, to check that everything works"
    )
    parser.add_argument(
        "--json", type=Path, help=f"result file (default {RESULTS}; none with --quick, --rate or --contender)"
    )
    parser.add_argument("--part", choices=LAYOUTS, action="append", help="only this layout; may be repeated")
    parser.add_argument("--rate", choices=RATES, help="only this link speed")
    parser.add_argument(
        "--elements", type=int, default=LENGTH, help=f"length of the array with --rate (default {LENGTH:,})"
    )
    parser.add_argument(
        "--contender", action="append", help="only contenders whose name has this text; may be repeated"
    )
    parser.add_argument("--peer-settings", action="store_true", help="try every setting of the dense peers instead")
    options = parser.parse_args()
    parts = options.part or ([] if options.peer_settings else list(LAYOUTS))
    tuning: list[dict[str, Any]] = []
    reason = explain_why_unavailable()
    if reason and (options.peer_settings or set(parts) - {"node"}):
        print(f"{reason}. Without it: {sys.argv[0]} --part node", file=sys.stderr)
        return 2
    target = options.json or (None if options.quick or options.rate or options.contender else RESULTS)
    report = BenchReport("All-reduce, float32 sum over all ranks", COLUMNS)
    if target and target.exists():
        stored = json.loads(target.read_text())
        report.rows = [row for row in stored["rows"] if row["part"] not in parts]
        report.facts = {**stored["facts"], **report.facts}
        tuning = stored.get("tuning", [])
    with _interrupt_on_sigterm():
        if options.peer_settings:
            tuning = time_peer_settings()
        for part in parts:
            rows, facts = run(part, options)
            report.rows += rows
            report.facts |= facts
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({**json.loads(report.to_json()), "tuning": tuning}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
