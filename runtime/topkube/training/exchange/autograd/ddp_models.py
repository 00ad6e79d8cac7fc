"""Models in torch's DistributedDataParallel, which exchanges gradients itself."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from topkube.errors import TrainingError


def find_ddp_models(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the models of this process that exchange the gradients of one of `parameters`: usually one model.
    Models that `gc.freeze()` hides are not found."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    wanted = {id(parameter) for parameter in parameters}
    classes: list[type[DistributedDataParallel]] = [DistributedDataParallel]
    for model_class in classes:  # the list grows during the loop
        classes += model_class.__subclasses__()
    kinds = set(classes)
    models = [candidate for candidate in gc.get_objects() if type(candidate) in kinds]
    return [model for model in models if any(id(own) in wanted for own in _list_exchanged(model))]


def refuse_ddp_models(parameters: Iterable[torch.Tensor]) -> None:
    """Raise TrainingError if DistributedDataParallel exchanges the gradients of one of `parameters`, unless it is under
    `no_sync()`: at the end of backward it would replace what a distributed optimizer has exchanged."""
    if any(model.require_backward_grad_sync for model in find_ddp_models(parameters)):
        raise TrainingError(
            "the model is in DistributedDataParallel, which replaces the gradients that the DistributedOptimizer has"
            " exchanged",
            cause="both exchange the gradients of the same parameters; accelerate and Lightning also wrap models in"
            " DistributedDataParallel",
            next_step="train the model itself and delete the DistributedDataParallel around it; or keep it, with"
            " topkube.ddp_hook and a plain torch optimizer",
        )


def _list_exchanged(model: DistributedDataParallel) -> list[torch.Tensor]:
    named = model.module.named_parameters()
    return [parameter for name, parameter in named if name not in model.parameters_to_ignore]
