"""What training must do on several ranks. `test_training.py` starts this file under mpiexec, once per world, for all
cases.

Most cases train twice: distributed, and in this process alone with the union of all ranks' batches; both must give
one result.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topkube
from topkube.errors import TrainingError
from topkube.settings import Settings

CASES: dict[str, Callable[[], None]] = {}
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def network() -> nn.Module:
    """Large and small tensors, several buckets of 8 KB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def distributed(model: nn.Module, make: Optimizers = sgd, **options: object) -> topkube.DistributedOptimizer:
    settings: dict[str, object] = {"aggregation": "dense", "warmup_steps": 0, "wire": "fp32", "bucket_bytes": 8192}
    return topkube.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **{**settings, **options})


def samples(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 24, generator=generator)
    return x, x[:, :1] * 2 - x[:, 1:2]


def mine(x: torch.Tensor) -> torch.Tensor:
    return x[topkube.rank() :: topkube.size()]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def assert_close(model: nn.Module, reference: nn.Module, tolerance: float = 2e-5) -> None:
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_on_all_ranks(tensors: list[torch.Tensor]) -> bool:
    everyone = topkube.world.current().comm.allgather([tensor.detach().numpy().tobytes() for tensor in tensors])
    return all(other == everyone[0] for other in everyone)


def residual_sum(optimizer: topkube.DistributedOptimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """What all ranks together still owe to every parameter."""
    return sum_pieces(optimizer.state_dict()["topkube"]["residuals"]["pieces"], model)


def sum_pieces(pieces: dict[str, list[tuple[int, torch.Tensor]]], model: nn.Module) -> dict[str, torch.Tensor]:
    totals = {}
    for name, parameter in model.named_parameters():
        full = np.zeros(parameter.numel())
        for start, values in pieces.get(name, []):
            full[start : start + values.numel()] += values.double().numpy()
        totals[name] = torch.from_numpy(topkube.world.current().comm.allreduce(full)).view_as(parameter)
    return totals


def equals_one_process(make: Optimizers, clip: bool = True, **options: object) -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model, make, **options), make(reference.parameters())
    for step in range(12):
        x, y = samples(8 * topkube.size(), step)
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        for network_, chosen in ((model, optimizer), (reference, plain)):
            if clip:
                nn.utils.clip_grad_norm_(network_.parameters(), 0.5)
            chosen.step()
            chosen.zero_grad()
    assert_close(model, reference)
    assert same_on_all_ranks(weights(model))


@case
def dense_equals_one_process() -> None:
    equals_one_process(sgd)


@case
def dense_equals_one_process_with_adamw() -> None:
    equals_one_process(lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4))


@case
def dense_equals_one_process_with_adagrad() -> None:
    equals_one_process(lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4))


@case
def hitopk_that_sends_all_equals_one_process() -> None:
    equals_one_process(sgd, aggregation="hitopk", density=1.0)


@case
def naive_that_sends_all_equals_one_process() -> None:
    equals_one_process(sgd, aggregation="naive", density=1.0)


@case
def a_step_that_is_not_finite_on_one_rank_is_skipped_by_all() -> None:
    for name in ("hitopk", "dense"):
        model = network()
        optimizer = distributed(model, aggregation=name, density=0.05)
        for step in range(6):
            x, y = samples(8 * topkube.size(), step)
            before = weights(model)
            residuals = copy.deepcopy(optimizer.state_dict()["topkube"]["residuals"]["pieces"])
            loss = loss_of(model, mine(x), mine(y))
            poisoned = step == 3
            if poisoned and topkube.rank() == topkube.size() - 1:
                loss = loss * torch.nan
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
            if poisoned:
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                assert residuals.keys() == after.keys()
                for key in residuals:
                    for (_, a), (_, b) in zip(residuals[key], after[key], strict=True):
                        assert torch.equal(a, b), key
            else:
                assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert optimizer.skipped_steps == (step >= 3)
        assert optimizer.steps == 5
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert same_on_all_ranks(weights(model))


