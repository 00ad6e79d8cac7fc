"""Train on M simulated nodes in one process: try an exchange rule in a minute, before it is built.

    python benchmarks/simulated_nodes.py                                    # list the rules
    python benchmarks/simulated_nodes.py --rule dense --rule sign-weights   # train with both, report the difference
    python benchmarks/simulated_nodes.py --rule sign-weights --nodes 4 --period 4 --seeds 3 --optimizer sgd

A node stands for all of its ranks: the exchange inside a node is dense, so they act as one. Every node sees the samples
that it would see in a real run (benchmarks/convergence.py: same model, same data, same order, same schedule). A rule
decides what the nodes exchange and what happens to the rest. The result is the held-out loss after the last step, the
relative difference to `dense` with the same seed, and the bytes that one node sends per step, without headers.

The rules `hitopk`, `topk1bit` and those of signs call the kernels that real ranks call;
`tests/mpi/ranks/training/simulated.py` compares their weights with those of real ranks. Results are appended to a JSON
file; runs that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tasks
from simulated_rules import RULES, Nodes, Rule, RuleOptions
from topkube.data import DistributedSampler
from topkube.training import LAMB, LARS

RESULTS = Path(__file__).parent / "results" / "simulated_nodes.json"


@dataclass(frozen=True)
class SimulatedRun:
    """One run. `sent_bytes` is the mean per node and step, `dense_bytes` what a float32 ring would send. The learning
    rate is that of the task times `rate`, and the samples per step over all nodes are those of the task times `batches`
    (benchmarks/tasks.py). `unsent` and `spread` are the median and the largest value of the two numbers
    of the guard (simulated_rules.rule.GuardValues); None for rules without node weights."""

    rule: str
    model: str
    optimizer: str
    nodes: int
    steps: int
    period: int
    density: float
    seed: int
    loss: float
    sent_bytes: float
    dense_bytes: float
    seconds: float
    rate: float = 1.0
    unsent: list[float] | None = None
    spread: list[float] | None = None
    batches: int = 1

    @property
    def setting(self) -> tuple[object, ...]:
        """All settings that decide the result, except the seed."""
        return (
            *(self.rule, self.model, self.optimizer, self.nodes, self.steps),
            *(self.period, self.density, self.rate, self.batches),
        )

    @property
    def task(self) -> tuple[object, ...]:
        """The settings that the run shares with the dense run that it is compared with."""
        return (self.model, self.optimizer, self.nodes, self.steps, self.rate, self.batches, self.seed)


def make_optimizer(name: str, model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return the optimizer of this name, with momentum 0.9 or the defaults of its class."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    classes = {"adamw": torch.optim.AdamW, "lars": LARS, "lamb": LAMB}
    return classes[name](model.parameters(), lr=learning_rate)


def divide_batches(dataset: torch.utils.data.Dataset, batch: int, nodes: int, seed: int, steps: int):  # type: ignore[no-untyped-def, type-arg]
    """Yield, for each step, the batch of each node: entries node, node + nodes, ... of the epoch's permutation."""
    sampler = DistributedSampler(dataset, seed=seed)  # type: ignore[arg-type]
    per_node = batch // nodes
    yielded = epoch = 0
    while yielded < steps:
        sampler.set_epoch(epoch)
        order = sampler.indices()
        for first in range(0, len(order) - batch + 1, batch):
            block = order[first : first + batch]
            samples = [[dataset[int(i)] for i in block[node::nodes][:per_node]] for node in range(nodes)]
            yield [tuple(torch.stack(column) for column in zip(*rows, strict=True)) for rows in samples]
            yielded += 1
            if yielded == steps:
                return
        epoch += 1


def train(
    rule_name: str,
    options: RuleOptions,
    model_name: str,
    optimizer_name: str,
    seed: int,
    steps: int,
    rate: float = 1.0,
    batches: int = 1,
) -> SimulatedRun:
    """Train once. Returns the result; the loss is that of the weights that all nodes agree on. The learning rate is
    that of the task times `rate`, and the samples per step are those of the task times `batches`."""
    torch.manual_seed(seed)
    model, dataset, compute_loss, measure_held_out = tasks.build_task(model_name)
    learning_rate = rate * tasks.LEARNING_RATE[model_name, optimizer_name]
    nodes = Nodes(model, options.nodes, lambda model: make_optimizer(optimizer_name, model, learning_rate))
    rule: Rule = RULES[rule_name](nodes, options)
    start, batch = time.perf_counter(), batches * tasks.BATCH[model_name]
    for step, parts in enumerate(divide_batches(dataset, batch, options.nodes, seed, steps)):
        nodes.set_learning_rate(learning_rate * tasks.compute_rate_factor(step, steps))
        rule.step(step, lambda node, model, parts=parts: compute_loss(model, *parts[node]))
    rule.finish()
    with torch.no_grad():
        loss, _ = measure_held_out(nodes.get_agreed_model())
    count = sum(parameter.numel() for parameter in model.parameters())
    dense_bytes = 2 * (options.nodes - 1) / options.nodes * 4 * count
    return SimulatedRun(
        rule_name,
        model_name,
        optimizer_name,
        options.nodes,
        steps,
        options.period,
        options.density,
        seed,
        float(loss),
        rule.sent_bytes / steps,
        dense_bytes,
        time.perf_counter() - start,
        rate,
        _find_median_and_largest(rule.guard_values.unsent),
        _find_median_and_largest(rule.guard_values.spread),
        batches,
    )


