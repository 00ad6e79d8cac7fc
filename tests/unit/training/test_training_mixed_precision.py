"""Master weights, alone and inside DistributedOptimizer, with torch's own GradScaler, schedulers and clipping."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import topkube
from topkube.errors import ArgumentError, TrainingError
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.mixed_precision import MasterWeights

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
SCALE = 2.0**12
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


class Mixed(nn.Module):
    """16-bit weights and a wide float32 bias; the test chooses the gradients: the loss is a weighted sum."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(9, 7).to(dtype))
        self.second = nn.Parameter(torch.randn(4).to(dtype))
        self.wide = nn.Parameter(torch.randn(3))

    def forward(self, step: int) -> torch.Tensor:
        """Return a loss whose gradients are the same in any precision: powers of two times a random sign."""
        torch.manual_seed(100 + step)
        signs = [torch.randn(p.shape).sign() * 2.0 ** torch.randint(-6, 3, p.shape) for p in self.parameters()]
        return sum((p.float() * sign).sum() for p, sign in zip(self.parameters(), signs, strict=True))


def train_reference(make: Callable[[Any], torch.optim.Optimizer], steps: int, norm: float | None) -> list[torch.Tensor]:
    """Train the same model in float64 without a loss scale. Return its parameters."""
    model = Mixed()
    wide = [nn.Parameter(p.detach().double()) for p in model.parameters()]
    optimizer = make(wide)
    for step in range(steps):
        model.zero_grad()
        model(step).backward()
        for source, target in zip(model.parameters(), wide, strict=True):
            target.grad = source.grad.double()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(wide, norm)
        optimizer.step()
    return [p.detach() for p in wide]


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_grad_scaler_trains_masters_as_float64_trains(
    make: Callable[[Any], torch.optim.Optimizer], clips: bool, is_distributed: bool
) -> None:
    topkube.init()
    model = Mixed()
    optimizer: Any = MasterWeights(make(model.parameters()))
    if is_distributed:
        optimizer = topkube.DistributedOptimizer(optimizer, model.named_parameters(), aggregation="dense")
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(step)).backward()
        if clips:
            scaler.unscale_(optimizer)
            if is_distributed:
                unclipped = torch.stack([p.grad.norm() for p in optimizer.master_parameters()]).norm()
                assert optimizer.clip_grad_norm_(0.5) == pytest.approx(float(unclipped))
            else:
                torch.nn.utils.clip_grad_norm_(optimizer.master_parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == SCALE
    expected = train_reference(make, 4, 0.5 if clips else None)
    for actual, reference in zip(optimizer.master_parameters(), expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), reference, rtol=2e-6, atol=1e-6)
    for parameter, master in zip(model.parameters(), optimizer.master_parameters(), strict=True):
        assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize("name", ["fused adamw", "fused sgd"])
def test_a_grad_scaler_reaches_a_fused_optimizer_through_the_wrapper(name: str) -> None:
    """A float32 model: the scale must not stay in the gradients."""
    topkube.init()
    finished = []
    for is_distributed in (False, True):
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        optimizer = MAKERS[name](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=is_distributed)
        if is_distributed:
            optimizer = topkube.DistributedOptimizer(optimizer, model.named_parameters(), aggregation="dense")
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            scaler.scale(model(torch.randn(4, 5)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        finished.append([p.detach().clone() for p in model.parameters()])
    for plain, distributed in zip(*finished, strict=True):
        torch.testing.assert_close(distributed, plain, rtol=1e-5, atol=1e-6)


def test_an_overflow_skips_the_step_and_lowers_the_scale() -> None:
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # beyond float16
    before = [p.detach().clone() for p in optimizer.master_parameters()]
    scaler.scale(model(0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**23
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.master_parameters(), strict=True))
    optimizer.zero_grad()
    scaler.update(SCALE)
    scaler.scale(model(0)).backward()
    scaler.step(optimizer)
    assert not torch.equal(before[0], optimizer.master_parameters()[0])


def test_clipping_16_bit_gradients_after_unscaling_is_refused_with_the_line_to_write() -> None:
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(0)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.raises(TrainingError, match=r"clip_grad_norm_\(optimizer.master_parameters\(\), max_norm\)"):
        scaler.step(optimizer)


def test_clipping_16_bit_gradients_without_a_scaler_takes_effect_even_if_groups_were_read_before() -> None:
    for reads in (False, True):
        model = Mixed()
        optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
        before = optimizer.master_parameters()[0].detach().clone()
        model(0).backward()
        if reads:
            assert optimizer.param_groups[0]["lr"] == 1.0
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.25)
        optimizer.step()
        assert (before - optimizer.master_parameters()[0]).abs().max() == 0.25


def test_gradients_accumulate_over_micro_batches() -> None:
    for reads in (False, True):
        model = Mixed()
        optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.5))
        before = [p.detach().clone() for p in optimizer.master_parameters()]
        for step in range(3):
            model(step).backward()
            assert not reads or optimizer.param_groups
        optimizer.step()
        for parameter, old, new in zip(model.parameters(), before, optimizer.master_parameters(), strict=True):
            torch.testing.assert_close(new, old - 0.5 * parameter.grad.float())


