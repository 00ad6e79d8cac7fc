"""Compare the training step of TopKube with DistributedDataParallel and its communication hooks.

    python benchmarks/step.py [--part 2x1|2x2|4x1 ...] [--rate unshaped|1gbit|100mbit ...] [--contender NAME ...]
        [--model gpt|resnet50|timed]
    python benchmarks/step.py --minimal      two nodes, twelve contenders, three links: about ten minutes
    python benchmarks/step.py --quick

Nodes are network namespaces, as in benchmarks/allreduce; this needs root. A GPT of 4.8 million parameters trains on
one thread per rank. With `--model resnet50`, it is ResNet-50 (25.6 million parameters) with four images of 64 x 64
pixels per rank. With `--model timed`, the layers of a model of 6.3 million parameters sleep instead of computing,
as if another device computed: 60 ms in forward and 120 ms in backward. Contenders alternate: each goes on with its
training for a few steps per round, so that all see the same changes of the machine's speed. The first step of a turn
does not count. A step lasts until the slowest rank has made it. Results are medians over all steps of all rounds, with
an interval that contains the true median with a probability of 95%, if steps are independent. `auto` and `auto_own` are
measured when their choice is final. With `auto_own`, nodes may have weights of their own (`node_weights="own"`).
A contender that exchanges only every few steps counts with the mean of all steps of a period. ResNet-50 has fewer
contenders, because all trainings are in memory.

Beside the time, a row holds the processor time of the computing thread and of all other threads (the cost of
communication), how often these other threads woke up, and the bytes that the busiest node sent per step. A row that is
measured again replaces the stored row. torch's bf16 hook is absent, because it needs NCCL. Every turn is stored at
once: after an interruption, the same command continues, unless the sources have changed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import math
import os
import platform
import signal
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from allreduce.network import Network, explain_why_unavailable
from allreduce.scratch import create_scratch
from allreduce.worlds import RankWorld, Recipe, WorldFailed

RESULTS = Path(__file__).parent / "results" / "step.json"
LINKS_RESULTS = RESULTS.with_name("step_links.json")
SCRIPT = Path(__file__).with_name("step_rank.py")
UNSHAPED = "unshaped"
RATES = (UNSHAPED, "1gbit", "100mbit")
LAYOUTS = {"2x1": (1, 1), "2x2": (2, 2), "4x1": (1, 1, 1, 1)}
OURS = (
    *("dense", "dense_bf16", "dear", "dear_bf16", "int8", "int4", "int4_dear", "int3", "hitopk", "hitopk_dear"),
    *("onebit", "onebit_delayed", "topk1bit", "topk1bit_delayed"),
    *("onebit_period2", "onebit_period4", "onebit_period4_delayed", "auto", "auto_dear", "auto_own"),
    *("powersgd_rank1", "acpsgd_rank1", "acpsgd_rank2", "acpsgd_rank4"),
)
PEERS = ("ddp", "fp16", "powersgd1", "powersgd2", "powersgd4")
PLAIN = "plain"
PERIODS = {"onebit_period2": 2, "onebit_period4": 4, "onebit_period4_delayed": 4}
"""The steps between two exchanges of the contenders that do not exchange in every step."""
MINIMAL = (
    *(PLAIN, "ddp", "fp16", "powersgd1", "dense", "dear", "int8", "auto", "auto_own"),
    *("onebit", "onebit_delayed", "topk1bit"),
)
MINIMAL_PARTS, MINIMAL_RATES, MINIMAL_ROUNDS = ("2x1",), ("1gbit", UNSHAPED, "100mbit"), 6
DENSE_OVER_MPI, LINKS_CONTENDERS, LINKS_RATES = "dense_mpi", (PLAIN, "ddp", "dense", "dense_mpi"), ("unshaped", "1gbit")
"""What `--links` compares: `dense` over TCP connections of its own, and (`dense_mpi`) over those of MPI."""
MODELS = ("gpt", "resnet50", "timed")
LARGE_MODEL_CONTENDERS = {"resnet50": (*MINIMAL, "int4")}
ROUNDS, STEPS = 8, 3
"""Turns of every contender, and measured steps per turn."""
_SETTINGS = (("UCX_TLS", "tcp,sm,self"), ("UCX_NET_DEVICES", "eth0"), ("TOPKUBE_CHECK_WEIGHTS", "off"))
WORLDS = {
    "mpich": Recipe("mpich", "mpich", Path(sys.executable), _SETTINGS, script=SCRIPT),
    DENSE_OVER_MPI: Recipe(
        DENSE_OVER_MPI, "mpich", Path(sys.executable), (*_SETTINGS, ("TOPKUBE_LINKS", "mpi")), script=SCRIPT
    ),
    "gloo": Recipe("gloo", "gloo", Path(sys.executable), script=SCRIPT),
}
WARM_STEPS = 4
"""Steps before the measured steps: DDP plans its buckets again after the first, and PowerSGD starts with the third. A
multiple of all periods."""
Row = dict[str, Any]


def choose_world(contender: str) -> str:
    """Return the name of the world that runs the contender."""
    if contender == DENSE_OVER_MPI:
        return DENSE_OVER_MPI
    return "gloo" if contender in (PLAIN, *PEERS) else "mpich"


class Turns:
    """The measured turns of an interrupted run, in a file. Turns of other sources or another number of steps do not
    count."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self._path = path
        self._stored: dict[str, Any] = {"sources": digest_sources(), "steps": steps, "turns": {}}
        if path is not None and path.exists():
            earlier = json.loads(path.read_text())
            if all(earlier.get(name) == self._stored[name] for name in ("sources", "steps")):
                self._stored = earlier

    def find_samples(self, *key: str) -> list[Row]:
        """Return the samples of the turns of a row, the first turn first."""
        turns: list[Row] = self._stored["turns"].get(" ".join(key), [])
        return turns

    def add(self, sample: Row, *key: str) -> None:
        """Store the sample of the next turn of a row."""
        self._stored["turns"].setdefault(" ".join(key), []).append(sample)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(self._stored))
            temporary.replace(self._path)

    def forget(self) -> None:
        """Remove the file: all rows are measured."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def digest_sources() -> str:
    """Return a digest of the code that the times depend on."""
    folder = Path(__file__).parent
    files = [*folder.glob("step*.py"), *(folder.parent / "runtime" / "topkube").rglob("*.py")]
    content = hashlib.sha256()
    for path in sorted(files):
        content.update(path.read_bytes())
    return content.hexdigest()


class StepBench:
    """The worlds of one layout, and the samples of every contender. `turns` has those of an interrupted run."""

    def __init__(self, part: str, model: str, directory: Path, network: Network, turns: Turns | None = None) -> None:
        self.part, self.model, self.network, self._directory = part, model, network, directory
        self._turns = turns
        self._rate = ""
        self._worlds: dict[str, RankWorld] = {}

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()

    def _start_world(self, name: str) -> RankWorld:
        if name not in self._worlds:
            self._worlds[name] = RankWorld(WORLDS[name], LAYOUTS[self.part], self._directory, self.network)
            self._worlds[name].ask(do="link", rate=self._rate)
        return self._worlds[name]

    def measure(self, rate: str, contenders: list[str], rounds: int, steps: int) -> list[Row]:
        """Measure all contenders, interleaved, over links of `rate`. A contender that fails is left out, with a line on
        stderr. Turns that are stored already are not measured again."""
        turns = self._turns or Turns(None, steps)
        self.network.shape(None if rate == UNSHAPED else rate)
        self._rate = rate
        for world in self._worlds.values():
            world.ask(do="link", rate=rate)
        samples = {contender: list(turns.find_samples(*self._build_key(rate, contender))) for contender in contenders}
        for turn in range(rounds):
            first = turn % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                if contender in samples and len(samples[contender]) <= turn:
                    try:
                        samples[contender].append(self._run_once(contender, steps))
                        turns.add(samples[contender][-1], *self._build_key(rate, contender))
                    except WorldFailed as error:
                        print(f"{contender} is left out: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
                        del samples[contender]
                        self._worlds.pop(choose_world(contender)).close()
        rows = [self._build_row(rate, contender, measured) for contender, measured in samples.items() if measured]
        compare(rows)
        return rows

    def _build_key(self, rate: str, contender: str) -> tuple[str, ...]:
        return self.part, self.model, rate, contender

    def _run_once(self, contender: str, steps: int) -> Row:
        world = self._start_world(choose_world(contender))
        before = self.network.read_traffic()
        period = PERIODS.get(contender, 1)
        order = {"contender": contender.removesuffix("_mpi"), "model": self.model, "warm": WARM_STEPS}
        answers = world.ask(do="steps", **order, entry=period, steps=steps * period)
        moved = [after - earlier for after, earlier in zip(self.network.read_traffic(), before, strict=True)]
        ends = [max(times) for times in zip(*(answer["times"] for answer in answers), strict=True)][::period]
        return {
            "seconds": [(after - earlier) / period for earlier, after in itertools.pairwise(ends)],
            "sent": max(link.sent for link in moved) / answers[0]["made"],
            **{name: max(answer[name] for answer in answers) for name in ("main_cpu", "other_cpu", "wakeups")},
        }

    def _build_row(self, rate: str, contender: str, samples: list[Row]) -> Row:
        seconds = [value * 1e3 for sample in samples for value in sample["seconds"]]
        low, high = bound_median(seconds)
        return {
            "part": self.part,
            "model": self.model,
            "rate": rate,
            "contender": contender,
            "ms": round(median(seconds), 1),
            "ms_low": round(low, 1),
            "ms_high": round(high, 1),
            "ms_min": round(min(seconds), 1),
            "ms_max": round(max(seconds), 1),
            "steps": len(seconds),
            "main_cpu_ms": round(median(sample["main_cpu"] for sample in samples) * 1e3, 1),
            "other_cpu_ms": round(median(sample["other_cpu"] for sample in samples) * 1e3, 1),
            "wakeups": round(median(sample["wakeups"] for sample in samples)),
            "sent_mb": round(median(sample["sent"] for sample in samples) / 1e6, 2),
        }


def bound_median(values: list[float]) -> tuple[float, float]:
    """Return a 95% interval of the median: two of the sorted values. Their positions follow from the binomial
    distribution. With fewer than six values, return the smallest and the largest: the probability is then below 95%."""
    ordered, count = sorted(values), len(values)
    position, tail = 0, 1 / 2**count
    while tail + math.comb(count, position + 1) / 2**count <= 0.025:
        position += 1
        tail += math.comb(count, position) / 2**count
    return ordered[position], ordered[-1 - position]


def compare(rows: list[Row]) -> None:
    """Add the speed of every row relative to plain DDP of the same run."""
    ddp = next((row["ms"] for row in rows if row["contender"] == "ddp"), None)
    for row in rows:
        row["against_ddp"] = round(ddp / row["ms"], 2) if ddp else None


def merge(stored: list[Row], new: list[Row]) -> list[Row]:
    """Return the stored rows with those of `new` in place of the rows for the same layout, link and contender."""

    def build_key(row: Row) -> tuple[str, ...]:
        return row["part"], row.get("model", MODELS[0]), row["rate"], row["contender"]

    replaced = {build_key(row) for row in new}
    return [row for row in stored if build_key(row) not in replaced] + new


def describe_machine() -> dict[str, Any]:
    """Return the facts that the times depend on."""
    import torch

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=LAYOUTS, action="append", help="only this layout; may be repeated")
    parser.add_argument("--rate", choices=RATES, action="append", help="only this link; may be repeated")
    parser.add_argument(
        "--contender",
        choices=(PLAIN, *OURS, DENSE_OVER_MPI, *PEERS),
        action="append",
        help="only this contender; may be repeated",
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="what trains (%(default)s)")
    parser.add_argument("--rounds", type=int, help=f"turns of every contender ({ROUNDS})")
    parser.add_argument("--steps", type=int, help=f"measured steps per turn ({STEPS})")
    parser.add_argument("--minimal", action="store_true", help="the shortest run with useful results")
    parser.add_argument(
        "--links", action="store_true", help=f"dense with and without MPI's messages: {LINKS_RESULTS.name}"
    )
    parser.add_argument("--quick", action="store_true", help="one turn of two steps at 1 Gbit/s; stores nothing")
    parser.add_argument("--json", type=Path, help=f"result file (default {RESULTS})")
    options = parser.parse_args()
    if reason := explain_why_unavailable():
        print(reason, file=sys.stderr)
        return 2
    parts, rates, contenders, rounds, steps = choose_measurements(options)
    target: Path | None = options.json or (None if options.quick else LINKS_RESULTS if options.links else RESULTS)
    turns = Turns(None if target is None else target.with_name(f"{target.stem}.turns.json"), steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for part in parts:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(create_scratch())
            network = stack.enter_context(Network(len(LAYOUTS[part])))
            bench = StepBench(part, options.model, directory, network, turns)
            stack.callback(bench.close)
            for rate in rates:
                rows = bench.measure(rate, contenders, rounds, steps)
                facts = {**describe_machine(), "rounds": rounds, "steps": steps}
                for row in rows:
                    row.update({name: facts[name] for name in ("date", "load")})
                    print(json.dumps(row), flush=True)
                if target is not None:
                    stored = json.loads(target.read_text()) if target.exists() else {"rows": []}
                    merged = {"facts": facts, "rows": merge(stored["rows"], rows)}
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(json.dumps(merged, indent=1) + "\n")
    turns.forget()
    return 0


def choose_measurements(options: argparse.Namespace) -> tuple[list[str], list[str], list[str], int, int]:
    """Return the layouts, the links, the contenders, and how many turns and steps are measured."""
    parts, rates, rounds, steps = list(LAYOUTS), list(RATES), ROUNDS, STEPS
    contenders = list(LARGE_MODEL_CONTENDERS.get(options.model, (PLAIN, *OURS, *PEERS)))
    if options.minimal:
        parts, rates, contenders, rounds = list(MINIMAL_PARTS), list(MINIMAL_RATES), list(MINIMAL), MINIMAL_ROUNDS
    if options.links:
        rates, contenders = list(LINKS_RATES), list(LINKS_CONTENDERS)
    if options.quick:
        rates, rounds, steps = ["1gbit"], 1, 2
    return (
        options.part or parts,
        options.rate or rates,
        options.contender or contenders,
        options.rounds or rounds,
        options.steps or steps,
    )


if __name__ == "__main__":
    sys.exit(main())
