"""A script for torchrun without TopKube: DistributedDataParallel and FSDP2 over gloo. Rank 0 writes the weights of
both."""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert rank % int(os.environ["LOCAL_WORLD_SIZE"]) == int(os.environ["LOCAL_RANK"])
samples = torch.randn(options.steps, 8, 8, generator=torch.Generator().manual_seed(1))


def train(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in samples:  # every rank takes its share of the batch
        share = batch.chunk(size)[rank]
        optimizer.zero_grad()
        model(share).square().mean().backward()
        optimizer.step()


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4)


replicated, sharded = torch.nn.parallel.DistributedDataParallel(build_model()), build_model()
fully_shard(sharded, mesh=init_device_mesh("cpu", (size,)))
for model in (replicated, sharded):
    train(model)
whole = [parameter.detach().full_tensor() for parameter in sharded.parameters()]
weights = torch.nn.utils.parameters_to_vector([*replicated.parameters(), *whole]).detach()
half = len(weights) // 2
torch.testing.assert_close(weights[:half], weights[half:])
gathered = [torch.empty_like(weights) for _ in range(size)]
dist.all_gather(gathered, weights)
assert all(torch.equal(other, weights) for other in gathered)
if rank == 0:
    torch.save((weights, size), options.out)
del model, replicated, sharded  # DDP's reducer holds the process group: free it here, not while the interpreter ends
gc.collect()
dist.destroy_process_group()
