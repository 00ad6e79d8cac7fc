"""The states of all random generators that a script may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generators() -> dict[str, Any]:
    """The states of torch's, NumPy's and Python's random generators, in types that a safe load allows."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  (the state of scripts that use it)
    return {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def set_generators(states: dict[str, Any]) -> None:
    """Puts back what `generators` gave."""
    torch.set_rng_state(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
