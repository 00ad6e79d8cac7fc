"""A small convolutional network on scikit-learn's handwritten digits (1,797 images of 8 x 8). Nothing is downloaded.

python -m topkube.examples.digits_cnn                      # alone
mpiexec -n 4 python -m topkube.examples.digits_cnn         # on 4 ranks
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topkube
from topkube.examples.options import add_common_options, read_aggregation, set_threads


def load_split_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return images (N, 1, 8, 8) in [0, 1] and their digits (N,): four fifths for training, one fifth for tests."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class CNN(nn.Sequential):
    """Two convolutions and two linear layers. Returns logits (B, 10)."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),  # (B, channels, 8, 8)
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 2 * channels, 4, 4)
            nn.Flatten(),
            nn.Linear(32 * channels, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, 10),
        )


@torch.no_grad()
def compute_accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the share of `dataset` that the model classifies correctly."""
    images, labels = dataset.tensors
    return float((model(images).argmax(1) == labels).float().mean())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("digits_cnn", description="Train a CNN on handwritten digits.")
    add_common_options(parser, steps=200, batch_size=16, optimizer="sgd")
    args = parser.parse_args(arguments)

    topkube.init()
    set_threads()
    torch.manual_seed(args.seed)

    model, criterion = CNN(), nn.CrossEntropyLoss()
    topkube.broadcast_parameters(model)
    if args.optimizer == "sgd":
        plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate or 0.05, momentum=0.9)
    else:
        plain = torch.optim.AdamW(model.parameters(), lr=args.learning_rate or 1e-3)
    optimizer = topkube.DistributedOptimizer(plain, model.named_parameters(), **read_aggregation(args))

    train, test = load_split_digits()
    sampler = topkube.data.DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    with topkube.checkpointing(model, optimizer, sampler) as run:
        for images, labels in run.progress(loader, total=args.steps):
            loss = run.loss(criterion(model(images), labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with optimizer.consensus():
        if topkube.rank() == 0:
            accuracy = compute_accuracy(model, test)
            print(f"after {run.step} steps: {accuracy:.1%} of {len(test)} unseen digits are classified correctly")


if __name__ == "__main__":
    main()
