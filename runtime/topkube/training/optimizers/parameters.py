"""The parameters of an optimizer by name, and the refusal of parameters that cannot be exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from topkube.errors import ArgumentError
from topkube.training.exchange.buckets.parameter import Parameter, is_sharded
from topkube.training.optimizers.wrapper import exchanged_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    sharded: bool = False,
) -> list[Parameter]:
    """Return the optimizer's parameters with their names, in the order in which they are named. Parameters of integers,
    which never have a gradient, are left out. `sharded` allows DTensors. Raises ArgumentError if a parameter has no
    name, two names, the name of another parameter, or cannot be exchanged."""
    wanted = {id(tensor) for tensor in exchanged_parameters(optimizer) if _can_train(tensor)}
    names = _check_pairs(named_parameters)
    tensors = {id(tensor) for tensor in names.values()}
    if missing := sum(key not in tensors for key in wanted):
        raise ArgumentError(
            f"{missing} of the optimizer's {len(wanted)} parameters have no name in named_parameters",
            next_step="pass model.named_parameters() of the model whose parameters the optimizer has",
        )
    chosen = [(name, tensor) for name, tensor in names.items() if id(tensor) in wanted]
    for name, tensor in chosen:
        _check_exchangeable(name, tensor, sharded)
    return [Parameter(index, name, tensor) for index, (name, tensor) in enumerate(chosen)]


def name_group(group: dict[str, Any], existing: list[Parameter]) -> tuple[dict[str, Any], list[Parameter]]:
    """Return a parameter group for a torch optimizer, and its parameters. `group["params"]` holds (name,
    parameter) pairs; the names are under "param_names" in the result, as for an optimizer that was created with names.
    Raises ArgumentError as `name_parameters` does, and if a name is taken."""
    params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    if not all(isinstance(entry, tuple) for entry in params):
        raise ArgumentError(
            "the parameters of the new group have no names",
            next_step='add them as {"params": list(layer.named_parameters("layer"))}, in the same way on every rank',
        )
    names = _check_pairs(params)
    chosen = {name: tensor for name, tensor in names.items() if _can_train(tensor)}
    taken = {parameter.name for parameter in existing}
    for name, tensor in chosen.items():
        if name in taken:
            raise ArgumentError(
                f"the optimizer already has a parameter named {name}",
                next_step='give the new parameters a prefix: layer.named_parameters("layer")',
            )
        _check_exchangeable(name, tensor, any(is_sharded(parameter.tensor) for parameter in existing))
    start = len(existing)
    parameters = [Parameter(start + i, name, tensor) for i, (name, tensor) in enumerate(chosen.items())]
    return {**group, "params": list(names.values()), "param_names": list(names)}, parameters


def _can_train(tensor: torch.Tensor) -> bool:
    """Return True if the tensor may have a gradient. Quantized weights of integers have none."""
    return tensor.is_floating_point() or tensor.is_complex()


def _check_pairs(pairs: Iterable[Any]) -> dict[str, torch.nn.Parameter]:
    names: dict[str, torch.nn.Parameter] = {}
    tensors: set[int] = set()
    for entry in pairs:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ArgumentError(
                "named_parameters must yield (name, parameter) pairs", next_step="pass model.named_parameters()"
            )
        name, tensor = entry
        if name in names or id(tensor) in tensors:
            raise ArgumentError(
                f"parameter {name} is named twice",
                cause="two models have parameters with equal names, or a parameter is listed twice",
                next_step="give every parameter its own name, for example f'generator.{name}'",
            )
        names[name] = tensor
        tensors.add(id(tensor))
    return names


def _check_exchangeable(name: str, tensor: torch.nn.Parameter, sharded: bool) -> None:
    if is_lazy(tensor):
        raise ArgumentError(
            f"parameter {name} has no shape yet",
            cause="a lazy module (LazyLinear, LazyConv2d) that has not run yet",
            next_step="run one batch through the model under torch.no_grad() before you create the optimizer",
        )
    if getattr(tensor, "_is_fsdp_flattened", False):
        raise ArgumentError(
            f"parameter {name} is a flat parameter of FSDP",
            cause="the model is wrapped in FullyShardedDataParallel, which exchanges gradients itself",
            next_step="use FSDP2 (fully_shard) inside a node and DistributedOptimizer(..., world=...) between nodes",
        )
    if is_sharded(tensor) and not sharded:
        raise ArgumentError(
            f"parameter {name} is a DTensor: each rank holds a part of it",
            cause="FSDP2 (fully_shard) or tensor parallelism",
            next_step="pass world=topkube.new_world(ranks), with the ranks that hold the same part as this rank; see"
            " docs/training.md, Sharded models",
        )
    if tensor.dtype not in DTYPES:
        raise ArgumentError(
            f"parameter {name} has dtype {tensor.dtype}",
            cause="gradients of this type cannot be exchanged",
            next_step="use float32, bfloat16, float16, float64 or complex parameters; if it is frozen, leave it out of"
            " the optimizer",
        )
