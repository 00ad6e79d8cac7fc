"""Residuals when gradients are discarded, scaled, frozen or removed: delivered and remaining parts add up to the true
gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import (
    SPARSE,
    build_network,
    build_optimizer,
    build_plain_sgd,
    check_conservation,
    compute_loss,
    draw_samples,
    shrink,
    sum_residuals,
    take_own_part,
)
from topkube.errors import TrainingError
from topkube.world import World


def case_discarded_gradients_leave_no_residual(world: World) -> None:
    """Gradients are discarded by zero_grad() of the optimizer or of the model, in place or not, and by hand."""

    def remove_by_hand(model: nn.Module, _: object) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    ways: list[Callable[[nn.Module, topkube.DistributedOptimizer], None]] = [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        remove_by_hand,
    ]
    for discard in ways:
        model = build_network()
        optimizer = build_optimizer(model, build_plain_sgd, **SPARSE)
        with check_conservation(model, optimizer) as count:
            for step in range(4):
                x, y = draw_samples(8 * topkube.size(), step)
                (100 * compute_loss(model, take_own_part(x), take_own_part(y))).backward()
                discard(model, optimizer)
                count(shrink(compute_loss(model, x, y)))
                shrink(compute_loss(model, take_own_part(x), take_own_part(y))).backward()
                optimizer.step()
                optimizer.zero_grad()


def case_discarded_gradients_of_one_layer_leave_no_residual(world: World) -> None:
    """The gradients of one layer are set to None after backward; those of the other layers stay."""
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, bucket_bytes=1 << 20, **SPARSE)
    with check_conservation(model, optimizer) as count:
        for step in range(4):
            x, y = draw_samples(8 * topkube.size(), step)
            shrink(compute_loss(model, take_own_part(x), take_own_part(y))).backward()
            model[3].zero_grad()
            with torch.no_grad():
                frozen = copy.deepcopy(model[3])
            layer, model[3] = model[3], frozen.requires_grad_(False)
            loss = shrink(compute_loss(model, x, y))
            model[3] = layer
            x2, y2 = draw_samples(8 * topkube.size(), 50 + step)
            count(loss + shrink(compute_loss(model, x2, y2)))
            shrink(compute_loss(model, take_own_part(x2), take_own_part(y2))).backward()
            optimizer.step()
            optimizer.zero_grad()


def case_a_spike_that_the_script_skips_owes_nothing(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, **SPARSE)
    with check_conservation(model, optimizer) as count:
        for step in range(6):
            x, y = draw_samples(8 * topkube.size(), step)
            factor = 1000.0 if step % 2 else 0.01
            (factor * compute_loss(model, take_own_part(x), take_own_part(y))).backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1e9) < 50:
                count(factor * compute_loss(model, x, y))
                optimizer.step()
            optimizer.zero_grad()


def case_sharpness_aware_steps_use_the_second_gradient_alone(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, **SPARSE)
    with check_conservation(model, optimizer, tolerance=1e-4) as count:
        for step in range(4):
            x, y = draw_samples(8 * topkube.size(), step)
            shrink(compute_loss(model, take_own_part(x), take_own_part(y))).backward()
            moves = [0.1 * p.grad for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            shrink(compute_loss(model, take_own_part(x), take_own_part(y))).backward()
            count(shrink(compute_loss(model, x, y)))
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()


def case_a_micro_batch_that_is_not_finite_discards_its_whole_step(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, **SPARSE)
    with check_conservation(model, optimizer) as count:
        for step in range(4):
            for micro in range(3):
                x, y = draw_samples(4 * topkube.size(), 10 * step + micro)
                loss = shrink(compute_loss(model, take_own_part(x), take_own_part(y)))
                if step == 2 and micro == 1 and topkube.rank() == 0:
                    loss = loss * torch.nan
                loss.backward()
                if step != 2:
                    count(shrink(compute_loss(model, x, y)))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 1


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(24, 48), nn.Linear(48, 32)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return shrink(self.critic(torch.tanh(self.generator(x))).square().mean())


def case_gradients_that_another_optimizers_loss_left_leave_no_residual(world: World) -> None:
    """The generator's loss leaves gradients in the critic, which the critic's zero_grad discards."""
    model = Adversaries()
    options: dict[str, object] = {"warmup_steps": 0, "wire": "fp32", **SPARSE}

    def wrap(part: nn.Module) -> topkube.DistributedOptimizer:
        return topkube.DistributedOptimizer(build_plain_sgd(part.parameters()), part.named_parameters(), **options)

    generator, critic = wrap(model.generator), wrap(model.critic)
    for optimizer, part, sign in ((generator, model.generator, 1.0), (critic, model.critic, -1.0)):
        with check_conservation(part, optimizer) as count:
            for step in range(4):
                x, _ = draw_samples(8 * topkube.size(), step)
                (100 * model.score(take_own_part(x))).backward()  # for a step of the other optimizer, discarded here
                optimizer.zero_grad()
                count(sign * model.score(x))
                (sign * model.score(take_own_part(x))).backward()
                optimizer.step()
                optimizer.zero_grad()
    generator.zero_grad()
    critic.zero_grad()


def case_residuals_are_in_units_of_true_gradients(world: World) -> None:
    """A scaler halves and doubles its factor, and residuals keep their size."""
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, **SPARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    with check_conservation(model, optimizer) as count:
        for step in range(8):
            x, y = draw_samples(8 * topkube.size(), step)
            loss = shrink(compute_loss(model, take_own_part(x), take_own_part(y)))
            overflows = step == 3
            scaler.scale(loss * torch.inf if overflows and topkube.rank() == 0 else loss).backward()
            if not overflows:
                count(shrink(compute_loss(model, x, y)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() != 2.0**12
    assert any(value.abs().sum() > 0 for value in sum_residuals(optimizer, model).values())


def case_gradients_that_are_removed_before_a_step_owe_nothing(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, bucket_bytes=1 << 20, **SPARSE)
    shrink(compute_loss(model, *draw_samples(8))).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = sum_residuals(optimizer, model)
    for removed in (["3.weight", "3.bias"], [name for name, _ in model.named_parameters()]):
        (100 * compute_loss(model, *draw_samples(8, 2))).backward()
        for name, parameter in model.named_parameters():
            if name in removed:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(sum_residuals(optimizer, model)["3.weight"], before["3.weight"])


def case_scaled_gradients_that_are_exchanged_on_demand_lose_nothing(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, **SPARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1)
    with check_conservation(model, optimizer) as count:
        for step in range(3):
            x, y = draw_samples(8 * topkube.size(), step)
            with optimizer.no_sync():
                scaler.scale(shrink(compute_loss(model, take_own_part(x), take_own_part(y)))).backward()
            count(shrink(compute_loss(model, x, y)))
            optimizer.synchronize()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def case_two_scalers_in_one_backward_are_refused(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    first, second = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4.0, 8.0))
    loss = compute_loss(model, *draw_samples(4))
    with pytest.raises(TrainingError, match=r"scaled by [48] and by [48]"):
        (first.scale(loss) + second.scale(compute_loss(model, *draw_samples(4)))).backward()
    optimizer.unwrap()


def case_the_residual_of_a_frozen_layer_waits(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, build_plain_sgd, bucket_bytes=1 << 20, **SPARSE)
    with check_conservation(model, optimizer) as count:
        for step in range(8):
            model[3].requires_grad_(step % 2 == 0)
            x, y = draw_samples(8 * topkube.size(), step)
            loss = shrink(compute_loss(model, take_own_part(x), take_own_part(y)))
            model[3].requires_grad_(True)  # only for the reference
            whole = shrink(compute_loss(model, x, y))
            gradients = torch.autograd.grad(whole, list(model.parameters()))
            model[3].requires_grad_(step % 2 == 0)
            trained_gradients = [g for p, g in zip(model.parameters(), gradients, strict=True) if p.requires_grad]
            trained = [p for p in model.parameters() if p.requires_grad]
            model[3].requires_grad_(True)
            count(sum(((p * g).sum() for p, g in zip(trained, trained_gradients, strict=True)), torch.zeros(())))
            model[3].requires_grad_(step % 2 == 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
