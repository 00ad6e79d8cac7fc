"""The parallel tensor operator: ranks that share the work on all layers, as LARS does for its norms."""

from __future__ import annotations

import pytest
import torch

import topkube
from ranks.training.scene import (
    are_equal_on_all_ranks,
    build_network,
    build_optimizer,
    compute_loss,
    copy_weights,
    draw_samples,
    take_own_part,
    train,
)
from topkube.errors import ArgumentError
from topkube.training.optimizers import parallel_tensor
from topkube.training.optimizers.lars import LARS
from topkube.training.optimizers.parallel_tensor import compute_norms
from topkube.world import World


def case_norms_that_ranks_compute_in_shares_equal_norms_that_one_rank_computes(world: World) -> None:
    weights = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (3, 400, 1, 77, 20)]
    layer_gradients = [weight * 0.1 for weight in weights]
    assert compute_norms(weights, layer_gradients, parallel=True) == compute_norms(weights, layer_gradients)


def case_parallel_lars_takes_the_same_steps(world: World) -> None:
    results = []
    for parallel in (False, True):
        model = build_network()
        optimizer = build_optimizer(model, lambda p, parallel=parallel: LARS(p, lr=0.5, trust=0.02, parallel=parallel))
        results.append(train(model, optimizer, 4))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def case_each_rank_maps_its_share_of_the_layers(world: World) -> None:
    """Every rank gets the results of all layers, and each layer is computed by one rank only."""
    sizes = [5, 1, 9, 2, 7, 0, 3]
    computed: list[int] = []

    def compute_numbers(layers: list[int]) -> list[list[float]]:
        computed.extend(layers)
        return [[layer / 3, -layer] for layer in layers]

    alone = parallel_tensor.map(compute_numbers, sizes, 2, parallel=False)
    assert computed == list(range(len(sizes)))
    computed.clear()
    assert parallel_tensor.map(compute_numbers, sizes, 2) == alone
    assert sorted(layer for ranks in world.comm.allgather(computed) for layer in ranks) == list(range(len(sizes)))
    with pytest.raises(ArgumentError, match="numbers of shape"):
        parallel_tensor.map(lambda layers: [[0.0]] * (len(layers) + 1), sizes)


def case_parallel_lars_computes_each_norm_once(world: World) -> None:
    """With `parallel`, the ranks compute as many norms together as one rank computes without it."""
    counts = []
    local = parallel_tensor._compute_local_norms
    for parallel in (False, True):
        computed: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                parallel_tensor,
                "_compute_local_norms",
                lambda tensors, c=computed: c.append(len(tensors)) or local(tensors),
            )
            model = build_network()
            optimizer = build_optimizer(model, lambda p, parallel=parallel: LARS(p, lr=0.5, parallel=parallel))
            x, y = draw_samples(8)
            compute_loss(model, take_own_part(x), take_own_part(y)).backward()
            optimizer.step()
            optimizer.unwrap()
        counts.append(sum(world.comm.allgather(sum(computed))))
    assert counts[0] == counts[1] * world.size


def case_parallel_norms_do_not_meet_the_announcements_of_batches(world: World) -> None:
    """A loop that makes the step of a batch when the next one is there: the announcement of the next batch is under
    way then."""
    results = []
    for parallel in (False, True):
        model = build_network()
        optimizer = build_optimizer(model, lambda p, parallel=parallel: LARS(p, lr=0.5, trust=0.02, parallel=parallel))
        batches = [tuple(map(take_own_part, draw_samples(8 * world.size, step))) for step in range(40)]
        for number, (x, y) in enumerate(optimizer.join(batches)):
            if number:
                optimizer.step()
                optimizer.zero_grad()
            compute_loss(model, x, y).backward()
        optimizer.unwrap()
        assert are_equal_on_all_ranks(copy_weights(model))
        results.append(copy_weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def case_parallel_norms_are_those_of_the_ranks_of_the_optimizer(world: World) -> None:
    """Two groups of ranks train different models. Afterwards, the wrapped optimizer has no ranks of its own again."""
    if world.size < 2:
        return
    groups = [list(range(world.size))[start::2] for start in (0, 1)]
    worlds = [topkube.new_world(group) for group in groups]
    number = world.rank % 2
    own = worlds[number]
    results = []
    for parallel in (False, True):
        torch.manual_seed(number)
        model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(2 + number)), torch.nn.Linear(24, 1))
        optimizer = build_optimizer(
            model, lambda p, parallel=parallel: LARS(p, lr=0.5, trust=0.02, parallel=parallel), world=own
        )
        for step in range(3):
            x, y = draw_samples(8 * own.size, step)
            compute_loss(model, x[own.rank :: own.size], y[own.rank :: own.size]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.unwrap().noise.ranks is None
        results.append(copy_weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
