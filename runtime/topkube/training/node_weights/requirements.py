"""The requirements of error feedback in the weights for a model."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from topkube.errors import ArgumentError
from topkube.training.exchange.buckets.parameter import is_sharded
from topkube.training.node_weights.trained_weights import TrainedWeights


def check_parameters(trained: TrainedWeights, algorithm: str) -> None:
    """Raise ArgumentError for weights that cannot be exchanged in this way. 16-bit parameters need float32 masters."""
    for parameter, of_model in zip(trained.parameters, trained.of_model, strict=True):
        tensor: Any = parameter.tensor
        gradient, has_master = of_model.gradient_dtype, parameter is not of_model
        problems = {
            "is a DTensor": is_sharded(tensor),
            f"is on {tensor.device}": tensor.device.type not in ("cpu", "cuda"),
            f"has dtype {tensor.dtype}": tensor.dtype != torch.float32,
            f"has gradients of {gradient}": gradient != (of_model.tensor.dtype if has_master else torch.float32),
        }
        if problem := next((text for text, is_present in problems.items() if is_present), None):
            is_narrow = tensor.dtype in (torch.bfloat16, torch.float16)
            raise ArgumentError(
                f"{algorithm} does not support this model: parameter {parameter.name} {problem}",
                cause=f"{algorithm} exchanges weights that are float32 tensors, in host memory or on an NVIDIA GPU",
                next_step="wrap the optimizer in topkube.training.MasterWeights, which keeps float32 masters, or choose"
                " another algorithm, such as dense"
                if is_narrow and not is_sharded(tensor)
                else "choose another algorithm, such as dense",
            )
    _refuse_shared_memory(trained, algorithm)


def _refuse_shared_memory(trained: TrainedWeights, algorithm: str) -> None:
    """Raise ArgumentError if two parameters share memory: an exchange would add its result to both."""
    ends = [
        (tensor.device, start, start + tensor.nbytes, parameter.name)
        for parameter in trained.of_model
        if (tensor := parameter.tensor).is_contiguous() and tensor.numel()
        for start in [tensor.data_ptr()]
    ]
    ends.sort(key=lambda entry: (str(entry[0]), entry[1]))
    for (device, _, end, name), (other_device, start, _, other_name) in itertools.pairwise(ends):
        if device == other_device and start < end:
            raise ArgumentError(
                f"{algorithm} does not support this model: parameters {name} and {other_name} share memory",
                cause="the model ties two weights by their data, so they are two parameters",
                next_step="tie them as one parameter (decoder.weight = encoder.weight) before the optimizer is created,"
                " or choose another algorithm, such as dense",
            )
