"""The check of a loaded checkpoint, and its load into a model and its optimizer: completely or not at all."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from topkube.errors import CheckpointError
from topkube.training.batches.generators import check_generators
from topkube.training.checkpoint.format.state_file import Damaged
from topkube.training.checkpoint.reader import LoadedCheckpoint
from topkube.training.optimizers.wrapper import OptimizerWrapper

_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "epoch": (int,),
    "model": (Mapping,),
    "optimizer": (Mapping,),
    "sampler": (Mapping, type(None)),
    "more": (Mapping,),
}


class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def list_optimizer_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the class names of a wrapped optimizer, the outermost first: ["MasterWeights", "Adam"]. Modules are left
    out, because a later version may move a class to another module."""
    names = [type(optimizer).__qualname__]
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.inner
        names.append(type(optimizer).__qualname__)
    return names


def check_contents(loaded: LoadedCheckpoint) -> None:
    """Raise Damaged unless `loaded` holds everything that a run resumes from."""
    for name, kinds in _FIELDS.items():
        if name not in loaded.shared:
            raise Damaged(f"{loaded.name}/shared.pt holds no {name!r}: it is not a checkpoint of a run")
        if not isinstance(loaded.shared[name], kinds):
            raise Damaged(f"{loaded.name}/shared.pt holds a {type(loaded.shared[name]).__name__} as {name!r}")
    if not isinstance(loaded.shared["optimizer"].get("topkube"), Mapping):
        raise Damaged(f"{loaded.name}/shared.pt holds no state of a DistributedOptimizer")
    if problem := _find_problem(loaded.own.get("residuals")):
        raise Damaged(f"{loaded.name} holds residuals {problem}")
    if "generators" in loaded.own:
        try:
            check_generators(loaded.own["generators"])
        except Exception as error:
            raise Damaged(f"{loaded.name} holds states that are not those of generators: {error}") from error


def _find_problem(residuals: Any) -> str:
    """Return the problem with a rank's "residuals"; "" if there is none."""
    if not isinstance(residuals, Mapping) or not {"copy", "copies", "pieces"} <= residuals.keys():
        return "without copy, copies or pieces"
    parts = [residuals["pieces"], residuals.get("owners", {})]
    if not all(isinstance(pieces, Mapping) for pieces in parts):
        return "whose pieces have no names"
    if not all(isinstance(name, str) for name in residuals.get("whole", ())):
        return "whose whole pieces have no names"
    for name, entries in itertools.chain.from_iterable(pieces.items() for pieces in parts):
        for entry in entries:
            if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[0], int)):
                return f"of {name} without their place"
            if not isinstance(entry[1], torch.Tensor) or entry[1].ndim != 1:
                return f"of {name} that are no vector"
    return ""


def check_optimizer(loaded: LoadedCheckpoint, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Raise CheckpointError if the checkpoint contains the state of an optimizer of another class. Checkpoints of
    format 1 do not contain the class."""
    saved, own = loaded.shared.get("optimizer_names"), list_optimizer_names(optimizer)
    if saved is None or saved == own:
        return
    saved_name, own_name = _join_names(saved), _join_names(own)
    raise CheckpointError(
        f"the checkpoint {loaded.name} in {directory} holds the state of {saved_name}, this script trains with"
        f" {own_name}",
        cause="the script's optimizer changed since the checkpoint was written",
        next_step=f"train with {saved_name} again; or give the run a directory of its own (spec.checkpoint.path) and"
        f" load torch.load('{directory}/{loaded.name}/shared.pt', weights_only=True)['model'] into the model:"
        f" {own_name} then starts afresh from these weights",
    )


def _join_names(names: Any) -> str:
    """Return ["MasterWeights", "Adam"] as MasterWeights(Adam), without the outermost name, DistributedOptimizer."""
    inner = [str(name) for name in names][1:] or [str(name) for name in names]
    return "(".join(inner) + ")" * (len(inner) - 1)


@contextmanager
def load_all_or_none(items: Sequence[Stateful]) -> Iterator[None]:
    """Return a context in which `items` load their states. If the context raises an error, the items load their earlier
    states again, which are kept in host memory."""
    earlier_states = [_copy_to_host(item.state_dict()) for item in items]
    try:
        yield
    except BaseException as error:
        for item, state in zip(items, earlier_states, strict=True):
            try:
                item.load_state_dict(state)
            except Exception as restore_error:
                error.add_note(f"{type(item).__name__} does not take its own state back: {restore_error}")
        raise


def _copy_to_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        copied = copy.copy(state)  # of the same class, with its attributes
        for key, value in state.items():
            copied[key] = _copy_to_host(value)
        return copied
    if type(state) in (list, tuple):
        return type(state)(_copy_to_host(value) for value in state)
    return copy.deepcopy(state)
