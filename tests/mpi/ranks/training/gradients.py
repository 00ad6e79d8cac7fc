"""Gradients of several ranks: equal to those of one process, complete, and steps count on all ranks or on none."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import (
    Optimizers,
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    build_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    sum_residuals,
    take_own_part,
)
from topkube.errors import TrainingError
from topkube.training.exchange.buckets import fusion
from topkube.world import World


def compare_with_one_process(make: Optimizers, clip: bool = True, **options: object) -> None:
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model, make, **options), make(reference.parameters())
    for step in range(12):
        x, y = draw_samples(8 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        for network, each_optimizer in ((model, optimizer), (reference, plain)):
            if clip:
                nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_close(model, reference)
    assert are_equal_on_all_ranks(copy_weights(model))


def case_dense_equals_one_process(world: World) -> None:
    compare_with_one_process(build_sgd)


def case_dense_equals_one_process_with_adamw(world: World) -> None:
    compare_with_one_process(lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4))


def case_dense_equals_one_process_with_adagrad(world: World) -> None:
    compare_with_one_process(lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4))


def case_hitopk_that_sends_all_equals_one_process(world: World) -> None:
    compare_with_one_process(build_sgd, aggregation="hitopk", density=1.0)


def case_naive_that_sends_all_equals_one_process(world: World) -> None:
    compare_with_one_process(build_sgd, aggregation="naive", density=1.0)


def case_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(world: World) -> None:
    for name in ("hitopk", "dense"):
        model = build_network()
        optimizer = build_optimizer(model, aggregation=name, density=0.05)
        for step in range(6):
            x, y = draw_samples(8 * topkube.size(), step)
            before = copy_weights(model)
            residuals = copy.deepcopy(optimizer.state_dict()["topkube"]["residuals"]["pieces"])
            loss = compute_loss(model, take_own_part(x), take_own_part(y))
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
        assert are_equal_on_all_ranks(copy_weights(model))


def case_error_feedback_loses_nothing(world: World) -> None:
    """Plain SGD with rate 1: the change of the weights plus all residuals is the sum of all mean gradients."""
    for wire in ("fp32", "bf16"):
        model = build_network()
        optimizer = build_optimizer(
            model, lambda p: torch.optim.SGD(p, lr=1.0), aggregation="hitopk", density=0.02, wire=wire
        )
        start, expected = copy_weights(model), [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for step in range(10):
            x, y = draw_samples(8 * topkube.size(), step)
            for total, gradient in zip(
                expected, torch.autograd.grad(0.01 * compute_loss(model, x, y), list(model.parameters())), strict=True
            ):
                total += gradient
            (0.01 * compute_loss(model, take_own_part(x), take_own_part(y))).backward()
            optimizer.step()
            optimizer.zero_grad()
        owed = sum_residuals(optimizer, model)
        assert any(value.abs().sum() > 0 for value in owed.values())
        for (name, parameter), first, total in zip(model.named_parameters(), start, expected, strict=True):
            paid = (first - parameter).double().detach()
            torch.testing.assert_close(paid + owed[name], total, rtol=1e-4, atol=2e-6)


def case_no_sync_accumulates(world: World) -> None:
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    for step in range(3):
        for micro in range(3):
            x, y = draw_samples(4 * topkube.size(), 10 * step + micro)
            with contextlib.nullcontext() if micro == 2 else optimizer.no_sync():
                compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
            assert optimizer.accumulating == (micro < 2)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


def case_a_step_without_exchange_is_refused(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    with optimizer.no_sync():
        compute_loss(model, *draw_samples(4)).backward()
    with pytest.raises(TrainingError, match="no_sync"):
        optimizer.step()


def case_several_backward_passes_add_up(world: World) -> None:
    """Each backward exchanges only what is new, also if a backward without exchange is between them."""
    for name in ("dense", "hitopk"):
        model, reference = build_network(), build_network()
        optimizer = build_optimizer(model, aggregation=name, density=1.0)
        for micro, local in enumerate((False, False, True, False)):
            x, y = draw_samples(4 * topkube.size(), micro)
            with optimizer.no_sync() if local else contextlib.nullcontext():
                compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def case_gradients_that_are_zeroed_in_place_start_again(world: World) -> None:
    for zero in ("optimizer", "model"):
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
        for step in range(4):
            x, y = draw_samples(4 * topkube.size(), step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
            optimizer.step()
            plain.step()
            (optimizer if zero == "optimizer" else model).zero_grad(set_to_none=False)
            plain.zero_grad(set_to_none=False)
        assert_close(model, reference)


def case_a_scaler_backs_off_on_all_ranks(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(4):
        x, y = draw_samples(4 * topkube.size(), step)
        loss = compute_loss(model, take_own_part(x), take_own_part(y))
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
    assert are_equal_on_all_ranks(copy_weights(model))


def case_sixteen_bit_parameters_train(world: World) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, reference = build_network().to(dtype), build_network().to(dtype)
        optimizer, plain = build_optimizer(model, aggregation="hitopk", density=1.0), build_sgd(reference.parameters())
        for step in range(4):
            x, y = (part.to(dtype) for part in draw_samples(8 * topkube.size(), step))
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad()
        assert_close(model, reference, tolerance=0.06)
        assert are_equal_on_all_ranks([p.view(torch.int16) for p in copy_weights(model)])


def case_buckets_of_a_state_stay_as_they_are(world: World) -> None:
    """A run that resumes has the buckets of its state, even if this version of TopKube would plan other buckets."""
    x, y = draw_samples(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "LEAST_BUCKET_BYTES", 2048)
        patch.setattr(fusion, "BUCKET_SECONDS", 0.0)
        model = build_network()
        first = build_optimizer(model, bucket_bytes=None)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        state = first.state_dict()
        first.unwrap()
    planned = state["topkube"]["buckets"]
    assert len(planned) > 1
    assert sorted(name for names in planned for name in names) == sorted(dict(model.named_parameters()))
    for options, is_kept in (({"bucket_bytes": None}, True), ({"bucket_bytes": 1 << 20}, False)):
        other_model = build_network()
        other = build_optimizer(other_model, **options)
        if world.rank == 0:  # the other ranks adopt the buckets
            other.load_state_dict(state)
        compute_loss(other_model, take_own_part(x), take_own_part(y)).backward()
        assert (other.state_dict()["topkube"]["buckets"] == planned) is is_kept
        other.unwrap()


def case_buckets_are_sent_during_backward(world: World) -> None:
    """Buckets are sent from the second step on, because the first backward finds the order of the gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "LEAST_BUCKET_BYTES", 2048)
        patch.setattr(fusion, "BUCKET_SECONDS", 0.0)
        model, (x, y) = build_network(), draw_samples(8)
        optimizer = build_optimizer(model, bucket_bytes=None)
        handed_over: list[int] = []
        model[0].weight.register_hook(lambda _: handed_over.append(len(optimizer._backward.queue.futures)))
        for _ in range(2):
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handed_over == [0, 1]
        optimizer.unwrap()


