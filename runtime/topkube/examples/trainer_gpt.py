"""A small GPT-2 with random weights, trained with the Trainer of Hugging Face transformers. It downloads nothing and
needs topkube[transformers].

topkube run -m topkube.examples.trainer_gpt --workers 2 --slots 2 --algorithm hitopk -- --steps 50
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from topkube.examples.char_gpt import VOCABULARY, CharacterWindows
from topkube.examples.options import parse_positive
from topkube.integrations.trainer import hook_trainer
from topkube.settings import Settings


class GPT2Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of `context` characters. The model itself shifts the labels by one character."""

    def __init__(self, context: int) -> None:
        self._windows = CharacterWindows(context)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        codes, _ = self._windows[index]
        return {"input_ids": codes, "labels": codes}


def build_small_gpt2(layers: int, width: int, context: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with random weights."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("trainer_gpt", description="Train a small GPT-2 with the Trainer.")
    parser.add_argument("--steps", type=parse_positive, default=200, help="steps to train (%(default)s)")
    parser.add_argument("--batch-size", type=parse_positive, default=8, help="samples per rank (%(default)s)")
    parser.add_argument("--layers", type=parse_positive, default=4, help="transformer blocks (%(default)s)")
    parser.add_argument("--width", type=parse_positive, default=128, help="features, a multiple of 4 (%(default)s)")
    parser.add_argument("--context", type=parse_positive, default=128, help="characters of context (%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = build_parser().parse_args(arguments)
    folder = Settings.from_environment().checkpoint_directory  # spec.checkpoint of the job
    set_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        trainer = Trainer(
            build_small_gpt2(args.layers, args.width, args.context),
            TrainingArguments(
                output_dir=folder or temporary,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch_size,
                learning_rate=1e-3,
                logging_steps=10,
                save_strategy="steps" if folder else "no",
                save_steps=50,
                save_total_limit=2,
                report_to="none",
                disable_tqdm=True,  # TopKube shows a bar
            ),
            train_dataset=GPT2Windows(args.context),
        )
        hook_trainer(trainer)  # the aggregation of the job; or hook_trainer(trainer, "hitopk", density=0.01)
        last = get_last_checkpoint(folder) if folder and Path(folder).is_dir() else None
        trainer.train(resume_from_checkpoint=last)
        if trainer.is_world_process_zero():
            print(f"trained {trainer.state.global_step} steps on {trainer.args.world_size} ranks")


if __name__ == "__main__":
    main()
