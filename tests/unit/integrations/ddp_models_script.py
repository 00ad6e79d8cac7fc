"""Four ranks under torchrun, with models that DistributedDataParallel supports and the hook must support or refuse.
Each rank stores what each case returned, or the error that it raised."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import topkube

CASES: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


def run(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return error


def hook_model(module: torch.nn.Module, hook: Any = None, **options: Any) -> Any:
    model = DistributedDataParallel(module, **options)
    model.register_comm_hook(None, hook or topkube.ddp_hook("hitopk", density=0.05, ranks_per_node=1))
    return model


def build_layer(inputs: int = 8) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, 1, bias=False)


def find_halves() -> tuple[Any, Any]:
    """Return this rank's half of the ranks as a process group, and the other half."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = dist.get_rank() // 2
    return halves[own], halves[1 - own]


# ---- process groups


def average_in(process_group: Any, **options: Any) -> float:
    """Return the mean over `process_group` of gradients that are the numbers of the ranks, from 1."""
    hook = topkube.ddp_hook("dense", process_group=process_group, **options)
    model = hook_model(build_layer(), hook, process_group=process_group)
    model(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
    return float(model.module.weight.grad[0, 0])


@case
def half_of_the_ranks() -> float:
    return average_in(find_halves()[0])


@case
def half_of_the_ranks_as_two_nodes() -> float:
    return average_in(find_halves()[0], ranks_per_node=1)


@case
def one_rank_of_each_node() -> float:
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return average_in(columns[dist.get_rank() % 2])


@case
def no_member() -> Any:
    return topkube.ddp_hook("dense", process_group=find_halves()[1])


@case
def other_group_than_the_model() -> None:
    model = hook_model(build_layer(), process_group=find_halves()[0])
    model(torch.ones(1, 8)).sum().backward()


# ---- which model


def train_two_models(in_one_backward: bool, freezes_objects: bool = False) -> None:
    hook = topkube.ddp_hook("hitopk", density=0.05, ranks_per_node=1)
    models = [hook_model(build_layer(), hook) for _ in range(2)]
    if freezes_objects:
        gc.freeze()
    losses = [model(torch.ones(1, 8)).sum() for model in models]
    for loss in [sum(losses)] if in_one_backward else losses:
        loss.backward()


@case
def one_hook_for_two_models() -> None:
    train_two_models(in_one_backward=False)


@case
def one_hook_for_two_models_in_one_backward() -> None:
    train_two_models(in_one_backward=True)


@case
def one_hook_for_two_models_that_gc_does_not_list() -> None:
    try:
        train_two_models(in_one_backward=False, freezes_objects=True)
    finally:
        gc.unfreeze()


# ---- activation checkpoints


class Checkpointed(torch.nn.Module):
    """A layer whose forward runs again in backward, in an inner backward pass if `is_reentrant`."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.is_reentrant = build_layer(), is_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.is_reentrant)


def train_with_checkpoints(is_reentrant: bool, scale: float) -> float:
    """Return the first gradient of the third step. The ranks have the gradients 1, 2, 3 and 4 times `scale`."""
    hook = topkube.ddp_hook("hitopk", density=0.999, ranks_per_node=1)
    model = hook_model(Checkpointed(is_reentrant), hook, static_graph=is_reentrant)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    for _ in range(3):
        model.zero_grad()
        scaler.scale(model(torch.full((1, 8), dist.get_rank() + 1.0, requires_grad=True)).sum()).backward()
    return float(model.module.layer.weight.grad[0, 0])


@case
def reentrant_checkpoint() -> float:  # before a scaler is in use
    return train_with_checkpoints(True, 1.0)


@case
def checkpoint_and_scaler() -> float:
    return train_with_checkpoints(False, 4.0)


@case
def reentrant_checkpoint_and_scaler() -> float:
    return train_with_checkpoints(True, 4.0)


# ---- errors


@case
def sparse_embedding() -> None:
    model = hook_model(torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 1)))
    model(torch.tensor([1, 2])).sum().backward()


class FailedExchange(Exception):
    """An error of the hook's thread."""


@case
def error_in_the_thread() -> list[str]:
    """Return where an error of the thread that exchanges arrives: in its own backward, and in the next."""
    hook = topkube.ddp_hook("hitopk", density=0.05, ranks_per_node=1)
    model = hook_model(build_layer(), hook)
    exchange = next(cell.cell_contents for cell in hook.__closure__)  # type: ignore[attr-defined]

    def fail(*_: Any) -> None:
        raise FailedExchange

    exchange._average_bucket = fail
    places = []
    for place in ("own backward", "next backward"):
        try:
            model(torch.ones(1, 8)).sum().backward()
        except FailedExchange:
            places.append(place)
    return places


@case
def lost_rank() -> list[str]:
    """Train until a rank ends; return the text of the error in its backward, and the name of its type."""
    model = hook_model(build_layer())
    for step in range(3):
        if step == 2 and dist.get_rank() == 3:
            return []
        try:
            model(torch.ones(1, 8)).sum().backward()
        except Exception as error:
            return [type(error).__name__, str(error)]
    return []


os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes of two ranks
dist.init_process_group("gloo")
results = {function.__name__: run(function) for function in CASES}
torch.save(results, Path(sys.argv[1]) / f"rank-{dist.get_rank()}.pt")
sys.stdout.flush()
os._exit(0)
