"""The loss of a batch, for the progress report."""

from __future__ import annotations

from typing import Any

import torch


class BatchLoss:
    """The loss of this rank's batch. A hook on `model` takes it from a model whose output is its loss, a single number.
    A script with another kind of model passes its loss to `note`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._value: torch.Tensor | None = None
        self._hook: Any = None

    def watch(self) -> None:
        """Take the loss from every forward of the model from now on."""
        self._hook = self._model.register_forward_hook(self._take_output)

    def unwatch(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def note(self, value: torch.Tensor) -> None:
        """Note the loss that the script has computed."""
        self._value = value.detach()

    def take(self) -> torch.Tensor | None:
        """Return the loss of the batch, and forget it; None if it is unknown."""
        value, self._value = self._value, None
        return value

    def _take_output(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # The loss of an evaluation requires no gradient.
        if isinstance(output, torch.Tensor) and output.ndim == 0 and output.requires_grad:
            self.note(output)
