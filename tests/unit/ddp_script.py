"""A script for torchrun without TopKube: DistributedDataParallel over gloo. Rank 0 writes the weights."""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert rank % int(os.environ["LOCAL_WORLD_SIZE"]) == int(os.environ["LOCAL_RANK"])
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.randn(options.steps, 8, 8, generator=torch.Generator().manual_seed(1))
for batch in samples:  # every rank takes its share of the batch
    share = batch.chunk(size)[rank]
    optimizer.zero_grad()
    model(share).square().mean().backward()
    optimizer.step()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
gathered = [torch.empty_like(weights) for _ in range(size)]
dist.all_gather(gathered, weights)
assert all(torch.equal(other, weights) for other in gathered)
if rank == 0:
    torch.save((weights, size), options.out)
del model, optimizer  # the model's reducer holds the process group: free it here, not while the interpreter ends
gc.collect()
dist.destroy_process_group()