@case
def error_feedback_loses_nothing() -> None:
    """Plain SGD with rate 1: what was subtracted, and what is still owed, is the sum of all mean gradients."""
    for wire in ("fp32", "bf16"):
        model = network()
        optimizer = distributed(
            model, lambda p: torch.optim.SGD(p, lr=1.0), aggregation="hitopk", density=0.02, wire=wire
        )
        start, wanted = weights(model), [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for step in range(10):
            x, y = samples(8 * topkube.size(), step)
            for total, gradient in zip(
                wanted, torch.autograd.grad(0.01 * loss_of(model, x, y), list(model.parameters())), strict=True
            ):
                total += gradient
            (0.01 * loss_of(model, mine(x), mine(y))).backward()
            optimizer.step()
            optimizer.zero_grad()
        owed = residual_sum(optimizer, model)
        assert any(value.abs().sum() > 0 for value in owed.values())
        for (name, parameter), first, total in zip(model.named_parameters(), start, wanted, strict=True):
            paid = (first - parameter).double().detach()
            torch.testing.assert_close(paid + owed[name], total, rtol=1e-4, atol=2e-6)


@case
def no_sync_accumulates() -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        for micro in range(3):
            x, y = samples(4 * topkube.size(), 10 * step + micro)
            with contextlib.nullcontext() if micro == 2 else optimizer.no_sync():
                loss_of(model, mine(x), mine(y)).backward()
            loss_of(reference, x, y).backward()
            assert optimizer.accumulating == (micro < 2)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


@case
def a_step_without_exchange_is_refused() -> None:
    model = network()
    optimizer = distributed(model)
    with optimizer.no_sync():
        loss_of(model, *samples(4)).backward()
    with pytest.raises(TrainingError, match="no_sync"):
        optimizer.step()


@case
def several_backward_passes_add_up() -> None:
    """Each exchanges only what is new; with no_sync between, too."""
    for name in ("dense", "hitopk"):
        model, reference = network(), network()
        optimizer = distributed(model, aggregation=name, density=1.0)
        for micro, local in enumerate((False, False, True, False)):
            x, y = samples(4 * topkube.size(), micro)
            with optimizer.no_sync() if local else contextlib.nullcontext():
                loss_of(model, mine(x), mine(y)).backward()
            loss_of(reference, x, y).backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@case
def gradients_that_are_zeroed_in_place_start_again() -> None:
    for zero in ("optimizer", "model"):
        model, reference = network(), network()
        optimizer, plain = distributed(model), sgd(reference.parameters())
        for step in range(4):
            x, y = samples(4 * topkube.size(), step)
            loss_of(model, mine(x), mine(y)).backward()
            loss_of(reference, x, y).backward()
            optimizer.step()
            plain.step()
            (optimizer if zero == "optimizer" else model).zero_grad(set_to_none=False)
            plain.zero_grad(set_to_none=False)
        assert_close(model, reference)


class Forked(nn.Module):
    """Three large layers, of which a forward uses those that are named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(24, 48) for _ in range(3))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum(getattr(self, name)(x).sum(1) for name in used.split())  # type: ignore[return-value]


@case
def unused_parameters_are_as_with_one_process() -> None:
    model, reference = Forked(), Forked()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        x, _ = samples(4 * topkube.size(), step)
        used = "first second" if topkube.rank() == 0 else "first"
        model(mine(x), used).mean().backward()
        share = len(mine(x)) / len(x)
        (reference(x, "first").mean()).backward()
        if topkube.rank() == 0:
            second = reference(mine(x), "second").mean() * share
        else:
            second = reference(x[0 :: topkube.size()], "second").mean() * share
        second.backward()
        assert model.third.weight.grad is None
        torch.testing.assert_close(model.second.weight.grad, reference.second.weight.grad, rtol=1e-5, atol=1e-6)
        for chosen in (optimizer, plain):
            chosen.step()
            chosen.zero_grad()
    assert_close(model, reference)
    assert same_on_all_ranks(weights(model))


@case
def an_unused_parameter_is_paid_what_its_residual_owes() -> None:
    model = Forked()
    optimizer = distributed(model, lambda p: torch.optim.SGD(p, lr=0.1), aggregation="hitopk", density=0.05)
    x, _ = samples(4 * topkube.size())
    model(mine(x), "first second").mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = residual_sum(optimizer, model)["second.weight"].abs().sum()
    assert before > 0
    for _ in range(30):
        model(mine(x), "first").mean().mul(1e-6).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert residual_sum(optimizer, model)["second.weight"].abs().sum() < before / 2


@case
def frozen_parameters_stay_and_thaw() -> None:
    model, reference = network(), network()
    for network_ in (model, reference):
        network_[0].requires_grad_(False)
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(6):
        if step == 2:  # thaw a layer that has never been exchanged, freeze one that has
            for network_ in (model, reference):
                network_[0].requires_grad_(True)
                network_[3].requires_grad_(False)
        x, y = samples(4 * topkube.size(), step)
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        if step == 2:
            assert model[3].weight.grad is None
        for chosen in (optimizer, plain):
            chosen.step()
            chosen.zero_grad()
    assert_close(model, reference)


@case
def uneven_batches_count_by_their_samples() -> None:
    """Ranks get batches of different sizes and numbers; one process gets their union."""
    rank, size = topkube.rank(), topkube.size()
    for name in ("dense", "hitopk"):
        model, reference = network(), network()
        optimizer, plain = distributed(model, aggregation=name, density=1.0), sgd(reference.parameters())
        sizes = [[5, 3, 2 + r, 4][: 4 - (r % 2)] for r in range(size)]  # odd ranks have a batch less
        everyone = [[samples(count, 100 * r + i) for i, count in enumerate(row)] for r, row in enumerate(sizes)]
        steps = 0
        for x, y in optimizer.join(everyone[rank]):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        assert steps == 4
        for step in range(4):
            parts = [row[step] for row in everyone if step < len(row)]
            loss_of(reference, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
            plain.step()
            plain.zero_grad()
        assert_close(model, reference)


@case
def a_script_can_announce_its_batches_itself() -> None:
    rank, size = topkube.rank(), topkube.size()
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    own = [samples(3 + rank, 10 * rank + i) for i in range(2 + (rank == 0))]
    step = 0
    while optimizer.batch(len(own[step][0]) if step < len(own) else 0):
        loss_of(model, *own[min(step, len(own) - 1)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    assert step == 3
    for i in range(3):
        parts = [samples(3 + r, 10 * r + i) for r in range(size) if i < 2 + (r == 0)]
        loss_of(reference, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


@case
def a_batch_of_weight_zero_cannot_spoil_a_step() -> None:
    model = network()
    optimizer = distributed(model)
    optimizer.batch(4 if topkube.rank() == 0 else 0)
    loss = loss_of(model, *samples(4))
    (loss if topkube.rank() == 0 else loss * torch.inf).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert optimizer.steps == 1


@case
def saved_state_goes_on_bit_for_bit() -> None:
    def train(model: nn.Module, optimizer: topkube.DistributedOptimizer, steps: Iterable[int]) -> None:
        for step in steps:
            x, y = samples(8 * topkube.size(), step)
            loss_of(model, mine(x), mine(y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    options = {"aggregation": "hitopk", "density": 0.03, "warmup_steps": 4, "wire": "bf16"}
    model = network()
    optimizer = distributed(model, **options)
    train(model, optimizer, range(7))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(7, 12))
    again = network()
    optimizer_again = distributed(again, **options)
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    assert optimizer_again.steps == 7
    train(again, optimizer_again, range(7, 12))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@case
def a_scaler_backs_off_on_all_ranks() -> None:
    model = network()
    optimizer = distributed(model, aggregation="hitopk", density=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(4):
        x, y = samples(4 * topkube.size(), step)
        loss = loss_of(model, mine(x), mine(y))
        if step == 1 and topkube.rank() == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**9], scales
    assert (optimizer.steps, optimizer.skipped_steps) == (3, 1)
    assert same_on_all_ranks(weights(model))


@case
def sixteen_bit_parameters_train() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, reference = network().to(dtype), network().to(dtype)
        optimizer, plain = distributed(model, aggregation="hitopk", density=1.0), sgd(reference.parameters())
        for step in range(4):
            x, y = (part.to(dtype) for part in samples(8 * topkube.size(), step))
            loss_of(model, mine(x), mine(y)).backward()
            loss_of(reference, x, y).backward()
            for chosen in (optimizer, plain):
                chosen.step()
                chosen.zero_grad()
        assert_close(model, reference, tolerance=0.06)
        assert same_on_all_ranks([p.view(torch.int16) for p in weights(model)])


@case
def broadcast_gives_weights_buffers_and_optimizer_state() -> None:
    torch.manual_seed(topkube.rank())
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model(torch.randn(4, 1, 5, 5) + topkube.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (topkube.rank() + 1))
    if topkube.rank() == 0:  # the others have no state yet
        model(torch.randn(4, 1, 5, 5)).sum().backward()
        optimizer.step()
    topkube.broadcast_parameters(model)
    topkube.broadcast_optimizer_state(optimizer)
    assert same_on_all_ranks(list(model.state_dict().values()))
    assert model[1].num_batches_tracked == 2
    state = optimizer.state_dict()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(state["state"]) == 4
    assert same_on_all_ranks([state["state"][i][key] for i in range(4) for key in ("exp_avg", "exp_avg_sq", "step")])


@case
def ranks_with_different_models_are_told() -> None:
    model = nn.Linear(24, 64 if topkube.rank() else 32)
    optimizer = distributed(model)
    with pytest.raises(TrainingError, match="different parameters"):
        model(samples(4)[0]).sum().backward()
    assert optimizer.steps == 0


@case
def the_sampler_deals_out_everything_once() -> None:
    sampler = topkube.data.DistributedSampler(range(23), seed=3)
    first = topkube.world.current().comm.allgather(list(sampler))
    assert sorted(itertools.chain(*first)) == list(range(23))
    assert len(first[topkube.rank()]) == len(sampler)
    order = [first[i % len(first)][i // len(first)] for i in range(23)]
    sampler.set_epoch(1)
    assert sorted(itertools.chain(*topkube.world.current().comm.allgather(list(sampler)))) == list(range(23))
    sampler.set_epoch(0)
    sampler.advance(9)
    rest = topkube.world.current().comm.allgather(list(sampler))
    assert [rest[i % len(rest)][i // len(rest)] for i in range(14)] == order[9:]


# ---- cases that need a directory; their names are given on the command line


def resumable(directory: str, steps: int, every: int = 4, stop_at: int | None = None) -> tuple[nn.Module, int]:
    """A run with dropout, uneven data and hitopk; saves to `directory`. Returns the model and the steps done here."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(24, 64), nn.Dropout(0.2), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))
    torch.manual_seed(topkube.rank())
    optimizer = distributed(model, aggregation="hitopk", density=0.05, warmup_steps=3, wire="bf16")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    dataset = TensorDataset(*samples(10 * topkube.size() - 1))
    sampler = topkube.data.DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=every, checkpoint_keep=2)
    done = 0
    with topkube.checkpointing(model, optimizer, sampler, settings=settings, scheduler=scheduler) as run:
        for x, y in run.progress(loader, total=steps):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
            if run.step + 1 == stop_at and topkube.rank() == topkube.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
    return model, done


