"""Two nodes x two ranks under torchrun, without MPI. Each rank stores its gradients before the hook, and after it."""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import topkube
from topkube.errors import ArgumentError

Steps = list[dict[int, tuple[torch.Tensor, torch.Tensor]]]
STEPS = 6


def train(wire: str, overflow: int, scale: float = 1.0) -> tuple[torch.Tensor, Steps]:
    """Return the weights, and each bucket before and after the hook. In step `overflow` a rank has infinite values. If
    `scale` is not 1, a GradScaler multiplies the loss by `scale` at first, and doubles the factor after each step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(30, 41), torch.nn.Tanh(), torch.nn.Linear(41, 7)]
    # Buckets of at most about 1 KB: several of them, and one of an odd length.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
    hook = topkube.ddp_hook("hitopk", density=0.1, wire=wire, ranks_per_node=2)
    steps: Steps = []

    def record_and_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        before, index = bucket.buffer().clone(), bucket.index()

        def record(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            steps[-1][index] = (before, future.value().clone())
            return future.value()

        return hook(state, bucket).then(record)

    model.register_comm_hook(None, record_and_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1, enabled=scale != 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        steps.append({})
        optimizer.zero_grad()
        loss = model(torch.randn(5, 30, generator=generator)).square().mean()
        scaler.scale(loss * float("inf") if step == overflow and dist.get_rank() == 3 else loss).backward()
        if step != overflow:  # as GradScaler does
            scaler.step(optimizer)
            scaler.update()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), steps


def check_the_example_of_the_docs() -> None:
    """Train as docs/ddp.md shows. torch checks the hook when it is registered."""
    plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    plain.register_comm_hook(None, topkube.ddp_hook())
    plain(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    assert torch.equal(plain.module.weight.grad, torch.full((2, 3), (dist.get_world_size() - 1) / 2))


def check_that_doubles_are_sent_whole() -> None:
    """Train over four nodes of one rank, with a density that would drop most entries."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 5, bias=False, dtype=torch.float64))
    model.register_comm_hook(None, topkube.ddp_hook("hitopk", density=0.1, ranks_per_node=1))
    batches = torch.randn(4, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):  # the first step is dense anyway
        model.zero_grad()
        model(batches[dist.get_rank()]).diagonal().sum().backward()  # the gradient is the batch
        torch.testing.assert_close(model.module.weight.grad, batches.mean(0), rtol=1e-14, atol=1e-14)


def check_that_ranks_with_other_settings_are_refused() -> None:
    for options in ({"density": 0.1 + 0.1 * (dist.get_rank() == 2)}, {"ranks_per_node": 1 + (dist.get_rank() > 1)}):
        problem = ""
        try:
            topkube.ddp_hook("hitopk", **options)
        except ArgumentError as error:
            problem = str(error)
        assert "different settings" in problem, options


dist.init_process_group("gloo")
runs = {
    "fp32": train("fp32", -1),
    "overflow": train("fp32", 3),
    "bf16": train("bf16", -1),
    "scaled": train("fp32", -1, scale=64.0),
}
check_the_example_of_the_docs()
check_that_doubles_are_sent_whole()
check_that_ranks_with_other_settings_are_refused()
assert not any(name.startswith("mpi4py") for name in sys.modules), "torchrun needs no MPI"
torch.save(runs, Path(sys.argv[1]) / f"rank-{dist.get_rank()}.pt")
gc.collect()  # a model's reducer holds the process group: free it here, not while the interpreter ends
dist.destroy_process_group()
