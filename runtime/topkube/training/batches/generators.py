"""The states of all random generators that a script may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def read_generators() -> dict[str, Any]:
    """Return the states of torch's, NumPy's and Python's random generators, in types that a safe load allows. "cuda"
    holds those of the GPUs that this process sees, if it uses GPUs, and the number of its current GPU."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  (the state of scripts that use it)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and _is_cuda_started():
        gpus = range(torch.cuda.device_count())
        states["cuda"] = {
            "current": torch.cuda.current_device(),
            "gpus": [torch.cuda.get_rng_state(gpu) for gpu in gpus],
        }
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Restore states that `read_generators` returned. If this process sees another number of GPUs than before, only the
    state of the current GPU is restored."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(_decode_numpy_state(states))  # noqa: NPY002
    random.setstate(_decode_python_state(states))
    cuda = states.get("cuda")
    if cuda is None or not torch.cuda.is_available():
        return
    if len(cuda["gpus"]) == torch.cuda.device_count():
        for gpu, state in enumerate(cuda["gpus"]):
            torch.cuda.set_rng_state(state, gpu)
    else:
        torch.cuda.set_rng_state(cuda["gpus"][cuda["current"]], torch.cuda.current_device())


def _is_cuda_started() -> bool:
    """Return True if this process uses CUDA. Reading the state of a generator would start CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def check_generators(states: dict[str, Any]) -> None:
    """Raise an error if `set_generators` would refuse `states`; no generator of the process changes."""
    torch.Generator().set_state(states["torch"])
    np.random.RandomState().set_state(_decode_numpy_state(states))
    random.Random().setstate(_decode_python_state(states))
    if (cuda := states.get("cuda")) is not None and not 0 <= cuda["current"] < len(cuda["gpus"]):
        raise ValueError("no state of the current GPU")


def _decode_numpy_state(states: dict[str, Any]) -> Any:
    name, keys, *rest = states["numpy"]
    return (name, keys.numpy().astype(np.uint32), *rest)


def _decode_python_state(states: dict[str, Any]) -> Any:
    version, internal, gauss = states["python"]
    return (version, tuple(internal), gauss)