def uninterrupted_and_interrupted_runs_are_equal(directory: str) -> None:
    whole, done = resumable(f"{directory}/whole", 14)
    assert done == 14
    kept = sorted(path.name for path in Path(directory, "whole").glob("*"))
    assert kept == ["step-00000012", "step-00000014"], kept
    with pytest.raises(SystemExit) as stop:
        resumable(f"{directory}/parts", 14, every=100, stop_at=6)
    assert stop.value.code == 128 + signal.SIGTERM
    [name] = [path.name for path in Path(directory, "parts").glob("*")]
    first = int(name.removeprefix("step-"))
    assert first in (6, 7), (
        name
    )  # the signal comes during step 6; it may be seen with the announcement of the next batch
    parts, done = resumable(f"{directory}/parts", 14)
    assert done == 14 - first
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def leave_residuals(directory: str) -> None:
    """Writes a checkpoint, and beside it what all ranks together owe."""
    model = network()
    optimizer = distributed(model, aggregation="hitopk", density=0.02)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=1000)
    x, y = samples(40)
    with topkube.checkpointing(model, optimizer, settings=settings) as run:
        for x_, y_ in run.progress([(x, y)] * 5):
            loss_of(model, x_, y_).backward()
            optimizer.step()
            optimizer.zero_grad()
    owed = residual_sum(optimizer, model)
    if topkube.rank() == 0:
        torch.save(owed, f"{directory}/owed.pt")


