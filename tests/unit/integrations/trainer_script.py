"""Two nodes x two ranks under `topkube run`: train the same small GPT-2 with the Trainer alone, with TopKube's dense
exchange and with hitopk. Each rank stores its weights, its losses and its samples."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Subset, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from topkube.examples.trainer_gpt import GPT2Windows, build_small_gpt2
from topkube.integrations.accelerate import hook_accelerator
from topkube.integrations.trainer import hook_trainer

CONTEXT, STEPS = 16, 8
folder = Path(sys.argv[1])


class LossRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


class RecordingTrainer(Trainer):
    samples: list[torch.Tensor]

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        self.samples.append(inputs["input_ids"])
        return super().training_step(model, inputs, *arguments, **options)


def train(aggregation: str | None, samples: int = STEPS * 2 * 4, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    set_seed(0)
    model, recorder = build_small_gpt2(1, 32, CONTEXT), LossRecorder()
    windows = Subset(GPT2Windows(CONTEXT), range(samples))
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="epoch",  # 8 steps
        per_device_eval_batch_size=8,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = RecordingTrainer(model, arguments, train_dataset=windows, eval_dataset=windows, callbacks=[recorder])
    trainer.samples = []
    if aggregation is not None:
        hook_trainer(trainer, aggregation, density=0.1)
    trainer.train()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return {"weights": weights, "losses": recorder.losses, "samples": trainer.samples, "ranks": arguments.world_size}


def train_with_accelerate(aggregation: str | None) -> torch.Tensor:
    """Train a layer with accelerate; return its weights."""
    accelerator = Accelerator()
    if aggregation is not None:
        hook_accelerator(accelerator, aggregation, density=0.1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4)
    loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1), loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward((model(inputs) - targets).square().mean())
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(layer.parameters()).detach()


results = {
    "library": train(None),
    "dense": train("dense"),
    "uneven": train("dense", samples=37, steps=3, gradient_accumulation_steps=2),
    "hitopk": train("hitopk", gradient_accumulation_steps=1),
    "accelerate alone": train_with_accelerate(None),
    "accelerate dense": train_with_accelerate("dense"),
}
torch.save(results, folder / f"rank-{torch.distributed.get_rank()}.pt")
