"""Two nodes x two ranks under `topkube run`: train the same small GPT with Lightning's own strategy, with TopKube's
dense exchange and with hitopk. The run with hitopk also saves a checkpoint, from which another run continues. Each rank
stores its weights and losses."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Subset

from topkube.examples.char_gpt import CharacterWindows
from topkube.examples.lightning_gpt import CharGPT
from topkube.integrations.lightning import LightningStrategy

CONTEXT, STEPS = 16, 8
folder = Path(sys.argv[1])
samples = Subset(CharacterWindows(CONTEXT, characters=20_000), range(STEPS * 2 * 4))


class EvaluatedGPT(CharGPT):
    """Lightning evaluates it at the end of each epoch of 8 steps, on 2 batches per rank."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.model(*batch)


class BatchRecorder(pl.Callback):
    """Stores the loss of each step, and the indexes of the samples of this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.samples: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.samples.append(batch[0])


def fit(strategy: Any, steps: int = STEPS, resume: Path | None = None, **options: Any) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    model, recorder = EvaluatedGPT(learning_rate=1e-2, layers=1, width=32, context=CONTEXT), BatchRecorder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        callbacks=[recorder],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    loader, evaluated = DataLoader(samples, batch_size=2, shuffle=True), DataLoader(samples, batch_size=8)
    trainer.fit(model, loader, evaluated, ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(folder / "saved.ckpt")
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return {"weights": weights, "losses": recorder.losses, "samples": recorder.samples, "step": trainer.global_step}


results = {
    "library": fit("ddp", devices=2, num_nodes=2),
    "dense": fit(LightningStrategy("dense")),
    "bf16": fit(LightningStrategy("hitopk", density=0.1), precision="bf16-mixed"),
    "hitopk": fit("topkube"),  # the aggregation of the job
    "resumed": fit("topkube", STEPS + 4, folder / "saved.ckpt"),
}
rank = torch.distributed.get_rank()
torch.save(results, folder / f"rank-{rank}.pt")
