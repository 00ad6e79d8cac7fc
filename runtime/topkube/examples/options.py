"""Options that the examples share."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

import topkube


def positive(text: str) -> int:
    """A whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def positive_number(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def share(text: str) -> float:
    """A number in (0, 1]."""
    number = positive_number(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is outside (0, 1]")
    return number


def common_options(parser: argparse.ArgumentParser, *, steps: int, batch_size: int, optimizer: str) -> None:
    """Steps, batch, optimizer, seed and aggregation. What is not given here comes from the TrainingJob's
    spec.aggregation."""
    parser.add_argument("--steps", type=positive, default=steps, help="steps to train (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=batch_size, help="samples per rank (%(default)s)")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default=optimizer, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=positive_number, help="default: one that suits the optimizer")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sample order (%(default)s)")
    parser.add_argument(
        "--aggregation", choices=("auto", "dense", *sorted(topkube.collectives.ALGORITHMS)), help="default: the job's"
    )
    parser.add_argument("--density", type=share, help="share of a gradient that is sent; default: the job's")
    parser.add_argument("--warmup-steps", type=positive, help="steps until that density; default: the job's")


def aggregation_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options as arguments of DistributedOptimizer."""
    return {"aggregation": args.aggregation, "density": args.density, "warmup_steps": args.warmup_steps}


def set_threads() -> None:
    """Shares this machine's cores among its ranks."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // topkube.local_size()))
