"""Parameters and gradients of unusual kinds: double, complex, sparse, and memory that several tensors share. One
process does the same for comparison."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import (
    SPARSE,
    are_equal_on_all_ranks,
    assert_close,
    build_network,
    build_optimizer,
    build_plain_sgd,
    build_sgd,
    compute_loss,
    copy_weights,
    draw_samples,
    shrink,
    take_own_part,
)
from topkube.errors import TrainingError
from topkube.training.exchange.reduction import sparse_gradients
from topkube.training.ranks.agreement import open_agreement
from topkube.world import World


def case_double_and_complex_parameters_train(world: World) -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Parameter(torch.randn(24, 48, dtype=torch.complex64))
            self.second = nn.Parameter(torch.randn(48, 30, dtype=torch.complex128))
            self.third = nn.Parameter(torch.randn(30, 40, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = (x.to(torch.complex64) @ self.first).to(torch.complex128) @ self.second
            return (hidden.abs() @ self.third).square().mean() * 1e-5

    for options in ({}, SPARSE):
        model, reference = Wave(), Wave()
        optimizer, plain = build_optimizer(model, build_plain_sgd, **options), build_plain_sgd(reference.parameters())
        for step in range(3):
            x, _ = draw_samples(4 * topkube.size(), step)
            model(take_own_part(x)).backward()
            reference(x).backward()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad()
        assert_close(model, reference)
        assert are_equal_on_all_ranks([torch.view_as_real(p) if p.is_complex() else p for p in copy_weights(model)])


def case_sparse_embeddings_train(world: World) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.unused = nn.Embedding(50, 30, sparse=True), nn.Embedding(50, 30, sparse=True)
            self.head = nn.Linear(30, 40)

        def forward(self, words: torch.Tensor, rare: bool) -> torch.Tensor:
            table = self.table(words) + (self.unused(words) if rare else 0)
            return self.head(table).square().sum(1)

    gathered: list[int] = []
    gather = sparse_gradients._gather

    def count_and_gather(world: World, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        gathered.append(sum(counts))
        return gather(world, rows, counts)

    sparse_gradients._gather = count_and_gather
    model, reference = Words(), Words()
    optimizer, plain = build_optimizer(model, build_plain_sgd), build_plain_sgd(reference.parameters())
    for step in range(5):
        per_rank = 200 if step == 3 else 6  # 200 words are nearly all rows of the table
        words = torch.randint(50, (per_rank * topkube.size(),), generator=torch.Generator().manual_seed(step))
        for micro in range(2):
            rare = step == 2 and micro == 1
            shrink(model(take_own_part(words), rare and topkube.rank() == 0).mean()).backward()
            losses = [
                reference(words[rank :: topkube.size()], rare and rank == 0).mean() for rank in range(topkube.size())
            ]
            shrink(sum(losses) / len(losses)).backward()  # type: ignore[arg-type]
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (own.grad is None) == (expected.grad is None), "an optimizer would decay the momentum of its weights"
        for each_optimizer in (optimizer, plain):
            each_optimizer.step()
            each_optimizer.zero_grad()
    sparse_gradients._gather = gather
    assert_close(model, reference)
    assert are_equal_on_all_ranks(copy_weights(model))
    assert 0 < max(gathered) <= 2 * 50  # otherwise ranks reduce the whole table


def case_gradients_have_the_type_that_a_script_chose(world: World) -> None:
    """With grad_dtype, 16-bit weights have float32 gradients: nothing is rounded on the way."""

    class Weigh(torch.autograd.Function):
        @staticmethod
        def forward(context, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return (weight.float() * x).sum()

        @staticmethod
        def backward(context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * context.saved_tensors[0], None  # not rounded to the type of the weight

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.unused = (nn.Parameter(torch.randn(40, 30).bfloat16()) for _ in range(2))
            for parameter in self.parameters():
                parameter.grad_dtype = torch.float32

        def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
            return Weigh.apply(self.weight, x) + (Weigh.apply(self.unused, x) if uses_all else 0)

    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    model = Narrow()
    optimizer = build_optimizer(model, build_plain_sgd)
    for step in range(3):
        batches = [
            torch.randn(40, 30, generator=torch.Generator().manual_seed(10 * step + n)) for n in range(world.size)
        ]
        model(batches[world.rank], step == 1 and world.rank == 0).backward()
        assert model.weight.grad.dtype == torch.float32
        torch.testing.assert_close(model.weight.grad, torch.stack(batches).mean(0), rtol=1e-6, atol=1e-6)
        if step == 1:
            assert model.unused.grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_all_ranks([parameter.view(torch.int16) for parameter in model.parameters()])
    model.weight.grad_dtype = torch.bfloat16
    with pytest.raises(TrainingError, match=r"has dtype torch\.bfloat16, and not torch\.float32"):
        model(batches[0], False).backward()
    optimizer._backward.end()


def case_expanded_buffers_are_broadcast(world: World) -> None:
    model = nn.Module()
    model.register_buffer("positions", torch.full((1, 3, 1), float(topkube.rank())).expand(4, 3, 5))
    topkube.broadcast_parameters(model)
    assert model.positions.eq(0).all()
    assert open_agreement().gather([1.0]).shape == (topkube.size(), 1)


class Shared(nn.Module):
    """A network in which autograd passes one tensor to several branches as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(5)))
        self.positions, self.head = nn.Parameter(0.1 * torch.randn(128, 128)), nn.Linear(128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (1, 128, 128)
        return self.head(torch.tanh(self.layers(x) + self.positions.unsqueeze(0))).square().mean()


def case_gradients_may_share_memory_with_the_graph(world: World) -> None:
    model, reference = Shared(), Shared()
    optimizer = topkube.DistributedOptimizer(
        build_plain_sgd(model.parameters()), model.named_parameters(), "dense", bucket_bytes=1 << 14
    )
    x = torch.randn(topkube.size(), 1, 128, 128, generator=torch.Generator().manual_seed(1))
    for _ in range(12):
        model.zero_grad()
        reference.zero_grad()
        model(x[topkube.rank()]).backward()
        sum((reference(part) for part in x), torch.zeros(())).div(topkube.size()).backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)
    memory = model.positions.grad.untyped_storage()
    assert memory.nbytes() == model.positions.numel() * 4
    optimizer.unwrap()


