"""A small model and its distributed optimizer on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

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


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al., 2021) as most scripts write it: `second_step` steps the optimizer
    that `base_optimizer` returns."""

    def __init__(self, params: Any, base_optimizer: Callable[..., Any], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [(p, group["rho"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p, _ in parameters]).norm()
        for p, rho in parameters:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (rho / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one that never calls torch's `Optimizer.__init__`, as in some libraries."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = defaultdict(dict), optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure)
