"""Float32 masters of 16-bit models on several ranks, with torch's GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import topkube
from ranks.training.scene import are_equal_on_all_ranks
from topkube.training.optimizers.mixed_precision import MasterWeights
from topkube.world import World


def build_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 30), nn.Linear(30, 1)).half()


def wrap_with_masters(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    settings = {"aggregation": "dense", "warmup_steps": 0, "wire": "fp32", "bucket_bytes": 2048, **options}
    return topkube.DistributedOptimizer(MasterWeights(optimizer), model.named_parameters(), **settings)


def case_a_grad_scaler_trains_the_masters_of_all_ranks_alike(world: World) -> None:
    """Clipping, a fused inner optimizer, and an overflow on one rank: all ranks skip the step, lower the scale and
    continue."""
    for fused in (False, True):
        model = build_network()
        optimizer = wrap_with_masters(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused))
        reference = [p.detach().double().requires_grad_() for p in model.parameters()]
        plain = torch.optim.SGD(reference, lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for step in range(4):
            overflows = step == 1
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + world.rank)).half()
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            scaler.scale(loss * torch.inf if overflows and world.rank == 0 else loss).backward()
            exchanged = [p.grad.double() / scaler.get_scale() for p in model.parameters()]
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.master_parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
            if not overflows:
                for parameter, gradient in zip(reference, exchanged, strict=True):
                    parameter.grad = gradient
                torch.nn.utils.clip_grad_norm_(reference, 0.2)
                plain.step()
        assert scaler.get_scale() == 2.0**11
        for master, expected in zip(optimizer.master_parameters(), reference, strict=True):
            torch.testing.assert_close(master.double(), expected, rtol=2e-6, atol=1e-6)
        assert are_equal_on_all_ranks(optimizer.master_parameters())
        optimizer.unwrap()


def case_masters_follow_a_broadcast_that_comes_after_them(world: World) -> None:
    model = build_network(seed=world.rank)
    optimizer = wrap_with_masters(model, torch.optim.SGD(model.parameters(), lr=0.05))
    topkube.broadcast_parameters(model)
    model(torch.ones(2, 8).half()).float().sum().backward()
    optimizer.step()
    assert are_equal_on_all_ranks(optimizer.master_parameters())
    assert are_equal_on_all_ranks(list(model.parameters()))


def case_masters_see_what_an_exchange_wrote_after_the_groups_were_read(world: World) -> None:
    model = nn.Linear(64, 40, bias=False).half()
    nn.init.ones_(model.weight)
    optimizer = wrap_with_masters(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model.weight.grad = torch.full_like(model.weight, world.rank)
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.synchronize()
    optimizer.step()
    assert optimizer.master_parameters()[0][0, 0] == 1 - (world.size - 1) / 2


def case_a_copied_optimizer_trains_the_copied_model(world: World) -> None:
    model = build_network()
    optimizer = wrap_with_masters(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    copied_model, copied = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    copied_model(torch.ones(2, 8).half() * world.rank).float().sum().backward()
    copied.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not torch.equal(before[-1], list(copied_model.parameters())[-1])
    assert are_equal_on_all_ranks(list(copied_model.parameters()))
