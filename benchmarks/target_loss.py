"""Measure the time to a target loss over slow links: TopKube against DistributedDataParallel and its hooks.

    python benchmarks/target_loss.py                                  # train and time what is missing, then report
    python benchmarks/target_loss.py --only times --rate 100mbit      # measure the times of a step over this link again
    python benchmarks/target_loss.py --model char_gpt_800k --seeds 1  # the same with a larger model
    python benchmarks/target_loss.py --quick                          # a few steps of each contender; stores nothing

The ranks are real: two nodes of one rank each in network namespaces, as in benchmarks/step.py; this needs root. The
time to the target is the number of steps until the held-out loss reaches the target, times the time of a step over the
link. It is computed from two measurements, because the loss of a step does not depend on the link:
    losses   every contender trains the same model from the same weights on the same samples in the same order, with the
             schedule of benchmarks/convergence.py, over links that are not shaped. The held-out loss is computed 20
             times in a run. One run for each contender and seed; runs that are in the file are not repeated.
    times    every contender makes steps of the same training over the shaped link. The contenders alternate in turns.
             A turn's time is the time of its steps, from the start of the first rank to the end of the last, divided by
             their number; so a step with an exchange and the steps without one between exchanges count as they occur.
             This needs a machine that does nothing else. Links that are in the file are measured again only with
             `--only times`; the new rows replace the stored rows.
The target is the loss that plain DDP reaches at the end of its run with the same seed, plus 1% or 5% of it. PowerSGD
sends the whole gradient in the first tenth of the run: these steps count with the time of plain DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from allreduce.network import Network, explain_why_unavailable
from allreduce.scratch import create_scratch
from allreduce.worlds import RankWorld, WorldFailed
from step import WORLDS, describe_machine

RESULTS = Path(__file__).parent / "results" / "target_loss.json"
SCRIPT = Path(__file__).with_name("target_loss_rank.py")
LAYOUT = (1, 1)
MODELS = ("char_gpt", "char_gpt_800k")
OPTIMIZERS = ("adamw", "sgd")
RATES = ("100mbit", "200mbit", "1gbit")
MARGINS = (1.0, 5.0)
"""Targets, in per cent above the loss of plain DDP at the end of its run."""
STEPS, EVALUATIONS = 2000, 20
TURN_STEPS = 96
"""Steps of a turn: a step of the small model takes 10 ms, and shorter turns differ by a third."""
WARM_STEPS = 16
"""Steps before the measured steps of a turn: a multiple of all periods, and PowerSGD compresses from the third on."""
POWERSGD_START = 2
"""The first step that PowerSGD compresses when steps are timed; the smallest number that it allows."""
DENSE_SHARE = 0.1
"""The first part of a run in which PowerSGD sends the whole gradient."""
Row = dict[str, Any]


@dataclass(frozen=True)
class TargetContender:
    """A way to exchange. `exchange` holds the arguments of DistributedOptimizer (in the world mpich) or the hook of DDP
    (in the world gloo). With `is_dense_first`, the first tenth of the run is plain DDP."""

    label: str
    world: str
    exchange: dict[str, Any] = field(default_factory=dict)
    is_dense_first: bool = False


DDP = "ddp"
CONTENDERS = {
    "dense": TargetContender("TopKube dense", "mpich", {"aggregation": "dense"}),
    "dense_bf16": TargetContender("TopKube dense, bf16", "mpich", {"aggregation": "dense", "dense_wire": "bf16"}),
    "int4": TargetContender("TopKube int4", "mpich", {"aggregation": "int4"}),
    "onebit": TargetContender("TopKube onebit", "mpich", {"aggregation": "onebit"}),
    "onebit_4": TargetContender("TopKube onebit, period 4", "mpich", {"aggregation": "onebit", "period": 4}),
    "topk1bit": TargetContender("TopKube topk1bit", "mpich", {"aggregation": "topk1bit"}),
    "topk1bit_4": TargetContender("TopKube topk1bit, period 4", "mpich", {"aggregation": "topk1bit", "period": 4}),
    DDP: TargetContender("DDP", "gloo"),
    "fp16": TargetContender("DDP with the fp16 hook", "gloo", {"hook": "fp16"}),
    **{
        f"powersgd{rank}": TargetContender(f"DDP with PowerSGD rank {rank}", "gloo", {"hook": f"powersgd{rank}"}, True)
        for rank in (1, 2, 4)
    },
}
PEERS = tuple(name for name, contender in CONTENDERS.items() if contender.world == "gloo")


# ---- the arithmetic


def find_steps_to_target(evaluations: list[list[float]], target: float) -> float | None:
    """Return after how many steps the loss reaches the target for the first time, on straight lines between the
    evaluations [step, loss]; None if it does not."""
    before: list[float] | None = None
    for step, loss in evaluations:
        if loss <= target:
            if before is None:
                return step
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = [step, loss]
    return None


def compute_seconds_to_target(steps: float, ms: float, dense_steps: int, dense_ms: float) -> float:
    """Return the time of `steps` steps of `ms` milliseconds, of which the first `dense_steps` take `dense_ms`."""
    first = min(steps, dense_steps)
    return (first * dense_ms + (steps - first) * ms) / 1e3


def compare(runs: list[Row], times: list[Row]) -> list[Row]:
    """Return, for each model, optimizer, length of the run, link, target and contender, the steps and the seconds to
    the target (means over the seeds) and how many times faster the contender is than the fastest peer.

    A contender that misses the target with one of its seeds has no time. `against_best` is the mean over the seeds, by
    the medians of the turns; `range` holds the smallest and the largest value over all seeds and turns.
    """
    rows = []
    turns_of = {(row["model"], row["optimizer"], row["rate"], row["contender"]): row["turns_ms"] for row in times}
    for model, optimizer, length in _list_kinds(runs):
        own = [run for run in runs if (run["model"], run["optimizer"], run["steps"]) == (model, optimizer, length)]
        finals = {run["seed"]: run["evaluations"][-1][1] for run in own if run["contender"] == DDP}
        for margin in MARGINS:
            steps: dict[str, dict[int, float | None]] = {}
            for run in own:
                if run["seed"] in finals:
                    target = finals[run["seed"]] * (1 + margin / 100)
                    reached = find_steps_to_target(run["evaluations"], target)
                    steps.setdefault(run["contender"], {})[run["seed"]] = reached
            for rate in RATES:
                keys = {name: (model, optimizer, rate, name) for name in steps}
                turns = {name: turns_of[key] for name, key in keys.items() if key in turns_of}
                if DDP in turns:
                    compared = _compare_on_link(optimizer, rate, margin, length, steps, turns)
                    rows += [{"model": model, **row} for row in compared]
    return rows


def _list_kinds(runs: list[Row]) -> list[tuple[str, str, int]]:
    """Return the models, optimizers and lengths of the runs."""
    return sorted({(run["model"], run["optimizer"], run["steps"]) for run in runs})


def _compare_on_link(
    optimizer: str,
    rate: str,
    margin: float,
    length: int,
    steps: dict[str, dict[int, float | None]],
    turns: dict[str, list[float]],
) -> list[Row]:
    medians = {name: median(values) for name, values in turns.items()}
    count = min(len(values) for values in turns.values())
    each_turn = [{name: values[turn] for name, values in turns.items()} for turn in range(count)]

    def compute_seconds(name: str, seed: int, ms: dict[str, float]) -> float | None:
        reached = steps[name].get(seed)
        if reached is None:
            return None
        dense_steps = round(DENSE_SHARE * length) if CONTENDERS[name].is_dense_first else 0
        return compute_seconds_to_target(reached, ms[name], dense_steps, ms[DDP])

    def compute_ratio(name: str, seed: int, ms: dict[str, float]) -> float:
        peer_seconds = [compute_seconds(peer, seed, ms) for peer in PEERS if peer in turns]
        own = compute_seconds(name, seed, ms)
        assert own is not None
        return min(value for value in peer_seconds if value is not None) / own

    rows = []
    for name in turns:
        seeds = sorted(steps[name])
        reached = [seed for seed in seeds if steps[name][seed] is not None]
        row: Row = {
            "optimizer": optimizer,
            "length": length,
            "rate": rate,
            "margin_percent": margin,
            "contender": name,
            "seeds": len(seeds),
            "reached": len(reached),
            "ms": medians[name],
            "steps": None,
            "seconds": None,
            "against_best": None,
            "range": None,
        }
        if seeds == reached:
            ratios = [compute_ratio(name, seed, ms) for seed in seeds for ms in each_turn]
            row |= {
                "steps": fmean(value for seed in seeds if (value := steps[name][seed]) is not None),
                "seconds": fmean(
                    value for seed in seeds if (value := compute_seconds(name, seed, medians)) is not None
                ),
                "against_best": fmean(compute_ratio(name, seed, medians) for seed in seeds),
                "range": [min(ratios), max(ratios)],
            }
        rows.append(row)
    return rows


def compare_losses(runs: list[Row]) -> list[Row]:
    """Return, for each model, optimizer, length of the run and contender, the paired difference of the last held-out
    loss to plain DDP, in per cent, with its 95% interval (Student's t; None with one seed)."""
    from simulated_nodes import compute_interval

    rows: list[Row] = []
    for model, optimizer, length in _list_kinds(runs):
        own = [run for run in runs if (run["model"], run["optimizer"], run["steps"]) == (model, optimizer, length)]
        last = {(run["contender"], run["seed"]): run["evaluations"][-1][1] for run in own}
        for name in CONTENDERS:
            seeds = [seed for contender, seed in sorted(last) if contender == name and (DDP, seed) in last]
            if name == DDP or not seeds:
                continue
            differences = [100 * (last[name, seed] / last[DDP, seed] - 1) for seed in seeds]
            mean, interval = compute_interval(differences)
            rows.append(
                {
                    "model": model,
                    "optimizer": optimizer,
                    "length": length,
                    "contender": name,
                    "seeds": len(seeds),
                    "loss": fmean(last[name, seed] for seed in seeds),
                    "ddp_loss": fmean(last[DDP, seed] for seed in seeds),
                    "difference_percent": mean,
                    "interval_percent": interval,
                    "each_seed": differences,
                }
            )
    return rows


# ---- the measurements


class TargetBench:
    """The worlds of ranks, which start when they are first needed."""

    def __init__(self, directory: Path, network: Network, model: str) -> None:
        self.network, self.model, self._directory = network, model, directory
        self._worlds: dict[str, RankWorld] = {}

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()

    def _start(self, name: str, optimizer: str, seed: int, steps: int, powersgd_start: int) -> RankWorld:
        """Begin a training of this contender; return the world that makes its steps."""
        contender = CONTENDERS[name]
        if contender.world not in self._worlds:
            recipe = dataclasses.replace(WORLDS[contender.world], script=SCRIPT)
            self._worlds[contender.world] = RankWorld(recipe, LAYOUT, self._directory, self.network)
        world = self._worlds[contender.world]
        exchange = dict(contender.exchange)
        if contender.is_dense_first:
            exchange["start"] = powersgd_start
        world.ask(do="start", exchange=exchange, model=self.model, optimizer=optimizer, seed=seed, steps=steps)
        return world

    def _leave_out(self, name: str, error: WorldFailed) -> None:
        """Report the failure of a contender on stderr, and end its world."""
        reason = next(line for line in reversed(str(error).splitlines()) if line)
        print(f"{name} is left out: {reason}", file=sys.stderr, flush=True)
        if world := self._worlds.pop(CONTENDERS[name].world, None):
            world.close()

    def train(self, name: str, optimizer: str, seed: int, steps: int) -> Row | None:
        """Train one run to its end, and return its held-out losses. A run that fails is left out (None), with a line on
        stderr."""
        self.network.shape(None)
        try:
            world = self._start(name, optimizer, seed, steps, round(DENSE_SHARE * steps))
            evaluations = list(_train(world, steps))
        except WorldFailed as error:
            self._leave_out(name, error)
            return None
        return {
            "contender": name,
            "model": self.model,
            "optimizer": optimizer,
            "seed": seed,
            "steps": steps,
            "evaluations": evaluations,
        }

    def measure_times(self, names: list[str], optimizer: str, rate: str, turns: int, steps: int) -> list[Row]:
        """Measure the steps of all contenders over links of `rate`. A contender that fails is left out, with a line on
        stderr."""
        self.network.shape(rate)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for turn in range(turns):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if name in samples:
                    try:
                        samples[name].append(self._measure_time(name, optimizer, steps))
                    except WorldFailed as error:
                        self._leave_out(name, error)
                        del samples[name]
        facts = describe_machine()
        return [
            {
                "contender": name,
                "model": self.model,
                "optimizer": optimizer,
                "rate": rate,
                "turns_ms": [round(ms, 2) for ms, _ in measured],
                "steps": steps,
                "sent_kb": round(median(sent for _, sent in measured) / 1e3, 1),
                "date": facts["date"],
                "load": facts["load"],
            }
            for name, measured in samples.items()
        ]

    def _measure_time(self, name: str, optimizer: str, steps: int) -> tuple[float, float]:
        """Return the milliseconds of a step, and the bytes that the busier node sends in it."""
        world = self._start(name, optimizer, 0, STEPS, POWERSGD_START)
        world.ask(do="train", steps=WARM_STEPS, held_out=False)
        before = self.network.read_traffic()
        answers = world.ask(do="time", steps=steps)
        moved = [after - earlier for after, earlier in zip(self.network.read_traffic(), before, strict=True)]
        seconds = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
        return 1e3 * seconds / steps, max(link.sent for link in moved) / steps


def _train(world: RankWorld, steps: int) -> Iterator[list[float]]:
    """Train to the end; yield [step, held-out loss] at equal distances."""
    part = max(20, steps // EVALUATIONS)
    for first in range(0, steps, part):
        count = min(part, steps - first)
        yield [first + count, world.ask(do="train", steps=count)[0]["loss"]]


def find_missing_times(
    times: list[Row], names: list[str], model: str, optimizer: str, rate: str, again: bool
) -> list[str]:
    """Return the contenders to time on this link: all of them, because their turns alternate, if `again` or if one has
    no stored time; else none."""
    wanted = (model, optimizer, rate)
    stored = {row["contender"] for row in times if (row["model"], row["optimizer"], row["rate"]) == wanted}
    return names if again or set(names) - stored else []


def find_missing_runs(
    runs: list[Row], names: list[str], model: str, optimizers: list[str], seeds: int, steps: int
) -> list[tuple[str, str, int, int]]:
    """Return the runs that are not stored, as arguments of `TargetBench.train`."""
    stored = {(run["contender"], run["optimizer"], run["seed"], run["steps"]) for run in runs if run["model"] == model}
    all_runs = [(name, optimizer, seed, steps) for seed in range(seeds) for optimizer in optimizers for name in names]
    return [key for key in all_runs if key not in stored]


def build_time_key(row: Row) -> tuple[Any, ...]:
    return row["contender"], row["model"], row["optimizer"], row["rate"]


def merge_times(stored: list[Row], new: list[Row]) -> list[Row]:
    """Return the stored rows, with those of `new` in place of rows for the same contender, optimizer and link."""
    replaced = {build_time_key(row) for row in new}
    return [row for row in stored if build_time_key(row) not in replaced] + new


def read_results(path: Path | None) -> dict[str, Any]:
    """Return the stored results; without a file, empty results."""
    stored: dict[str, Any] = {"facts": {}, "compared": [], "losses": [], "runs": [], "times": []}
    if path is not None and path.exists():
        stored |= json.loads(path.read_text())
    return stored


def write_results(path: Path | None, stored: dict[str, Any]) -> None:
    """Replace the whole file, so that an interrupted benchmark loses at most the present run."""
    if path is None:
        return
    facts = {name: fact for name, fact in describe_machine().items() if name not in ("date", "load")}
    ordered = {
        "facts": facts,
        "compared": compare(stored["runs"], stored["times"]),
        "losses": compare_losses(stored["runs"]),
        "runs": stored["runs"],
        "times": stored["times"],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(ordered, indent=1) + "\n")
    new.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("losses", "times"), help="measure only this part")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="what is trained (%(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="only this optimizer; may be repeated")
    parser.add_argument("--rate", choices=RATES, action="append", help="only this link; may be repeated")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="only this contender; may be repeated")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contender (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="length of a run (%(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="turns of each contender on a link (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="40 steps, one seed, one turn at 1 Gbit/s; stores nothing")
    parser.add_argument("--json", type=Path, help=f"result file (default {RESULTS})")
    options = parser.parse_args()
    if reason := explain_why_unavailable():
        print(reason, file=sys.stderr)
        return 2
    target: Path | None = None if options.quick else options.json or RESULTS
    seeds, steps, turns = (1, 40, 1) if options.quick else (options.seeds, options.steps, options.turns)
    rates = ["1gbit"] if options.quick else options.rate or list(RATES)
    contenders = options.contender or list(CONTENDERS)
    optimizers = options.optimizer or list(OPTIMIZERS)
    stored = read_results(target)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(create_scratch())
        bench = TargetBench(directory, stack.enter_context(Network(len(LAYOUT))), options.model)
        stack.callback(bench.close)
        if options.only != "losses":
            for optimizer in optimizers:
                for rate in rates:
                    again = options.only == "times"
                    names = find_missing_times(stored["times"], contenders, options.model, optimizer, rate, again)
                    if names:
                        rows = bench.measure_times(names, optimizer, rate, turns, TURN_STEPS)
                        stored["times"] = merge_times(stored["times"], rows)
                        write_results(target, stored)
                        print("\n".join(json.dumps(row) for row in rows), flush=True)
        if options.only != "times":
            for key in find_missing_runs(stored["runs"], contenders, options.model, optimizers, seeds, steps):
                if run := bench.train(*key):
                    stored["runs"].append(run)
                    write_results(target, stored)
                    print(f"{key}: loss {run['evaluations'][-1][1]:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
