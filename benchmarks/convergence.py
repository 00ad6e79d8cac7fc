"""Compare the loss of sparse and dense training: the models of both examples, with SGD and AdamW, and paired seeds.

    TOPKUBE_RANKS_PER_NODE=1,1 mpiexec -n 2 python benchmarks/convergence.py     # trains missing runs and reports
    python benchmarks/convergence.py --report                                    # table and plot of the existing runs

Every run trains the same model from the same weights on the same samples in the same order, on two or more nodes
(declared on one machine). Only the exchange differs:
    dense                     hierarchical all-reduce, float32
    hitopk                    density 0.01, reached after 10% of the steps; bf16 values; error feedback
    hitopk, corrected         the same with momentum correction
    hitopk without feedback   as hitopk, but entries that are not sent are discarded (negative control)
The learning rate warms up for 5% of the steps and falls along a cosine to 0, so that the last weights represent the
run. The final loss is the mean loss over held-out data after the last step. Pairs with the same seed are compared by
(sparse - dense) / dense, with a 95% confidence interval of the mean (Student's t).

Each run is appended to a JSON file. Runs that are in the file are not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import tasks
import topkube
from topkube import algorithms
from topkube.collectives import Request
from topkube.collectives.sparse import HiTopK
from topkube.files import write_json
from topkube.world import World

DENSITY = 0.01
MODELS = ("char_gpt", "digits_cnn")
OPTIMIZERS = ("sgd", "adamw")
CORRECTED = "hitopk, corrected"
WITHOUT = "hitopk without feedback"
CONDITIONS = ("dense", "hitopk", CORRECTED, WITHOUT)


@dataclass(frozen=True)
class TrainedRun:
    """A finished training: its settings, held-out loss and accuracy, and training loss."""

    model: str
    optimizer: str
    condition: str
    seed: int
    steps: int
    parameters: int
    loss: float
    accuracy: float | None
    seconds: float
    curve: list[float]
    """The training loss of rank 0: means over 50 equal parts of the run."""

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return (self.model, self.optimizer, self.condition, self.seed, self.steps)


class WithoutFeedback(HiTopK):
    """hitopk without error feedback: entries that are not sent are discarded."""

    def run(self, world: World, request: Request) -> bool:
        return super().run(world, dataclasses.replace(request, residual=None))


FORGETFUL = algorithms.register(
    dataclasses.replace(
        algorithms.find_algorithm("hitopk"),
        name="benchmark.hitopk-without-feedback",
        summary="hitopk, but entries that are not sent are discarded",
        state=(),
        implementation=f"{__name__}:WithoutFeedback",
    )
)
AGGREGATIONS = {CORRECTED: "hitopk", WITHOUT: FORGETFUL.name}


def train(name: str, optimizer_name: str, condition: str, seed: int, steps: int, learning_rate: float) -> TrainedRun:
    """Train one run. All ranks call this function."""
    torch.manual_seed(seed)
    model, dataset, compute_loss, measure_held_out = tasks.build_task(name)
    topkube.broadcast_parameters(model)
    plain = (
        torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        if optimizer_name == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=learning_rate)
    )
    optimizer = topkube.DistributedOptimizer(
        plain,
        model.named_parameters(),
        aggregation=AGGREGATIONS.get(condition, condition),
        momentum_correction=condition == CORRECTED,
        density=DENSITY,
        warmup_steps=0 if condition == "dense" else steps // 10,
        wire="bf16",
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: tasks.compute_rate_factor(step, steps))
    sampler = topkube.data.DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size=tasks.BATCH[name] // topkube.size(), sampler=sampler)
    losses, start = [], time.perf_counter()
    with topkube.checkpointing(model, optimizer, sampler) as run:
        for batch in run.progress(loader, total=steps):
            loss = run.loss(compute_loss(model, *batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    seconds = time.perf_counter() - start
    with torch.no_grad():
        final_loss, accuracy = measure_held_out(model)
    steps_per_point = max(1, steps // 50)
    curve = [
        sum(losses[first : first + steps_per_point]) / steps_per_point
        for first in range(0, steps - steps_per_point + 1, steps_per_point)
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    return TrainedRun(name, optimizer_name, condition, seed, steps, count, final_loss, accuracy, seconds, curve)


def read_runs(path: Path) -> list[TrainedRun]:
    return [TrainedRun(**entry) for entry in json.loads(path.read_text())["runs"]] if path.exists() else []


def write_runs(path: Path, runs: list[TrainedRun]) -> None:
    """Replace the whole file atomically, so that an interrupted benchmark loses at most the current run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "nodes": topkube.nodes(),
        "ranks": topkube.size(),
        "batch": tasks.BATCH,
        "density": DENSITY,
        "warmup": "10% of the steps",
        "wire": "bf16",
        "learning_rate": {f"{model} {optimizer}": rate for (model, optimizer), rate in tasks.LEARNING_RATE.items()},
        "label_smoothing": {"char_gpt": 0, "digits_cnn": tasks.LABEL_SMOOTHING},
        "torch": torch.__version__,
    }
    write_json(path, {"about": about, "compared": compare(runs), "runs": [asdict(run) for run in runs]})