def take_up_residuals(directory: str) -> None:
    """Resumes in another world: the sum must stay, and training go on."""
    model = network()
    optimizer = distributed(model, aggregation="hitopk", density=0.02)
    with topkube.checkpointing(model, optimizer, settings=Settings(checkpoint_directory=directory)) as run:
        assert run.step == 5
        # An exchange of zeros cuts new shards; every rank keeps what it owns, and pays from it.
        before = weights(model)
        for group in optimizer.param_groups:
            group.update(lr=1.0, momentum=0.0, weight_decay=0.0)
        optimizer.inner.state.clear()
        (sum(parameter.sum() for parameter in model.parameters()) * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        owed, wanted = residual_sum(optimizer, model), torch.load(f"{directory}/owed.pt", weights_only=True)
        assert any(value.abs().sum() > 0 for value in wanted.values())
        for (name, parameter), first in zip(model.named_parameters(), before, strict=True):
            paid = (first - parameter).double().detach()
            torch.testing.assert_close(paid + owed[name], wanted[name], rtol=1e-4, atol=1e-6)


def main() -> None:
    topkube.init()
    torch.set_num_threads(1)
    world = topkube.world.current()
    report, chosen = Path(sys.argv[1]), sys.argv[2:]
    functions = {name: CASES[name] for name in chosen if name in CASES} if chosen else CASES
    if chosen and chosen[0] not in CASES:
        functions = {chosen[0]: functools.partial(globals()[chosen[0]], *chosen[1:])}
    for name, function in functions.items():
        try:
            function()
            problem = ""
        except BaseException:
            problem = f"rank {world.rank}: {traceback.format_exc()}"
        problems = [text for text in world.comm.allgather(problem) if text]
        if world.rank == 0:
            with report.open("a") as file:
                file.write(json.dumps({"case": name, "problems": problems}) + "\n")


if __name__ == "__main__":
    main()
