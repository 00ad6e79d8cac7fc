"""Batch normalization on several ranks: statistics over all ranks, statistics of each rank, and equal buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import topkube
from ranks.training.scene import are_equal_on_all_ranks, build_optimizer
from topkube.errors import MismatchError
from topkube.training.ranks.model_collectives import open_model_collectives
from topkube.world import World

Batch = tuple[torch.Tensor, torch.Tensor]


def draw_images(count: int, seed: int) -> Batch:
    """Return `count` images (count, 3, 6, 5), whose mean is far from 0 and differs by `seed`, and their targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 6, 5, generator=generator, dtype=torch.float64) * (1 + seed % 3) + seed % 5
    return x, x.mean((1, 2, 3)).sin()[:, None]


def build_network(momentum: float | None = 0.1, tracks: bool = True) -> nn.Module:
    """Return a network with float64 weights that have the same values in float32."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.BatchNorm2d(3, momentum=momentum, track_running_stats=tracks),
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, momentum=momentum, track_running_stats=tracks),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(96, 12),
        nn.BatchNorm1d(12, affine=False, momentum=momentum, track_running_stats=tracks),
        nn.Linear(12, 1),
    )
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return layers.double()


def synchronize(model: nn.Module) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model).float())


def compute_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = (part.to(next(model.parameters()).dtype) for part in batch)
    return ((model(x) - y) ** 2).mean()


def join_batches(batches: Sequence[Batch]) -> Any:
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def build_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def copy_with_gradients(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    for target, source in zip(copied.parameters(), model.parameters(), strict=True):
        target.grad = None if source.grad is None else source.grad.clone()
    return copied


def assert_models_close(reference: nn.Module, model: nn.Module, tolerance: float = 1e-5) -> None:
    """Compare all weights, buffers and gradients with those of `reference`, which are float64."""
    expected = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert expected.keys() == tensors.keys()
    for name, value in expected.items():
        assert_close(tensors[name], value, tolerance, name)
        if value.grad is not None:
            assert_close(tensors[name].grad, value.grad, tolerance, f"gradient of {name}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    error = (actual.double() - expected.double()).abs().max().item() / max(expected.double().abs().max().item(), 0.1)
    assert error <= tolerance, f"{name}: relative error {error:.2g}"


def case_synchronized_statistics_are_those_of_the_union(world: World) -> None:
    """Ranks have uneven batches, and some have a batch less (`join`); the reference trains with the union."""
    rank, size = topkube.rank(), topkube.size()
    for momentum, tracks in ((0.1, True), (None, True), (0.1, False)):
        reference = build_network(momentum, tracks)
        model = synchronize(reference)
        optimizer, plain = build_optimizer(model, build_sgd), build_sgd(reference.parameters())
        sizes = [[5, 3, 2 + r, 4][: 4 - (r % 2)] for r in range(size)]  # odd ranks have a batch less
        everyone = [[draw_images(count, 10 * r + i) for i, count in enumerate(row)] for r, row in enumerate(sizes)]
        after_one_backward = None
        for step in range(4):  # apart from the ranks' loop: statistics of any model are kept while a rank replays
            plain.zero_grad()
            compute_loss(reference, join_batches([row[step] for row in everyone if step < len(row)])).backward()
            after_one_backward = after_one_backward or copy_with_gradients(reference)
            plain.step()
        for step, batch in enumerate(optimizer.join(everyone[rank])):
            optimizer.zero_grad()
            compute_loss(model, batch).backward()
            if step == 0:
                assert_models_close(after_one_backward, model)
            optimizer.step()
        assert_models_close(reference, model, 1e-5)
        assert are_equal_on_all_ranks([buffer.double() for buffer in model.buffers()])
        held_out = draw_images(6, 99)
        reference.eval()
        model.eval()  # each rank alone: no collective, running statistics or, without them, the batch's own
        if world.rank == 0:
            assert_close(compute_loss(model, held_out), compute_loss(reference, held_out), 1e-5, "evaluation")


def case_without_join_all_ranks_have_the_same_weight_as_in_ddp(world: World) -> None:
    """Statistics count samples; gradients are means over ranks."""
    rank, size = topkube.rank(), topkube.size()
    reference = build_network()
    model = synchronize(reference)
    optimizer = build_optimizer(model, build_sgd)
    batches = [draw_images(3 + r, r) for r in range(size)]
    compute_loss(model, batches[rank]).backward()
    x, y = join_batches(batches)
    errors = ((reference(x) - y) ** 2).split([3 + r for r in range(size)])
    (sum(error.mean() for error in errors) / size).backward()
    assert_models_close(reference, model)
    optimizer.zero_grad()


def case_gradients_reach_the_input(world: World) -> None:
    """Without any optimizer, with an empty batch on one rank, channels last and float64."""
    rank, size = topkube.rank(), topkube.size()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        reference, layer = nn.BatchNorm2d(3).double(), nn.SyncBatchNorm(3).to(dtype)
        batches = [draw_images(0 if r == size - 1 else 2 + r, r)[0] for r in range(size)]
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).double() for x in batches]
        full = torch.cat(batches).requires_grad_()
        (reference(full) * torch.cat(weights)).sum().backward()
        own = batches[rank].to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        y = layer(input=own)
        (y * weights[rank]).sum().backward()
        first = sum(len(x) for x in batches[:rank])
        if len(own):
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert_close(own.grad, full.grad[first : first + len(own)], tolerance, "gradient of the input")
        total = world.comm.allreduce(layer.weight.grad.double().numpy())
        assert_close(torch.from_numpy(total), reference.weight.grad, tolerance, "gradient of the weight")
        assert_close(layer.running_var, reference.running_var, tolerance, "running variance")


def case_16_bits_keep_float32_statistics(world: World) -> None:
    rank, size = topkube.rank(), topkube.size()
    for inside, outside in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        reference, layer = nn.BatchNorm2d(3).double(), nn.SyncBatchNorm(3).to(inside)
        batches = [draw_images(2 + r, r)[0].to(outside) for r in range(size)]
        expected = reference(torch.cat(batches).double())
        outputs = layer(batches[rank])
        outputs.sum().backward()
        assert outputs.dtype == outside
        first = sum(len(x) for x in batches[:rank])
        torch.testing.assert_close(outputs.double(), expected[first : first + len(outputs)], rtol=0.01, atol=0.02)


def case_a_layer_runs_twice_and_is_recomputed_in_backward(world: World) -> None:
    """Two branches over one layer, under activation checkpointing: as many collectives, in one order."""
    rank, size = topkube.rank(), topkube.size()
    reference, layer = nn.BatchNorm2d(3).double(), nn.SyncBatchNorm(3)
    batches = [draw_images(2 + r, r)[0] for r in range(size)]

    def apply_twice(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x).tanh() + 1) * x

    (apply_twice(reference, torch.cat(batches)) ** 2).sum().backward()
    checkpointed = torch.utils.checkpoint.checkpoint(apply_twice, layer, batches[rank].float(), use_reentrant=False)
    (checkpointed**2).sum().backward()
    total = world.comm.allreduce(layer.weight.grad.double().numpy())
    assert_close(torch.from_numpy(total), reference.weight.grad, 1e-5, "gradient of the weight")


def case_one_value_per_channel_is_refused_on_all_ranks(world: World) -> None:
    layer = nn.SyncBatchNorm(4)
    x = torch.ones(1 if topkube.rank() == 0 else 0, 4)
    with pytest.raises(ValueError, match="one value per channel from all ranks"):
        layer(x)


def case_different_layers_are_noticed(world: World) -> None:
    collectives = open_model_collectives(world)
    message = ""
    try:
        collectives.sum(torch.ones(2).double().numpy(), "one layer" if topkube.rank() else "another layer")
    except MismatchError as error:
        message = str(error)
    everyone = world.comm.allgather(message)
    assert any("another collective of its model" in text for text in everyone)


# ---- running statistics of each rank


def case_replays_leave_running_statistics_alone(world: World) -> None:
    """With ordinary BatchNorm, each rank keeps the statistics of its own batches, each counted once."""
    rank = topkube.rank()
    for by_hand in (False, True):
        reference = build_network().float()
        model = copy.deepcopy(reference)
        optimizer = build_optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        own = [draw_images(4, 10 * rank + i) for i in range(1 + 2 * (rank == 0))]  # the others replay twice
        steps = 0
        if by_hand:
            while optimizer.batch(4 if steps < len(own) else 0):
                compute_loss(model, own[min(steps, len(own) - 1)]).backward()
                optimizer.step()
                steps += 1
                assert model[0].num_batches_tracked == min(steps, len(own))
        else:
            for batch in optimizer.join(own):
                compute_loss(model, batch).backward()
                optimizer.step()
                steps += 1
                assert model[0].num_batches_tracked == min(steps, len(own))
        assert steps == 3
        for batch in own:
            compute_loss(reference, batch)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, dict(reference.named_buffers())[name]), name
        compute_loss(model, own[0])  # after the loop everything counts again
        assert model[0].num_batches_tracked == len(own) + 1


def case_a_rank_without_a_batch_trains_a_normalized_model(world: World) -> None:
    """The rank computes with samples of the dataset, and its statistics do not change."""
    data = torch.utils.data.TensorDataset(*(part.float() for part in draw_images(3, 1)))
    sampler: Any = [0, 1, 2] if topkube.rank() == 0 else []
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler)
    model = build_network().float()
    optimizer = build_optimizer(model)
    for batch in optimizer.join(loader):
        compute_loss(model, batch).backward()
        optimizer.step()
    assert model[0].num_batches_tracked == (topkube.rank() == 0)
    assert topkube.rank() == 0 or not model[0].running_mean.any()


# ---- buffers of rank 0


def case_each_forward_begins_with_the_buffers_of_rank_0(world: World) -> None:
    rank = topkube.rank()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("expanded", torch.tensor([float(rank)]).expand(5))
            self.register_buffer("rows", torch.full((1, 3), rank).expand(2, 3))
            self.register_buffer("flags", torch.tensor([rank > 0, True]))
            self.register_buffer("phase", torch.full((2, 2), complex(rank, 1)))
            self.register_buffer("transposed", torch.arange(6.0).view(2, 3).T + rank)
            self.register_buffer("empty", torch.empty(0))
            self.register_buffer("constant", torch.arange(3))
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = [buffer.clone() for buffer in self.buffers()]
            return self.norm(x) * self.constant.sum()

    model = Model()
    handle = topkube.broadcast_buffers(model)
    version = model.constant._version
    for step in range(3):
        losses = [model(torch.randn(6, 4) + rank).sum() for _ in range(2)]  # both graphs stay valid
        assert are_equal_on_all_ranks([torch.view_as_real(b) if b.is_complex() else b for b in model.seen]), step
        sum(losses).backward()
    assert model.expanded.tolist() == [0.0] * 5
    assert model.expanded.stride() == (0,)
    assert model.constant._version == version
    assert model.norm.num_batches_tracked == 6
    assert not are_equal_on_all_ranks([model.norm.running_mean])  # each rank's own batch came last
    model.eval()
    if rank == 0:
        model(torch.randn(6, 4))  # evaluation on one rank alone
    model.train()
    handle.remove()
    if rank == 0:
        model(torch.randn(6, 4))
    with topkube.broadcast_buffers(model):
        model(torch.randn(6, 4))
    with pytest.raises(topkube.errors.ArgumentError, match="is not a rank"):
        topkube.broadcast_buffers(model, root=world.size)
