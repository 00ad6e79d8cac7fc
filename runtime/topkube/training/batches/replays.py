"""The running statistics of models, which stay unchanged while a rank replays a batch of weight zero."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of the buffers in which torch's normalizations, and those that follow them, keep running statistics."""


@dataclass(eq=False)
class _Saved:
    """A module before a replayed batch, with its buffers of statistics and copies of them."""

    module: torch.nn.Module
    was_training: bool
    values: list[tuple[torch.Tensor, torch.Tensor]]


class KeptStatistics:
    """The running statistics of all models of this process: saved before the forward of a replayed batch, and restored
    after it.

    The models are found among the objects of the process, because a loop over batches has no reference to the model.
    Hooks on modules would find them too, but compiled models skip hooks, or compile again. SyncBatchNorm is not
    included: its statistics are those of all ranks' batches, the same on every rank.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] | None = None
        self._saved: list[_Saved] = []

    def keep(self) -> None:
        """Save the statistics. Models are searched once, until `forget_models`."""
        if self._modules is None:
            self._modules = [weakref.ref(module) for module in _find_modules_with_statistics()]
        modules = [module for reference in self._modules if (module := reference()) is not None]
        self._saved = [_Saved(module, module.training, _copy_statistics(module)) for module in modules]

    def restore(self) -> None:
        """Restore the statistics of modules in training mode: other modules do not change their statistics."""
        for saved in self._saved:
            if saved.was_training or saved.module.training:
                for buffer, value in saved.values:
                    buffer.data.copy_(value)  # .data: autograd has saved the buffer, and backward does not read it

    def release(self) -> None:
        """Restore the statistics for the last time."""
        self.restore()
        self._saved = []

    def forget_models(self) -> None:
        """Search models again when statistics are saved the next time."""
        self._modules = None


def _find_modules_with_statistics() -> list[torch.nn.Module]:
    frozen = gc.get_freeze_count()
    if frozen:  # a script that called gc.freeze(): frozen objects are not listed
        gc.unfreeze()
    try:
        # isinstance() would ask proxy objects for their __class__, which may run code of the script.
        modules = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    finally:
        if frozen:
            gc.freeze()
    return [
        module
        for module in modules
        if not isinstance(module, torch.nn.SyncBatchNorm) and any(name in _list_buffers(module) for name in STATISTICS)
    ]


def _list_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    try:
        return dict(module.named_buffers(recurse=False))
    except AttributeError:  # its __init__ has not run yet
        return {}


def _copy_statistics(module: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    named = _list_buffers(module).items()
    return [(buffer, buffer.detach().clone()) for name, buffer in named if name in STATISTICS and not is_lazy(buffer)]