def compare(runs: list[TrainedRun]) -> list[dict[str, object]]:
    """Return, for each model, optimizer and sparse condition, the paired relative difference to dense in per cent with
    its 95% interval."""
    from simulated_nodes import compute_interval

    losses = {run.key: run.loss for run in runs}
    rows = []
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            for condition in CONDITIONS[1:]:
                pairs = [
                    (loss, losses[model, optimizer, "dense", seed, steps])
                    for (m, o, c, seed, steps), loss in sorted(losses.items())
                    if (m, o, c) == (model, optimizer, condition) and (m, o, "dense", seed, steps) in losses
                ]
                if len(pairs) < 2:
                    continue
                differences = [100 * (sparse - dense) / dense for sparse, dense in pairs]
                mean, interval = compute_interval(differences)
                assert interval is not None
                low, high = interval
                rows.append(
                    {
                        "model": model,
                        "optimizer": optimizer,
                        "condition": condition,
                        "seeds": len(pairs),
                        "dense_loss": sum(dense for _, dense in pairs) / len(pairs),
                        "loss": sum(sparse for sparse, _ in pairs) / len(pairs),
                        "difference_percent": mean,
                        "interval_percent": interval,
                        "within_1_percent": low >= -1 and high <= 1,
                        "not_worse_by_1_percent": high <= 1,
                    }
                )
    return rows


def write_report(path: Path) -> None:
    """Write a Markdown table and a plot next to the JSON file."""
    runs = read_runs(path)
    lines = [
        "| model | optimizer | exchange | seeds | dense loss | loss | difference, % | 95% interval, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in compare(runs):
        low, high = row["interval_percent"]  # type: ignore[misc]
        lines.append(
            f"| {row['model']} | {row['optimizer']} | {row['condition']} | {row['seeds']} | {row['dense_loss']:.4f} "
            f"| {row['loss']:.4f} | {row['difference_percent']:+.2f} | {low:+.2f} to {high:+.2f} |"
        )
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    draw_losses(runs, path.with_suffix(".png"))


def draw_losses(runs: list[TrainedRun], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for row, model in zip(panels, MODELS, strict=True):
        for panel, optimizer in zip(row, OPTIMIZERS, strict=True):
            for condition, colour in zip(CONDITIONS, ("black", "tab:blue", "tab:green", "tab:red"), strict=True):
                for run in runs:
                    if (run.model, run.optimizer, run.condition) != (model, optimizer, condition):
                        continue
                    steps = [run.steps * (i + 1) / len(run.curve) for i in range(len(run.curve))]
                    panel.plot(steps, run.curve, color=colour, alpha=0.5, linewidth=1, label=condition)
            handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
            panel.legend(handles.values(), handles.keys())
            panel.set(title=f"{model}, {optimizer}", xlabel="step", ylabel="training loss, nats")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convergence of sparse against dense training.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "convergence.json")
    parser.add_argument("--most", type=int, default=1000, help="stop after this many runs; the next call continues")
    parser.add_argument("--report", action="store_true", help="only write the table and the plot")
    args = parser.parse_args()
    if args.report:
        write_report(args.output)
        return
    world = topkube.init()
    torch.set_num_threads(1)
    runs = world.comm.bcast(read_runs(args.output) if world.rank == 0 else None)
    all_keys = [
        (model, optimizer, condition, seed, args.steps)
        for conditions in (CONDITIONS[:3], CONDITIONS[3:])  # first the comparison, then its control
        for model in reversed(MODELS)
        for seed in range(args.seeds)
        for optimizer in OPTIMIZERS
        for condition in conditions
    ]
    done = {run.key for run in runs}
    for key in [key for key in all_keys if key not in done][: args.most]:
        result = train(*key, learning_rate=tasks.LEARNING_RATE[key[:2]])
        runs.append(result)
        if world.rank == 0:
            write_runs(args.output, runs)
            print(f"{len(runs)}/{len(all_keys)} {key} loss {result.loss:.4f} in {result.seconds:.0f} s", flush=True)
    if world.rank == 0:
        write_report(args.output)


if __name__ == "__main__":
    main()
