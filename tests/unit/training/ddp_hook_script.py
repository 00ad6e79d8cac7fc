"""Two nodes x two ranks under torchrun, without MPI. Each rank stores its gradients before the hook, and after it."""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import topkube

folder, wire, overflow = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [torch.nn.Linear(30, 41), torch.nn.Tanh(), torch.nn.Linear(41, 7)]
# Buckets of at most about 1 KB: several of them, and one of an odd length.
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
hook = topkube.ddp_hook("hitopk", density=0.1, wire=wire, ranks_per_node=2)
steps: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []


def recording(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    before, index = bucket.buffer().clone(), bucket.index()

    def record(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        steps[-1][index] = (before, future.value().clone())
        return future.value()

    return hook(state, bucket).then(record)


model.register_comm_hook(None, recording)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for step in range(6):
    steps.append({})
    optimizer.zero_grad()
    loss = model(torch.randn(5, 30, generator=generator)).square().mean()
    (loss * float("inf") if step == overflow and rank == 3 else loss).backward()
    if step != overflow:  # as GradScaler does
        optimizer.step()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

# As docs/ddp.md shows it: torch checks the hook itself when it is registered.
plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
plain.register_comm_hook(None, topkube.ddp_hook())
plain(torch.full((1, 3), float(rank))).sum().backward()
assert torch.equal(plain.module.weight.grad, torch.full((2, 3), (dist.get_world_size() - 1) / 2))

assert not any(name.startswith("mpi4py") for name in sys.modules), "torchrun needs no MPI"
torch.save((weights, steps), folder / f"rank-{rank}.pt")
del model, optimizer  # the model's reducer holds the process group: free it here, not while the interpreter ends
gc.collect()
dist.destroy_process_group()
