"""Batches of several ranks: uneven batches, and the distribution of samples."""

from __future__ import annotations

import itertools

import torch

import topkube
from ranks.training.scene import assert_close, distributed, loss_of, network, samples, sgd
from topkube.world import World


def case_uneven_batches_count_by_their_samples(world: World) -> None:
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


def case_a_script_can_announce_its_batches_itself(world: World) -> None:
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


def case_a_batch_of_weight_zero_cannot_spoil_a_step(world: World) -> None:
    model = network()
    optimizer = distributed(model)
    optimizer.batch(4 if topkube.rank() == 0 else 0)
    loss = loss_of(model, *samples(4))
    (loss if topkube.rank() == 0 else loss * torch.inf).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert optimizer.steps == 1


def case_the_sampler_deals_out_everything_once(world: World) -> None:
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
