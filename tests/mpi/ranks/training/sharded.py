"""Models that another library shards inside each node, while TopKube exchanges between nodes (HSDP)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import topkube
from ranks.training.scene import (
    assert_close,
    build_network,
    build_optimizer,
    build_sgd,
    compute_loss,
    draw_samples,
    take_own_part,
)
from topkube.errors import ArgumentError, TrainingError
from topkube.world import World


@contextmanager
def open_node_group(world: World) -> Iterator[object]:
    """Start torch.distributed over gloo among the ranks of this node. Yield their mesh."""
    name = tempfile.mkdtemp() if world.local_rank == 0 else ""
    name = world.node_comm.bcast(name)
    store = distributed.FileStore(str(Path(name) / "store"), world.local_size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=store, rank=world.local_rank, world_size=world.local_size)
    try:
        yield init_device_mesh("cpu", (world.local_size,))
    finally:
        distributed.destroy_process_group()


def make_world_between_nodes(world: World) -> World:
    """Return the world of the ranks that have this rank's local rank, on all nodes."""
    worlds = [topkube.new_world([ranks[i] for ranks in world.node_ranks]) for i in range(world.local_size)]
    own = worlds[world.local_rank]
    assert own is not None
    return own


def gather_full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def train_and_compare(model: nn.Module, optimizer: topkube.DistributedOptimizer) -> None:
    reference = build_network()
    plain = build_sgd(reference.parameters())
    for step in range(4):
        x, y = draw_samples(4 * topkube.size(), step)
        compute_loss(model, take_own_part(x), take_own_part(y)).backward()
        with pytest.raises(TrainingError, match="synchronize"):
            optimizer.step()
        optimizer.synchronize()
        compute_loss(reference, x, y).backward()
        for network, each_optimizer in ((model, optimizer), (reference, plain)):
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            each_optimizer.step()
            each_optimizer.zero_grad()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(gather_full(a), b, rtol=2e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def case_fsdp_inside_and_topkube_between_nodes(world: World) -> None:
    for options in ({"aggregation": "dense"}, {"aggregation": "hitopk", "density": 1.0}):
        with open_node_group(world) as mesh:
            model = build_network()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            with pytest.raises(ArgumentError, match="DTensor"):
                topkube.DistributedOptimizer(build_sgd(model.parameters()), model.named_parameters())
            optimizer = topkube.DistributedOptimizer(
                build_sgd(model.parameters()),
                model.named_parameters(),
                world=make_world_between_nodes(world),
                wire="fp32",
                **options,
            )
            train_and_compare(model, optimizer)


def case_tensor_parallel_inside_and_topkube_between_nodes(world: World) -> None:
    with open_node_group(world) as mesh:
        torch.manual_seed(0)
        block, reference = (nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in range(2))
        reference.load_state_dict(block.state_dict())
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = topkube.DistributedOptimizer(
            build_sgd(block.parameters()),
            block.named_parameters(),
            aggregation="dense",
            world=make_world_between_nodes(world),
        )
        plain = build_sgd(reference.parameters())
        for step in range(4):
            x, y = draw_samples(4 * world.nodes, step)
            compute_loss(block, x[world.node :: world.nodes], y[world.node :: world.nodes]).backward()
            compute_loss(reference, x, y).backward()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad()
        for a, b in zip(block.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(gather_full(a), b, rtol=2e-5, atol=2e-5)


def case_a_model_in_ddp_is_refused_while_ddp_exchanges_gradients(world: World) -> None:
    """DDP writes its own means into `.grad` when backward ends. Under its no_sync(), it exchanges nothing."""
    with open_node_group(world):
        model = build_network()
        optimizer, in_ddp = build_optimizer(model), nn.parallel.DistributedDataParallel(model)
        with pytest.raises(TrainingError, match=r"delete the DistributedDataParallel around it.*topkube\.ddp_hook"):
            compute_loss(in_ddp, *draw_samples(4)).backward()
        optimizer.unwrap()

        model, reference = build_network(), build_network()
        in_ddp = nn.parallel.DistributedDataParallel(model)
        optimizer, plain = build_optimizer(model), build_sgd(reference.parameters())
        for step in range(3):
            x, y = draw_samples(4 * world.size, step)
            with in_ddp.no_sync():
                compute_loss(in_ddp, take_own_part(x), take_own_part(y)).backward()
            compute_loss(reference, x, y).backward()
            for each_optimizer in (optimizer, plain):
                each_optimizer.step()
                each_optimizer.zero_grad()
        assert_close(model, reference)
