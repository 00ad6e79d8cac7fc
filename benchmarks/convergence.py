"""Does sparse training reach the loss of dense training? Both examples' models, SGD and AdamW apart, paired seeds.

    TOPKUBE_RANKS_PER_NODE=1,1 mpiexec -n 2 python benchmarks/convergence.py     # trains what is missing, reports
    python benchmarks/convergence.py --report                                    # table and plot of what is there

Every run trains the same model from the same weights on the same samples in the same order, on two nodes or
more (declared on one machine); only the exchange differs:
    dense                     hierarchical all-reduce, float32
    hitopk                    density 0.01, reached after 10% of the steps; bf16 values; error feedback
    hitopk, corrected         the same with momentum correction
    hitopk without feedback   as hitopk, but what is not sent is forgotten (negative control)
The learning rate warms up for 5% of the steps and falls along a cosine to 0, so that the last weights are a fair
summary. The final loss is the mean loss over held-out data, after the last step. Compared are pairs of equal seed:
(sparse - dense) / dense, with a 95% confidence interval of the mean (Student's t).

Results are appended to a JSON file run by run; what is in it is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import topkube
from topkube.collectives import Algorithm, Request, find, register
from topkube.examples.char_gpt import GPT, Source
from topkube.examples.digits_cnn import CNN, accuracy, digits
from topkube.world import World

DENSITY = 0.01
MODELS = ("char_gpt", "digits_cnn")
OPTIMIZERS = ("sgd", "adamw")
CORRECTED = "hitopk, corrected"
CONDITIONS = ("dense", "hitopk", CORRECTED, "hitopk without feedback")
LEARNING_RATE = {
    ("char_gpt", "sgd"): 0.1,
    ("char_gpt", "adamw"): 3e-3,
    ("digits_cnn", "sgd"): 0.1,
    ("digits_cnn", "adamw"): 5e-3,
}
"""Of a few tried, those with the lowest dense loss; sparse runs use the same."""
BATCH = {"char_gpt": 16, "digits_cnn": 32}
"""Samples per step, over all ranks."""
CONTEXT, GPT_WIDTH, GPT_LAYERS, CNN_CHANNELS = 64, 64, 2, 8
LABEL_SMOOTHING = 0.1
"""On the digits: their plain loss tends to 0, where a difference in per cent means nothing."""


@dataclass(frozen=True)
class Result:
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
    """Training loss of rank 0, means over fiftieths of the run."""

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return (self.model, self.optimizer, self.condition, self.seed, self.steps)


def without_feedback(world: World, request: Request) -> bool:
    return find("hitopk").run(world, dataclasses.replace(request, residual=None))


register(Algorithm("hitopk without feedback", sparse=True, run=without_feedback))


def task(name: str) -> tuple[torch.nn.Module, Dataset, Callable[..., torch.Tensor], Callable[[torch.nn.Module], tuple]]:
    """(model, training data, loss of a batch, held-out (loss, accuracy))."""
    if name == "char_gpt":
        source = Source(CONTEXT, held_out=True)
        chosen = torch.linspace(0, len(source) - 1, 1024).long().tolist()
        codes, targets = (torch.stack(part) for part in zip(*(source[i] for i in chosen), strict=True))

        def held_out_text(model: torch.nn.Module) -> tuple[float, None]:
            parts = [model(*part).item() for part in zip(codes.split(64), targets.split(64), strict=True)]
            return sum(parts) / len(parts), None

        model = GPT(GPT_LAYERS, GPT_WIDTH, 4, CONTEXT)
        return model, Source(CONTEXT), lambda model, codes, targets: model(codes, targets), held_out_text
    train, test = digits()
    images, labels = test.tensors

    def held_out_digits(model: torch.nn.Module) -> tuple[float, float]:
        loss = F.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)
        return loss.item(), accuracy(model, test)

    def loss_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)

    return CNN(CNN_CHANNELS), train, loss_of, held_out_digits


def train(name: str, optimizer_name: str, condition: str, seed: int, steps: int, learning_rate: float) -> Result:
    """One run; all ranks together."""
    torch.manual_seed(seed)
    model, dataset, loss_of, held_out = task(name)
    topkube.broadcast_parameters(model)
    plain = (
        torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        if optimizer_name == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=learning_rate)
    )
    optimizer = topkube.DistributedOptimizer(
        plain,
        model.named_parameters(),
        aggregation=condition.removesuffix(", corrected"),
        momentum_correction=condition == CORRECTED,
        density=DENSITY,
        warmup_steps=0 if condition == "dense" else steps // 10,
        wire="bf16",
    )
    rise = steps // 20

    def rate(step: int) -> float:
        return min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    sampler = topkube.data.DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size=BATCH[name] // topkube.size(), sampler=sampler)
    losses, start = [], time.perf_counter()
    with topkube.checkpointing(model, optimizer, sampler) as run:
        for batch in run.progress(loader, total=steps):
            loss = run.loss(loss_of(model, *batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    seconds = time.perf_counter() - start
    with torch.no_grad():
        final, right = held_out(model)
    stretch = max(1, steps // 50)
    curve = [sum(losses[i : i + stretch]) / stretch for i in range(0, steps - stretch + 1, stretch)]
    count = sum(parameter.numel() for parameter in model.parameters())
    return Result(name, optimizer_name, condition, seed, steps, count, final, right, seconds, curve)


def read(path: Path) -> list[Result]:
    return [Result(**entry) for entry in json.loads(path.read_text())["runs"]] if path.exists() else []


def write(path: Path, runs: list[Result]) -> None:
    """The file as a whole, replaced at once: an interrupted benchmark loses at most the run in progress."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    about = {
        "nodes": topkube.nodes(),
        "ranks": topkube.size(),
        "batch": BATCH,
        "density": DENSITY,
        "warmup": "10% of the steps",
        "wire": "bf16",
        "learning_rate": {f"{model} {optimizer}": rate for (model, optimizer), rate in LEARNING_RATE.items()},
        "label_smoothing": {"char_gpt": 0, "digits_cnn": LABEL_SMOOTHING},
        "torch": torch.__version__,
    }
    aside.write_text(json.dumps({"about": about, "compared": compare(runs), "runs": [asdict(run) for run in runs]}))
    os.replace(aside, path)


