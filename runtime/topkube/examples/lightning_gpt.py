"""The GPT of char_gpt, trained with Lightning: `Trainer(strategy=LightningStrategy(...))`. It needs topkube[lightning].

topkube run -m topkube.examples.lightning_gpt --workers 2 --slots 2 --algorithm hitopk -- --steps 50
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from topkube.examples.char_gpt import GPT, CharacterWindows
from topkube.examples.options import parse_positive
from topkube.integrations.lightning import LightningStrategy
from topkube.settings import Settings


class CharGPT(pl.LightningModule):  # type: ignore[misc]  # mypy does not read Lightning
    """Predicts the next character. `sizes` are the arguments of GPT."""

    def __init__(self, learning_rate: float = 1e-3, **sizes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model, self.learning_rate = GPT(**sizes), learning_rate

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        codes, targets = batch  # both (B, T)
        loss: torch.Tensor = self.model(codes, targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning_gpt", description="Train a small GPT with Lightning.")
    parser.add_argument("--steps", type=parse_positive, default=200, help="steps to train (%(default)s)")
    parser.add_argument("--batch-size", type=parse_positive, default=8, help="samples per rank (%(default)s)")
    parser.add_argument("--precision", default="32-true", help="precision of the Trainer (%(default)s)")
    parser.add_argument("--layers", type=parse_positive, default=4, help="transformer blocks (%(default)s)")
    parser.add_argument("--width", type=parse_positive, default=128, help="features, a multiple of 4 (%(default)s)")
    parser.add_argument("--context", type=parse_positive, default=128, help="characters of context (%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = build_parser().parse_args(arguments)
    settings = Settings.from_environment()
    pl.seed_everything(0)
    model = CharGPT(layers=args.layers, width=args.width, context=args.context)
    more: dict[str, Any] = {"enable_checkpointing": False}
    if settings.checkpoint_directory:  # spec.checkpoint of the job; a restart continues from the last checkpoint
        saving = ModelCheckpoint(settings.checkpoint_directory, save_last=True, every_n_train_steps=50)
        more = {"callbacks": [saving]}
    trainer = pl.Trainer(
        strategy=LightningStrategy(),  # the aggregation of the job; or LightningStrategy("hitopk", density=0.01)
        max_steps=args.steps,
        max_epochs=-1,
        precision=args.precision,
        logger=False,
        enable_progress_bar=False,  # TopKube shows one
        **more,
    )
    loader = DataLoader(CharacterWindows(args.context), batch_size=args.batch_size, shuffle=True)
    trainer.fit(model, loader, ckpt_path="last" if settings.checkpoint_directory else None)
    trainer.print(f"trained {trainer.global_step} steps on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