def case_dense_gradients_of_16_bits_train(world: World) -> None:
    """Gradients of large tensors are rounded between nodes; those of small tensors are not."""
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model, dense_wire="bf16"), build_sgd(reference.parameters())
    for step in range(6):
        x, y = draw_samples(8 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        compute_loss(reference, x, y).backward()
        if step == 0:
            for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert a.grad is not None
                assert b.grad is not None
                torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=2**-7 * float(b.grad.abs().max()))
                is_exact = torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)
                assert is_exact == (a.ndim == 1 or a.numel() < 1024 or world.nodes == 1), name
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert are_equal_on_all_ranks(copy_weights(model))
    assert_close(model, reference, tolerance=0.01)
    optimizer.unwrap()


def case_steps_that_are_skipped_for_ever_are_reported(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    output = io.StringIO()

    def train(steps: range, is_bad: bool) -> None:
        for step in steps:
            x, y = draw_samples(4 * topkube.size(), step)
            loss = compute_loss(model, take_own_part(x), take_own_part(y))
            (loss * torch.nan if is_bad and world.rank == 0 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    with contextlib.redirect_stderr(output):
        train(range(2), is_bad=True)
        train(range(2, 3), is_bad=False)
        train(range(3, 18), is_bad=True)
        assert not output.getvalue()
        train(range(18, 20), is_bad=True)
    assert output.getvalue().count("16 steps in a row were skipped") == (world.rank == 0)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan if world.rank == world.size - 1 else 1.0
    with pytest.raises(TrainingError, match=rf"32 steps in a row .*: weights of rank {world.size - 1} are NaN"):
        train(range(20, 40), is_bad=False)
    assert optimizer.skipped_steps == 34
    optimizer._backward.end()