def compare(runs: list[Result]) -> list[dict[str, object]]:
    """Per model, optimizer and sparse condition: the paired relative difference to dense, per cent, with its 95%
    interval."""
    from scipy.stats import t

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
                mean = sum(differences) / len(pairs)
                spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (len(pairs) - 1))
                half = float(t.ppf(0.975, len(pairs) - 1)) * spread / math.sqrt(len(pairs))
                rows.append(
                    {
                        "model": model,
                        "optimizer": optimizer,
                        "condition": condition,
                        "seeds": len(pairs),
                        "dense_loss": sum(dense for _, dense in pairs) / len(pairs),
                        "loss": sum(sparse for sparse, _ in pairs) / len(pairs),
                        "difference_percent": mean,
                        "interval_percent": [mean - half, mean + half],
                        "within_1_percent": mean - half >= -1 and mean + half <= 1,
                        "not_worse_by_1_percent": mean + half <= 1,
                    }
                )
    return rows


def report(path: Path) -> None:
    """A markdown table and a plot beside the JSON file."""
    runs = read(path)
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
    plot(runs, path.with_suffix(".png"))


def plot(runs: list[Result], path: Path) -> None:
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
                    at = [run.steps * (i + 1) / len(run.curve) for i in range(len(run.curve))]
                    panel.plot(at, run.curve, color=colour, alpha=0.5, linewidth=1, label=condition)
            handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
            panel.legend(handles.values(), handles.keys())
            panel.set(title=f"{model}, {optimizer}", xlabel="step", ylabel="training loss, nats")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convergence of sparse against dense training.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "convergence.json")
    parser.add_argument("--most", type=int, default=1000, help="stop after this many more runs; the next call goes on")
    parser.add_argument("--report", action="store_true", help="only write the table and the plot again")
    args = parser.parse_args()
    if args.report:
        report(args.output)
        return
    world = topkube.init()
    torch.set_num_threads(1)
    runs = world.comm.bcast(read(args.output) if world.rank == 0 else None)
    wanted = [
        (model, optimizer, condition, seed, args.steps)
        for conditions in (CONDITIONS[:3], CONDITIONS[3:])  # the comparison first, its control after it
        for model in reversed(MODELS)
        for seed in range(args.seeds)
        for optimizer in OPTIMIZERS
        for condition in conditions
    ]
    done = {run.key for run in runs}
    for key in [key for key in wanted if key not in done][: args.most]:
        result = train(*key, learning_rate=LEARNING_RATE[key[:2]])
        runs.append(result)
        if world.rank == 0:
            write(args.output, runs)
            print(f"{len(runs)}/{len(wanted)} {key} loss {result.loss:.4f} in {result.seconds:.0f} s", flush=True)
    if world.rank == 0:
        report(args.output)


if __name__ == "__main__":
    main()