@pytest.mark.parametrize("zero", ["to none", "in place", "the model's"])
def test_zeroed_gradients_do_not_come_back(zero: str) -> None:
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.5))
    model(0).backward()
    optimizer.step()
    after = [p.detach().clone() for p in optimizer.master_parameters()]
    if zero == "the model's":
        model.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=zero == "to none")
    masters = optimizer.master_parameters()
    assert all(p.grad is None or not p.grad.any() for p in [*model.parameters(), *masters])
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(after, optimizer.master_parameters(), strict=True))
    model(1).backward()
    optimizer.step()
    assert not torch.equal(after[0], optimizer.master_parameters()[0])


def test_param_groups_are_those_of_the_wrapped_optimizer() -> None:
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.inner.param_groups[0]["lr"] == 0.25
    assert [id(p) for p in optimizer.exchanged_parameters()] == [id(p) for p in model.parameters()]
    late = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer.add_param_group({"params": late, "lr": 1.0})
    late.grad = torch.full_like(late, 0.5)
    optimizer.step()
    assert torch.equal(late, torch.full_like(late, 0.5))


def test_weights_that_the_script_writes_reach_the_masters() -> None:
    """The script may clamp or broadcast weights, or load a model. The next step must not undo this."""
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.0))
    small = model.first.abs() < 0.5
    precise = optimizer.master_parameters()[0].detach().add(1e-6).clone()
    with torch.no_grad():
        optimizer.master_parameters()[0].copy_(precise)
        model.first.clamp_(-0.5, 0.5)
    model(0).backward()
    optimizer.step()
    assert model.first.abs().max() <= 0.5
    assert torch.equal(optimizer.master_parameters()[0][small], precise[small])


WRITERS: dict[str, Callable[[torch.Tensor], object]] = {
    "clamp_": lambda weight: weight.data.clamp_(-0.5, 0.5),
    "a new tensor": lambda weight: setattr(weight, "data", weight.data.clamp(-0.5, 0.5)),
    "copy_": lambda weight: weight.data.copy_(weight.data.clamp(-0.5, 0.5)),
    "vector_to_parameters": lambda weight: torch.nn.utils.vector_to_parameters(
        weight.detach().clamp(-0.5, 0.5).flatten(), [weight]
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_weights_that_are_written_through_data_reach_the_masters(
    write: Callable[[torch.Tensor], object], device: str
) -> None:
    """torch does not raise the version of such a tensor."""
    model = Mixed().to(device)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1e-6))
    for _ in range(3):  # weights are clipped in every step, as for WGAN
        precise = optimizer.master_parameters()[0].detach().clone()
        inside = model.first.abs() < 0.5
        write(model.first)
        model.first.grad = torch.ones_like(model.first)
        optimizer.step()
        master = optimizer.master_parameters()[0]
        assert model.first.abs().max() <= 0.5
        torch.testing.assert_close(master[inside], precise[inside] - 1e-6, rtol=0, atol=1.5e-7)


