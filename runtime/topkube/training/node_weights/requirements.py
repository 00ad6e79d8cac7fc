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
        problems = {
            "is a DTensor": is_sharded(tensor),
            f"is on {tensor.device}": tensor.device.type != "cpu",
            f"has dtype {tensor.dtype}": tensor.dtype != torch.float32,
            f"has gradients of {parameter.gradient_dtype}": parameter.gradient_dtype != torch.float32,
        }
        if problem := next((text for text, is_present in problems.items() if is_present), None):
            raise ArgumentError(
                f"{algorithm} does not support this model: parameter {parameter.name} {problem}",
                cause=f"{algorithm} exchanges weights that are float32 tensors in host memory",
                next_step="choose another algorithm, such as dense",
            )
