"""The models, data, learning rates and batches of convergence.py, simulated_nodes.py and target_loss.py.

Nothing is downloaded: the text is that of the Python standard library (topkube.examples.char_gpt), the images are
scikit-learn's handwritten digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from topkube.examples.char_gpt import GPT, VOCABULARY, CharacterWindows
from topkube.examples.digits_cnn import CNN, compute_accuracy, load_split_digits

LEARNING_RATE = {
    ("char_gpt", "sgd"): 0.1,
    ("char_gpt", "adamw"): 3e-3,
    ("char_gpt", "lamb"): 2e-2,
    ("char_gpt_800k", "sgd"): 0.05,
    ("char_gpt_800k", "adamw"): 1e-3,
    ("digits_cnn", "sgd"): 0.1,
    ("digits_cnn", "adamw"): 5e-3,
    ("digits_batchnorm", "sgd"): 0.1,
    ("digits_batchnorm", "adamw"): 1e-2,
    ("digits_batchnorm", "lars"): 10.0,
    ("char_lstm", "sgd"): 2.0,
    ("char_lstm", "adamw"): 2e-2,
}
"""The learning rates with the lowest dense loss among a few, by model and optimizer; compressed runs use the same
rates."""
BATCH = {"char_gpt": 16, "char_gpt_800k": 16, "digits_cnn": 32, "digits_batchnorm": 32, "char_lstm": 16}
"""Samples per step, over all ranks."""
CONTEXT, CNN_CHANNELS, LSTM_WIDTH = 64, 8, 96
GPT_SIZES = {"char_gpt": (2, 64), "char_gpt_800k": (4, 128)}
"""Layers and width of each GPT."""
LABEL_SMOOTHING = 0.1
"""Label smoothing for the digits: without it the loss tends to 0, and a difference in per cent has no meaning."""


class Task(NamedTuple):
    """What is trained. `compute_loss` takes the model and a batch; `measure_held_out` takes the model, and returns its
    held-out loss and its accuracy (None for text)."""

    model: nn.Module
    dataset: Dataset
    compute_loss: Callable[..., torch.Tensor]
    measure_held_out: Callable[[nn.Module], tuple[float, float | None]]


class LSTM(nn.Module):
    """A character model of one LSTM layer; most of its weights are in matrices that are used once per character. Takes
    codes and targets (B, T), returns the mean loss in nats."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, codes: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(codes))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class BatchNormCNN(nn.Sequential):
    """The CNN of the digits with batch normalization after each convolution. Returns logits (B, 10)."""

    def __init__(self, channels: int) -> None:
        first, relu, second, *rest = CNN(channels)
        super().__init__(first, nn.BatchNorm2d(channels), relu, second, nn.BatchNorm2d(2 * channels), *rest)


def compute_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step: it rises in the first 5% of the steps, and falls along a cosine
    to 0, so that the last weights represent the run."""
    rising_steps = max(1, steps // 20)
    return min((step + 1) / rising_steps, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def build_task(name: str) -> Task:
    """Return the task of this name, with fresh weights from torch's generator."""
    if name.startswith("char"):
        return _build_text_task(name)
    return _build_digits_task(name)


def _build_text_task(name: str) -> Task:
    dataset = CharacterWindows(CONTEXT, held_out=True)
    indices = torch.linspace(0, len(dataset) - 1, 1024).long().tolist()
    codes, targets = (torch.stack(part) for part in zip(*(dataset[i] for i in indices), strict=True))

    def measure_held_out(model: nn.Module) -> tuple[float, None]:
        parts = [model(*part).item() for part in zip(codes.split(64), targets.split(64), strict=True)]
        return sum(parts) / len(parts), None

    if name in GPT_SIZES:
        layers, width = GPT_SIZES[name]
        model: nn.Module = GPT(layers, width, 4, CONTEXT)
    else:
        model = LSTM(VOCABULARY, LSTM_WIDTH)
    return Task(model, CharacterWindows(CONTEXT), lambda model, codes, targets: model(codes, targets), measure_held_out)


def _build_digits_task(name: str) -> Task:
    train, test = load_split_digits()
    images, labels = test.tensors

    def measure_held_out(model: nn.Module) -> tuple[float, float]:
        model.eval()
        loss = F.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)
        accuracy = compute_accuracy(model, test)  # type: ignore[arg-type]
        model.train()
        return loss.item(), accuracy

    def compute_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)

    model = (BatchNormCNN if name == "digits_batchnorm" else CNN)(CNN_CHANNELS)
    return Task(model, train, compute_loss, measure_held_out)


MODELS = tuple(BATCH)