def test_masters_that_are_written_through_data_keep_what_was_written() -> None:
    """Weight decay by hand: each change is smaller than the precision of the 16-bit weights."""
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.0))
    master, before = optimizer.master_parameters()[0], model.first.detach().float()
    for _ in range(20):
        master.data.mul_(1 - 1e-4)
        model.first.grad = torch.ones_like(model.first)
        optimizer.step()
    torch.testing.assert_close(master.detach(), before * (1 - 1e-4) ** 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reads", [False, True])
def test_16_bit_gradients_that_are_written_through_data_take_effect(reads: bool, device: str) -> None:
    model = Mixed().to(device)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        before = optimizer.master_parameters()[0].detach().clone()
        model.first.grad = torch.full_like(model.first, 1.0 + step)
        if reads:
            assert optimizer.param_groups[0]["lr"] == 1.0
        model.first.grad.data.neg_()  # the norm stays
        if reads:
            assert (optimizer.master_parameters()[0].grad == -1 - step).all()
        optimizer.step()
        assert torch.equal(optimizer.master_parameters()[0], before + 1 + step)
    model.first.grad.data.mul_(3)  # after a step has used it
    optimizer.step()
    assert torch.equal(optimizer.master_parameters()[0], before + 2 + 6)


def test_writing_16_bit_gradients_through_data_after_unscaling_is_refused() -> None:
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(0)).backward()
    scaler.unscale_(optimizer)
    model.second.grad = None  # not used in this step: allowed
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(1)).backward()
    scaler.unscale_(optimizer)
    model.first.grad.data.clamp_(-1.0, 1.0)
    with pytest.raises(TrainingError, match=r"clip the masters"):
        scaler.step(optimizer)


def test_a_copy_of_an_optimizer_belongs_to_the_copied_model() -> None:
    model = Mixed()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # replaces optimizer.step
    model(0).backward()
    optimizer.step()
    for copied in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        other_model, other = copied
        before = [p.detach().clone() for p in model.parameters()]
        other.zero_grad()
        other_model(1).backward()
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert not torch.equal(before[0], other_model.first)
        assert torch.equal(other_model.first, other.master_parameters()[0].half())


def build_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 3, bias=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_keep_more_bits_than_16_bit_weights(device: str, dtype: torch.dtype) -> None:
    """Updates too small for the 16-bit weight add up in the master, as in float32."""
    weight = nn.Parameter(torch.ones(4, 4, device=device, dtype=dtype))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-4))
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.full((4, 4), 0.9, device=device)
    torch.testing.assert_close(weight.float(), expected.to(dtype).float(), rtol=0, atol=float(torch.finfo(dtype).eps))
    plain = torch.ones((), dtype=dtype)
    assert plain - torch.tensor(1e-4).to(dtype) == plain  # without masters, a step changes nothing


def test_masters_take_the_steps_of_a_float32_model() -> None:
    narrow, wide = build_network().bfloat16(), build_network().bfloat16().float()
    masters = MasterWeights(LARS(narrow.parameters(), lr=0.5, trust=0.02))
    plain = LARS(wide.parameters(), lr=0.5, trust=0.02)
    for step in range(5):
        for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
            torch.manual_seed(step)
            a.grad = torch.randn(a.shape).bfloat16()
            b.grad = a.grad.float()
        masters.step()
        plain.step()
    for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())


def test_masters_work_inside_a_distributed_optimizer_with_a_scheduler_and_a_checkpoint() -> None:
    topkube.init()
    finished = []
    for interrupted in (False, True):
        model = build_network().bfloat16()

        def build_optimizer(model: nn.Module = model) -> Any:
            masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            return topkube.DistributedOptimizer(masters, model.named_parameters(), aggregation="dense")

        optimizer = build_optimizer()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for step in range(6):
            torch.manual_seed(step)
            model(torch.randn(5, 7).bfloat16()).float().square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if interrupted and step == 2:
                saved, counted = copy.deepcopy(optimizer.state_dict()), schedule.state_dict()
                optimizer.unwrap()
                optimizer = build_optimizer()
                optimizer.load_state_dict(saved)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
                schedule.load_state_dict(counted)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
        finished.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finished, strict=True))


def test_masters_after_the_first_step_are_refused() -> None:
    model = build_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 7)).square().mean().backward()
    optimizer.step()
    with pytest.raises(ArgumentError, match="before its first step"):
        MasterWeights(optimizer)
