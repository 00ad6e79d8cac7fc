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