def _find_median_and_largest(values: list[float]) -> list[float] | None:
    return [statistics.median(values), max(values)] if values else None


def compute_differences(results: list[SimulatedRun]) -> list[dict[str, object]]:
    """Return one row per rule and setting: the paired difference to `dense`, in per cent, with its 95% interval."""
    dense = {result.task: result.loss for result in results if result.rule == "dense"}
    settings: dict[tuple[object, ...], list[SimulatedRun]] = {}
    for result in results:
        if result.rule != "dense" and result.task in dense:
            settings.setdefault(result.setting, []).append(result)
    rows = []
    for runs in settings.values():
        differences = [100 * (run.loss / dense[run.task] - 1) for run in runs]
        mean, interval = compute_interval(differences)
        first = runs[0]
        rows.append(
            {
                "rule": first.rule,
                "model": first.model,
                "optimizer": first.optimizer,
                "nodes": first.nodes,
                "steps": first.steps,
                "period": first.period,
                "density": first.density,
                "rate": first.rate,
                "batches": first.batches,
                "seeds": len(differences),
                "times_fewer_bytes": first.dense_bytes / first.sent_bytes if first.sent_bytes else None,
                "loss": statistics.fmean(run.loss for run in runs),
                "dense_loss": statistics.fmean(dense[run.task] for run in runs),
                "difference_percent": mean,
                "interval_percent": interval,
                "each_seed": differences,
                "unsent": _find_largest([run.unsent for run in runs]),
                "spread": _find_largest([run.spread for run in runs]),
            }
        )
    return rows


def compute_interval(differences: list[float]) -> tuple[float, list[float] | None]:
    """Return the mean and its 95% interval (Student's t); None with one value."""
    from scipy.stats import t

    count, mean = len(differences), statistics.fmean(differences)
    if count == 1:
        return mean, None
    half = float(t.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count)
    return mean, [mean - half, mean + half]


def _find_largest(values: list[list[float] | None]) -> list[float] | None:
    """Return the largest median and the largest value of all runs that were measured."""
    measured = [pair for pair in values if pair is not None]
    return [max(column) for column in zip(*measured, strict=True)] if measured else None


def format_differences(rows: list[dict[str, object]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| rule | model | optimizer | rate | nodes | steps | every | fewer bytes | seeds | difference | 95% interval |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        interval = row["interval_percent"]
        shown = f"{interval[0]:+.1f} to {interval[1]:+.1f}%" if isinstance(interval, list) else "–"
        lines.append(
            f"| {row['rule']} | {row['model']} | {row['optimizer']} | {row['rate']:g} "
            f"| {row['nodes']} | {row['steps']} "
            f"| {row['period']} | {row['times_fewer_bytes']:.1f}x | {row['seeds']} "
            f"| {row['difference_percent']:+.2f}% | {shown} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on simulated nodes with one exchange rule or several.")
    parser.add_argument("--rule", action="append", choices=list(RULES), help="may be given more than once")
    parser.add_argument("--model", choices=tasks.MODELS, default="char_gpt")
    parser.add_argument("--optimizer", choices=("sgd", "adamw", "lars", "lamb"), default="adamw")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--period", type=int, default=1, help="steps between exchanges, for rules with local steps")
    parser.add_argument("--density", type=float, default=0.01, help="for rules that send a share of the entries")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the task's learning rate")
    parser.add_argument("--batches", type=int, default=1, help="factor of the task's samples per step")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.rule:
        print("\n".join(f"{name:16s} {(rule.__doc__ or '').splitlines()[0]}" for name, rule in RULES.items()))
        return
    if (args.model, args.optimizer) not in tasks.LEARNING_RATE:
        parser.error(f"tasks.py has no learning rate of {args.optimizer} for {args.model}")
    torch.set_num_threads(1)
    results = (
        [SimulatedRun(**entry) for entry in json.loads(args.output.read_text())["runs"]] if args.output.exists() else []
    )
    for seed in range(args.seeds):
        for rule in dict.fromkeys(["dense", *args.rule]):
            period = args.period if RULES[rule].has_period else 1
            density = args.density if RULES[rule].has_density else 1.0
            options = RuleOptions(args.nodes, period, density, warmup_steps=args.steps // 10)
            setting = (
                rule,
                args.model,
                args.optimizer,
                args.nodes,
                args.steps,
                period,
                density,
                args.rate,
                args.batches,
            )
            if any((result.setting, result.seed) == (setting, seed) for result in results):
                continue
            result = train(rule, options, args.model, args.optimizer, seed, args.steps, args.rate, args.batches)
            results.append(result)
            rows = compute_differences(results)
            text = json.dumps({"compared": rows, "runs": [asdict(result) for result in results]}, indent=1)
            args.output.write_text(text + "\n")
            print(f"{rule} seed {seed}: loss {result.loss:.4f} in {result.seconds:.0f} s", flush=True)
    print(format_differences(compute_differences(results)))


if __name__ == "__main__":
    main()
