"""The parameters of an optimizer by name: what can be exchanged, and what is refused before anything is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from topkube.errors import ArgumentError
from topkube.training.buckets import Parameter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> list[Parameter]:
    """The optimizer's parameters with their names, in the order in which they are named. Raises ArgumentError where
    one has no name, two names, another's name, or a dtype that is not exchanged."""
    wanted = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    names, tensors = {}, set()
    for entry in named_parameters:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ArgumentError(
                "named_parameters must yield (name, parameter) pairs", next_step="pass model.named_parameters()"
            )
        name, tensor = entry
        if name in names or id(tensor) in tensors:
            raise ArgumentError(
                f"parameter {name} is named twice",
                cause="two models whose parameters have equal names, or a parameter listed twice",
                next_step="give every parameter one name of its own, for example f'generator.{name}'",
            )
        names[name] = tensor
        tensors.add(id(tensor))
    if missing := sum(key not in tensors for key in wanted):
        raise ArgumentError(
            f"{missing} of the optimizer's {len(wanted)} parameters have no name in named_parameters",
            next_step="pass model.named_parameters() of the model whose parameters the optimizer got",
        )
    chosen = [(name, tensor) for name, tensor in names.items() if id(tensor) in wanted]
    for name, tensor in chosen:
        if tensor.dtype not in DTYPES:
            raise ArgumentError(
                f"parameter {name} has dtype {tensor.dtype}", next_step="use float32, bfloat16 or float16 parameters"
            )
    return [Parameter(index, name, tensor) for index, (name, tensor) in enumerate(chosen)]
