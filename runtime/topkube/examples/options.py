"""Options that all examples share."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import topkube
from topkube import algorithms
from topkube.environment import is_thread_count_set


def parse_positive(text: str) -> int:
    """Parse an integer above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def parse_count(text: str) -> int:
    """Parse an integer of at least 0."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return number


def parse_positive_number(text: str) -> float:
    """Parse a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def parse_share(text: str) -> float:
    """Parse a number in (0, 1]."""
    number = parse_positive_number(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is outside (0, 1]")
    return number


def add_common_options(parser: argparse.ArgumentParser, *, steps: int, batch_size: int, optimizer: str) -> None:
    """Add options for steps, batch, optimizer, seed and aggregation. The defaults of aggregation come from the
    TrainingJob's spec.aggregation."""
    parser.add_argument("--steps", type=parse_positive, default=steps, help="steps to train (%(default)s)")
    parser.add_argument("--batch-size", type=parse_positive, default=batch_size, help="samples per rank (%(default)s)")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default=optimizer, help="(%(default)s)")
    parser.add_argument(
        "--learning-rate", type=parse_positive_number, help="(default: a rate that suits the optimizer)"
    )
    parser.add_argument(
        "--seed", type=parse_count, default=0, help="seed of the weights and of the order of samples (%(default)s)"
    )
    parser.add_argument(
        "--aggregation", choices=(*algorithms.CHOICES, *algorithms.names()), help="algorithm (default: the job's)"
    )
    parser.add_argument("--density", type=parse_share, help="share of a gradient that is sent (default: the job's)")
    parser.add_argument(
        "--warmup-steps", type=parse_count, help="steps until this density is reached (default: the job's)"
    )


def read_aggregation(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as arguments of DistributedOptimizer."""
    return {"aggregation": args.aggregation, "density": args.density, "warmup_steps": args.warmup_steps}


def set_threads() -> None:
    """Share this machine's cores among the ranks that run on it, of all simulated nodes. If OMP_NUM_THREADS is set, it
    decides."""
    if not is_thread_count_set():
        torch.set_num_threads(topkube.world.current().threads)
