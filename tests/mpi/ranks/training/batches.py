"""Batches of several ranks: uneven batches, and the distribution of samples."""

from __future__ import annotations

import itertools

import torch

import topkube
from ranks.training.scene import assert_close, build_network, build_optimizer, build_sgd, compute_loss, draw_samples
from topkube.world import World


def case_uneven_batches_count_by_their_samples(world: World) -> None:
    """Ranks get batches of different sizes and numbers; one process gets their union."""
    rank, size = topkube.rank(), topkube.size()
    for name in ("dense", "hitopk"):
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model, aggregation=name, density=1.0), build_sgd(reference.parameters())
        sizes = [[5, 3, 2 + r, 4][: 4 - (r % 2)] for r in range(size)]  # odd ranks have a batch less
        everyone = [[draw_samples(count, 100 * r + i) for i, count in enumerate(row)] for r, row in enumerate(sizes)]
        steps = 0
        for x, y in optimizer.join(everyone[rank]):
            compute_loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        assert steps == 4
        for step in range(4):
            parts = [row[step] for row in everyone if step < len(row)]
            compute_loss(reference, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
            plain.step()
            plain.zero_grad()
        assert_close(model, reference)


def _assign(model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Compute gradients without hooks, as FSDP2 does, and assign them."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def _accumulate(optimizer: topkube.DistributedOptimizer, loss: torch.Tensor) -> None:
    with optimizer.no_sync():
        loss.backward()


def case_assigned_gradients_count_by_their_samples(world: World) -> None:
    """A gradient is weighed once, whether a backward under no_sync() or the script has produced it."""
    rank, size = topkube.rank(), topkube.size()
    ways = (
        "assigned",
        "accumulated",
        "accumulated and replaced",
        "assigned and accumulated",
        "assigned, then backward",
    )
    for way, name in itertools.product(ways, ("dense", "hitopk")):
        model, reference = build_network(), build_network()
        optimizer, plain = build_optimizer(model, aggregation=name, density=1.0), build_sgd(reference.parameters())
        everyone = [[draw_samples(3 + 2 * r, 10 * r + i) for i in range(2 + (r == 0))] for r in range(size)]
        for number, (x, y) in enumerate(optimizer.join(everyone[rank])):
            loss = compute_loss(model, x, y)
            loss = loss * torch.nan if number == 2 and rank else loss  # of a batch with weight zero
            if way.startswith("assigned"):
                _assign(model, loss)
            if way.startswith("accumulated"):
                _accumulate(optimizer, loss)
            if way.endswith("replaced"):
                for parameter in model.parameters():
                    parameter.grad = 2 * parameter.grad / 2
            if way.endswith("and accumulated"):
                _accumulate(optimizer, compute_loss(model, x, y))
            if way.endswith("then backward"):
                compute_loss(model, x, y).backward()
            else:
                optimizer.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        for step in range(3):
            parts = [row[step] for row in everyone if step < len(row)]
            loss = compute_loss(reference, *(torch.cat(part) for part in zip(*parts, strict=True)))
            (loss * (2 if way.startswith("assigned") and way != "assigned" else 1)).backward()
            plain.step()
            plain.zero_grad()
        assert optimizer.steps == 3, way
        assert_close(model, reference)
        optimizer.unwrap()


def case_gradients_that_are_combined_under_no_sync_are_weighed_once(world: World) -> None:
    """As with PCGrad: a backward for each task, and the script assigns the sum of the gradients."""
    rank, size = topkube.rank(), topkube.size()
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    everyone = [draw_samples(3 + 2 * r, r) for r in range(size)]
    for x, y in optimizer.join([everyone[rank]]):
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for task in range(2):
            optimizer.zero_grad()
            _accumulate(optimizer, compute_loss(model, x, y) * (1 + task))
            torch._foreach_add_(totals, [parameter.grad for parameter in model.parameters()])
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total
        optimizer.synchronize()
        optimizer.step()
    (compute_loss(reference, *(torch.cat(part) for part in zip(*everyone, strict=True))) * 3).backward()
    plain.step()
    assert_close(model, reference)


def case_a_script_can_announce_its_batches_itself(world: World) -> None:
    rank, size = topkube.rank(), topkube.size()
    model, reference = build_network(), build_network()
    optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
    own = [draw_samples(3 + rank, 10 * rank + i) for i in range(2 + (rank == 0))]
    step = 0
    while optimizer.batch(len(own[step][0]) if step < len(own) else 0):
        compute_loss(model, *own[min(step, len(own) - 1)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    assert step == 3
    for i in range(3):
        parts = [draw_samples(3 + r, 10 * r + i) for r in range(size) if i < 2 + (r == 0)]
        compute_loss(reference, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


def case_a_batch_of_weight_zero_cannot_spoil_a_step(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model)
    optimizer.batch(4 if topkube.rank() == 0 else 0)
    loss = compute_loss(model, *draw_samples(4))
    (loss if topkube.rank() == 0 else loss * torch.inf).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert optimizer.steps == 1


def case_the_sampler_distributes_every_sample_once(world: World) -> None:
    sampler = topkube.data.DistributedSampler(range(23), seed=3)
    first = topkube.world.current().comm.allgather(list(sampler))
    assert sorted(itertools.chain(*first)) == list(range(23))
    assert len(first[topkube.rank()]) == len(sampler)
    order = [first[i % len(first)][i // len(first)] for i in range(23)]
    sampler.set_epoch(1)
    assert sorted(itertools.chain(*topkube.world.current().comm.allgather(list(sampler)))) == list(range(23))
    sampler.set_epoch(0)
    sampler.advance(9)
    remaining = topkube.world.current().comm.allgather(list(sampler))
    assert [remaining[i % len(remaining)][i // len(remaining)] for i in range(14)] == order[9:]