def case_gradients_stay_in_the_memory_that_a_script_chose(world: World) -> None:
    """Gradients are views of a flat buffer, through which the script scales them."""
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for step in range(3):
        flat.zero_()
        for parameter, piece in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = piece.view_as(parameter)
        for micro in range(2):
            x, y = draw_samples(4 * topkube.size(), 10 * step + micro)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
        flat.mul_(0.5)
        for parameter in reference.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


def case_a_complex_weight_trains_through_its_conjugate(world: World) -> None:
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.complex64))
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], "dense")
    (weight.conj() * (topkube.rank() + 1j)).sum().abs().backward()
    optimizer.step()
    assert are_equal_on_all_ranks([torch.view_as_real(weight)])


def case_assigned_gradients_may_be_expanded_or_conjugated(world: World) -> None:
    """Such views cannot be written: the mean arrives in a copy. One weight has a gradient of backward too."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expanded, self.backward_too = nn.Parameter(torch.ones(40, 30)), nn.Parameter(torch.ones(40, 30))
            self.wave = nn.Parameter(torch.ones(40, 30, dtype=torch.complex64))

    mean = (world.size - 1) / 2
    for by_backward in (False, True):
        model = Weights()
        optimizer = build_optimizer(model, build_plain_sgd)
        for _ in range(2):
            model.expanded.grad = torch.tensor([float(world.rank)]).expand(40, 30)
            model.wave.grad = torch.full((40, 30), world.rank * 1j, dtype=torch.complex64).conj()
            if by_backward:
                model.backward_too.sum().backward()
            else:
                optimizer.synchronize()
            assert model.expanded.grad.eq(mean).all()
            assert model.wave.grad.eq(-mean * 1j).all()
            optimizer.step()
            optimizer.zero_grad()
        assert model.expanded.eq(1 - 2 * mean).all()
        optimizer.unwrap()


def case_a_parameter_without_elements_has_a_gradient_on_all_ranks(world: World) -> None:
    """Otherwise, sums over all gradients have other terms on ranks that did not use it."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.weight = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.ones(40))
            self.frozen = nn.Parameter(torch.zeros(0), requires_grad=False)

    model = Weights()
    optimizer = build_optimizer(model, build_plain_sgd)
    for step in range(3):
        loss = model.weight.sum()
        if world.rank == step % world.size:
            loss = loss + model.empty.sum()
        loss.backward()
        assert model.empty.grad is not None
        assert model.empty.grad.shape == (0, 8)
        assert model.frozen.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_all_ranks(copy_weights(model))
    optimizer.unwrap()
