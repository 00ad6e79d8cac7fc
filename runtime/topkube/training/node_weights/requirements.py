"""What error feedback in the weights requires of a model."""

from __future__ import annotations

from typing import Any

import torch

from topkube.errors import ArgumentError
from topkube.training.exchange.buckets.parameter import Parameter, is_sharded


def check_parameters(parameters: list[Parameter], algorithm: str) -> None:
    """Raise ArgumentError for parameters that cannot be exchanged in this way."""
    for parameter in parameters:
        tensor: Any = parameter.tensor
        problem = (
            "is a DTensor"
            if is_sharded(tensor)
            else f"is on {tensor.device}"
            if tensor.device.type != "cpu"
            else f"has dtype {tensor.dtype}"
            if tensor.dtype != torch.float32
            else f"has gradients of {parameter.gradient_dtype}"
            if parameter.gradient_dtype != torch.float32
            else ""
        )
        if problem:
            raise ArgumentError(
                f"{algorithm} does not support this model: parameter {parameter.name} {problem}",
                cause=f"{algorithm} exchanges weights that are float32 tensors in host memory",
                next_step="choose another algorithm, such as dense",
            )
