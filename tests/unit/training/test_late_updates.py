"""Updates in the next forward (DeAR), with gathers that fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from topkube.errors import CollectiveError
from topkube.training.exchange.late.late_updates import LateUpdates
from topkube.training.optimizers.step_guard import StepGuard


class FailingGathers:
    """Gathers that fail until `is_repaired`."""

    is_repaired = False

    def gather(self, parts: Any) -> None:
        pass

    def finish_gather(self, parts: Any) -> None:
        if not self.is_repaired:
            raise CollectiveError("a rank is gone")


def test_weights_whose_gather_has_failed_are_never_read_as_nan() -> None:
    layer, gathers = nn.Linear(3, 1, bias=False), FailingGathers()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    guard = StepGuard(optimizer)
    late = LateUpdates(gathers, optimizer, guard.allow_step)  # type: ignore[arg-type]
    try:
        before, x = layer.weight.detach().clone(), torch.ones(1, 3)
        layer(x).sum().backward()
        parameter = SimpleNamespace(tensor=layer.weight, deliver=lambda: None)
        halved = SimpleNamespace(is_gathered=False, ranges=[])
        source = SimpleNamespace(part=SimpleNamespace(parameters=[parameter]), halved=halved)
        late.begin_gathers([source])  # type: ignore[list-item]
        late.step()
        for use in (lambda: layer(x), lambda: layer.weight.sum(), lambda: layer.state_dict()["weight"].sum()):
            with pytest.raises(CollectiveError):
                use()
        gathers.is_repaired = True
        assert torch.equal(layer.weight.detach(), before - 1)
    finally:
        gathers.is_repaired = True
        late.end()
