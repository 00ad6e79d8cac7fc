"""A small model and its distributed optimizer on one rank."""

from __future__ import annotations

import torch
from torch import nn

import topkube


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 40), nn.Linear(40, 1))


def build_optimizer(model: nn.Module, lr: float = 0.1, **options: object) -> topkube.DistributedOptimizer:
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    return topkube.DistributedOptimizer(plain, model.named_parameters(), **{"aggregation": "dense", **options})


def run_backward(model: nn.Module, seed: int = 0, factor: float = 1.0) -> None:
    torch.manual_seed(seed)
    (model(torch.randn(8, 20)).square().mean() * factor).backward()
