"""Four ranks under torchrun, with models that DistributedDataParallel supports and the hook must support or refuse.
Each rank stores what each case returned, or the error that it raised."""

from __future__ import annotations

import gc
import inspect
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
from topkube.integrations import ddp_model

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


# ---- parameters that a step does not use


class Parts(torch.nn.Module):
    """Two layers; a step may use the first one only. `never` is unused in all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.first, self.second = build_layer(500), build_layer(500), build_layer(500)

    def forward(self, x: torch.Tensor, uses_second: bool) -> Any:
        return self.first(x) * 1e-3, self.second(x) if uses_second else None


def train_parts(
    is_used: Callable[[int], bool],
    in_no_sync: bool = False,
    in_graph: bool = False,
    freezes: bool = False,
    to_none: bool = True,
    ranks_per_node: int = 1,
    **options: Any,
) -> tuple[float, float]:
    """Train 40 steps, of which those with `is_used` have a gradient of 1 for every weight of the second layer, and then
    steps with zero gradients, until all residuals are sent. Return the least and the largest sum of gradients that a
    weight got."""
    hook = topkube.ddp_hook("hitopk", density=0.05, ranks_per_node=ranks_per_node)
    model = hook_model(Parts(), hook, find_unused_parameters=True, **options)
    weight, total, x = model.module.second.weight, torch.zeros(500), torch.ones(1, 500)
    for step in range(80):
        uses, is_zero = is_used(step) or step >= 40, step >= 40
        model.zero_grad(set_to_none=to_none)
        if freezes:
            weight.requires_grad_(uses)
        if in_no_sync:
            with model.no_sync():
                compute_loss(model(x, uses), uses, is_zero).backward()
            uses = False
        compute_loss(model(x, uses or in_graph), uses, is_zero).backward()
        total += 0 if weight.grad is None else weight.grad[0]
    return float(total.min()), float(total.max())


def compute_loss(outputs: Any, uses_second: bool, is_zero: bool) -> torch.Tensor:
    first, second = outputs
    loss = (first + second if uses_second else first).sum()
    return loss * 0 if is_zero else loss


def is_fourth(step: int) -> bool:
    return step % 4 == 1


@case
def unused_on_all_ranks() -> Any:
    return train_parts(is_fourth)


@case
def unused_on_three_ranks() -> Any:
    return train_parts(lambda step: is_fourth(step) and dist.get_rank() == 2)


@case
def unused_with_two_ranks_per_node() -> Any:
    return train_parts(is_fourth, ranks_per_node=2)


@case
def unused_in_small_buckets() -> Any:
    return train_parts(is_fourth, bucket_cap_mb=0.001)


@case
def unused_with_views() -> Any:
    return train_parts(is_fourth, gradient_as_bucket_view=True, to_none=False)


@case
def used_under_no_sync() -> Any:
    return train_parts(is_fourth, in_no_sync=True)


@case
def unused_part_of_the_graph() -> Any:
    return train_parts(is_fourth, in_graph=True)


@case
def unused_because_frozen() -> Any:
    return train_parts(is_fourth, freezes=True)


@case
def unused_in_a_model_that_gc_does_not_list() -> Any:
    find_models, ddp_model.find_ddp_models = ddp_model.find_ddp_models, lambda parameters: []
    try:
        return train_parts(is_fourth)
    finally:
        ddp_model.find_ddp_models = find_models


@case
def kept_gradient() -> bool:
    """Return True if a step that does not use a parameter leaves its gradient as it was."""
    model = hook_model(Parts(), find_unused_parameters=True, gradient_as_bucket_view=True)
    for _ in range(3):
        compute_loss(model(torch.ones(1, 500), True), True, False).backward()
    before = model.module.second.weight.grad.clone()
    compute_loss(model(torch.ones(1, 500), False), False, False).backward()
    return torch.equal(model.module.second.weight.grad, before)


@case
def left_out_bucket() -> int:
    """Return how many entries a sparse step has, if torch leaves out the bucket that has only unused parameters."""
    options = {"skip_all_reduce_unused_params": True}
    if not options.keys() <= inspect.signature(DistributedDataParallel).parameters.keys():
        return -1
    model = hook_model(Parts(), find_unused_parameters=True, bucket_cap_mb=0.001, **options)
    for _ in range(2):
        model.zero_grad()
        compute_loss(model(torch.ones(1, 500), True), True, False).backward()
    return int(torch.count_nonzero(model.module.second.weight.grad))


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


# ---- default dtypes


@case
def other_default_dtypes() -> list[list[float]]:
    """Return the gradients of three steps, added up, for each default dtype of the script."""
    totals = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            model, total = hook_model(build_layer().float()), torch.zeros(8, dtype=torch.float32)
            for step in range(3):
                model.zero_grad()
                x = torch.arange(8, dtype=torch.float32) + step * dist.get_rank()
                model(x).sum().backward()
                total += model.module.weight.grad[0]
        finally:
            torch.set_default_dtype(torch.float32)
        totals.append(total.tolist())
    return totals


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
