"""Where gradients of several ranks lie: in the memory of their bucket, or where autograd or the script put them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import (
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    build_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
)
from topkube.training.exchange.buckets import gradient_memory
from topkube.world import World


def move_gradients_from(patch: pytest.MonkeyPatch, size: int) -> None:
    """Move gradients of `size` bytes and more into the memory of their bucket. Smaller ones are copied."""
    patch.setattr(gradient_memory, "MOVED_BYTES", size)


MOVED_SIZES = (0, 8192, 1 << 20)
"""All gradients move; of the two large weights, one moves; none moves."""


def case_gradients_lie_in_the_memory_of_their_bucket(world: World) -> None:
    """The gradients of a bucket lie side by side, in the same memory in every step, also if the exchange compresses:
    nothing is copied for it. Small gradients share the bucket if the exchange is dense."""
    with pytest.MonkeyPatch.context() as patch:
        move_gradients_from(patch, 0)
        check_places_of_gradients(world)


def check_places_of_gradients(world: World) -> None:
    for algorithm in ("hitopk", "int8", "dense"):
        model = build_network()
        optimizer = build_optimizer(model, aggregation=algorithm, density=0.05, bucket_bytes=1 << 20)
        memories = []
        for step in range(4):
            x, y = draw_samples(8 * world.size, step)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            shares_bucket = [
                p for p in model.parameters() if algorithm == "dense" or (p.ndim > 1 and p.numel() >= 1024)
            ]
            gradients = sorted((p.grad for p in shares_bucket), key=torch.Tensor.data_ptr)
            memories.append([gradient.data_ptr() for gradient in gradients])
            for first, second in itertools.pairwise(gradients):
                assert step == 0 or second.data_ptr() == first.data_ptr() + 4 * first.numel(), algorithm
            del gradients, first, second
            optimizer.step()
            optimizer.zero_grad()
        assert memories[1] == memories[2] == memories[3], algorithm
        optimizer.unwrap()


def case_gradients_that_a_script_keeps_stay_as_they_are(world: World) -> None:
    """Gradients lie in memory that the next step uses again, unless the script still refers to them."""
    for size in MOVED_SIZES:
        model, (x, y) = build_network(), draw_samples(8 * topkube.size())
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        with pytest.MonkeyPatch.context() as patch:
            move_gradients_from(patch, size)
            optimizer = build_optimizer(model, bucket_bytes=None)
            for _ in range(4):
                compute_loss(model, take_own_part(x), take_own_part(y)).backward()
                for weight in (model[0].weight, model[3].weight):
                    assert weight.grad is not None
                    kept.append((weight.grad[0], weight.grad[0].clone()))
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(view, copy) for view, copy in kept), size
        optimizer.unwrap()


def case_gradients_in_shared_memory_equal_those_of_one_process(world: World) -> None:
    """Steps zero their gradients in place, set them to None, accumulate them, and assign them."""
    for size, aggregation in itertools.product(MOVED_SIZES, ("dense", "hitopk")):
        with pytest.MonkeyPatch.context() as patch:
            move_gradients_from(patch, size)
            compare_memory_with_one_process(aggregation)


def compare_memory_with_one_process(aggregation: str) -> None:
    model, reference = build_network(), build_network()
    optimizer = build_optimizer(model, aggregation=aggregation, density=1.0, bucket_bytes=None)
    plain = build_sgd(reference.parameters())
    for step, set_to_none in enumerate((True, False, False, True, True)):
        x, y = draw_samples(8 * topkube.size(), step)
        for _ in range(2 if step == 3 else 1):
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
        if step == 1:
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad = weight.grad.clone()
        optimizer.step()
        plain.step()
        optimizer.zero_grad(set_to_none)
        plain.zero_grad(set_to_none)
    assert_close(model, reference)
    assert are_equal_on_all_ranks(copy_weights(model))
    optimizer.unwrap()


class SharedGradients(nn.Module):
    """A model whose parameters get views of one tensor as gradients, in one bucket and in different buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.row = nn.Parameter(torch.randn(24, 64)), nn.Parameter(torch.randn(1, 24 * 64))
        self.vector, self.other = nn.Parameter(torch.randn(24 * 64)), nn.Parameter(torch.randn(64, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.matrix.view(-1) + self.row.view(-1) + self.vector.view(-1) + self.other.view(-1)
        return torch.tanh(x @ total.view(24, 64)).mean(1, keepdim=True)


def case_gradients_that_share_memory_equal_those_of_one_process(world: World) -> None:
    for size, aggregation in itertools.product(MOVED_SIZES, ("dense", "hitopk", "int8")):
        with pytest.MonkeyPatch.context() as patch:
            move_gradients_from(patch, size)
            model, reference = SharedGradients(), SharedGradients()
            optimizer = build_optimizer(model, aggregation=aggregation, density=1.0, bucket_bytes=1 << 14)
            for step in range(4):
                x, y = draw_samples(8 * topkube.size(), step)
                compute_loss(model, take_own_part(x), take_own_part(y)).backward()
                compute_loss(reference, x, y).backward()
                for own, other in zip(model.parameters(), reference.parameters(), strict=True):
                    assert own.grad is not None
                    assert other.grad is not None
                    own.grad *= 0.5  # changes nothing else
                    other.grad = 0.5 * other.grad
                assert_close_gradients(model, reference, 0.02 if aggregation == "int8" else 1e-4)
                optimizer.zero_grad()
                reference.zero_grad()
            optimizer.unwrap()


def case_a_script_may_assign_views_of_one_tensor_and_synchronize(world: World) -> None:
    """The means arrive in the memory that the script chose, also after a backward that exchanged nothing."""
    for size, aggregation in itertools.product(MOVED_SIZES, ("dense", "hitopk")):
        with pytest.MonkeyPatch.context() as patch:
            move_gradients_from(patch, size)
            model, reference = build_network(), build_network()
            optimizer = build_optimizer(model, aggregation=aggregation, density=1.0, bucket_bytes=1 << 20)
            plain = build_sgd(reference.parameters())
            for step in range(3):
                x, y = draw_samples(8 * topkube.size(), step)
                with optimizer.no_sync():
                    compute_loss(model, take_own_part(x), take_own_part(y)).backward()
                flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
                pieces = flat.split([p.numel() for p in model.parameters()])
                for parameter, piece in zip(model.parameters(), pieces, strict=True):
                    parameter.grad = piece.view_as(parameter)
                optimizer.synchronize()
                flat *= 0.5
                compute_loss(reference, x, y).backward()
                for parameter in reference.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= 0.5
                optimizer.step()
                plain.step()
                optimizer.zero_grad()
                plain.zero_grad()
            assert_close(model, reference)
            optimizer.unwrap()


def assert_close_gradients(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        scale = float(other.grad.abs().max())
        assert float((own.grad - other.grad).abs().max()) <= tolerance * scale, name
