"""Checkpoints on several ranks: all ranks learn of a failure on one rank at the same step; weights for other programs;
residuals after a change of the world."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import topkube
from ranks.training.scene import (
    build_network,
    build_optimizer,
    compute_loss,
    copy_weights,
    draw_samples,
    sum_pieces,
    sum_residuals,
)
from topkube.errors import CheckpointError, StorageError
from topkube.settings import Settings
from topkube.training import run_checkpoints
from topkube.training.checkpoint import reader
from topkube.training.checkpoint import save as save_module
from topkube.training.checkpoint.format import state_file
from topkube.training.checkpoint.format.state_file import FileDigest, Tally, read_state, write_state
from topkube.training.checkpoint.residual_shares import recut
from topkube.world import World


class ScriptObject:
    """An object of the script with its own state. If `can_load` is False, loading its state fails."""

    def __init__(self, state: Any = 0, can_load: bool = True) -> None:
        self.state, self.can_load = state, can_load

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.can_load:
            raise KeyError("state")
        self.state = state["state"]


@contextmanager
def make_shared_directory(world: World) -> Iterator[str]:
    """Yield a directory that all ranks share. A rank that fails leaves the directory in place, and does not enter the
    barrier: other ranks may still use the directory."""
    directory = world.comm.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    yield directory
    world.comm.Barrier()
    if world.rank == 0:
        shutil.rmtree(directory)


def train(
    directory: str, steps: int, script_object: ScriptObject, model: torch.nn.Module | None = None
) -> topkube.training.Run:
    """Train until step `steps`. Resume from the newest checkpoint in `directory` if there is one. Save a checkpoint
    after every second step and at the end; keep the newest two."""
    model = model or build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.1)
    settings = Settings(checkpoint_directory=directory, checkpoint_every=2, checkpoint_keep=2)
    x, y = draw_samples(8)
    with topkube.checkpointing(model, optimizer, settings=settings, script_object=script_object) as run:
        for inputs, targets in run.progress([(x, y)] * steps, total=steps):
            compute_loss(model, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def list_checkpoint_names(directory: str) -> list[str]:
    """Return the names of all checkpoints, also of unfinished and damaged checkpoints."""
    return sorted(path.name for path in Path(directory).glob("*step-*"))


def case_if_the_disk_of_one_rank_is_full_no_rank_has_the_checkpoint(world: World) -> None:
    def write_or_refuse(path: Path, *arguments: Any) -> Any:
        if world.rank == world.size - 1 and "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_state(path, *arguments)

    warnings: list[str] = []
    with make_shared_directory(world) as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "write_state", write_or_refuse)
        patch.setattr(run_checkpoints, "warn", warnings.append)
        assert train(directory, 5, ScriptObject()).failed_checkpoints == 1
        world.comm.Barrier()
        assert list_checkpoint_names(directory) == ["step-00000002.run-00001", "step-00000005.run-00001"]
    reason = "No space left on device" if world.rank == world.size - 1 else f"read the output of rank {world.size - 1}"
    is_named_here = world.rank in (0, world.size - 1)
    assert [reason in text for text in warnings] == [True] * is_named_here, (
        "rank 0 names the rank, which has the reason"
    )


def case_a_directory_that_nodes_do_not_share_is_refused_at_the_start(world: World) -> None:
    """Otherwise no checkpoint could be saved, and training would continue without."""
    last = world.size - 1
    with make_shared_directory(world) as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_file, "SEEN_WITHIN_SECONDS", 0.1)
        own = Path(directory, "own" if world.rank == last else "others")
        own.mkdir(exist_ok=True)
        expected = "not the same on all nodes" if world.rank == last else f"cannot be used: rank {last} failed"
        with pytest.raises(CheckpointError, match=expected):
            train(str(own), 2, ScriptObject())


def case_a_rank_that_reads_longer_than_the_deadline_is_waited_for_while_it_reads(world: World) -> None:
    def read_slowly(path: Path, expected: FileDigest, tally: Tally) -> Any:
        for _ in range(9 if world.rank == world.size - 1 and path.name == "shared.pt" else 0):
            time.sleep(0.5)
            tally.count(1)
        return read_state(path, expected, tally)

    with make_shared_directory(world) as directory, pytest.MonkeyPatch.context() as patch:
        train(directory, 2, ScriptObject())
        patch.setattr(reader, "read_state", read_slowly)
        patch.setattr(world, "deadline_seconds", 3.0)
        assert train(directory, 2, ScriptObject()).step == 2


def case_a_state_that_cannot_be_saved_on_rank_0_ends_the_run_on_all(world: World) -> None:
    with make_shared_directory(world) as directory:
        expected = "script_object.*cannot be saved: it is a builtins" if world.rank == 0 else "step 2 .*: rank 0 failed"
        with pytest.raises(CheckpointError, match=expected):
            train(directory, 7, ScriptObject(print))  # a function cannot be saved
        world.comm.Barrier()
        assert list_checkpoint_names(directory) == []


def case_a_resume_that_fails_on_one_rank_leaves_all_as_they_were(world: World) -> None:
    with make_shared_directory(world) as directory:
        train(directory, 2, ScriptObject())
        model, last = build_network(), world.size - 1
        before = copy_weights(model)
        expected = "belongs to another model" if world.rank == last else f"cannot be resumed from: rank {last} failed"
        with pytest.raises(CheckpointError, match=expected):
            train(directory, 4, ScriptObject(can_load=world.rank != last), model)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert train(directory, 4, ScriptObject()).step == 4


def case_weights_are_written_for_other_programs_or_the_write_fails_on_all_ranks(world: World) -> None:
    model = build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.1)
    with make_shared_directory(world) as directory, topkube.checkpointing(model, optimizer, settings=Settings()) as run:
        path = Path(directory) / "model.safetensors"
        run.save_weights(path)
        world.comm.Barrier()
        stored = load_file(path)
        assert stored.keys() == model.state_dict().keys()
        assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())
        with pytest.raises(StorageError):  # on the ranks that write nothing, too
            run.save_weights(Path(directory) / "missing" / "model.safetensors")


def recut_state(optimizer: topkube.DistributedOptimizer, world: World) -> dict[str, Any]:
    """Return the state that the optimizer would load after a change of the world: every rank has all pieces of its
    node's residual. The world does not change in this test. The function collects the residuals of all ranks and
    applies `recut` to them."""
    state = optimizer.state_dict()
    residuals = state["topkube"]["residuals"]
    saved_residuals = world.comm.allgather(residuals)
    cut = recut(saved_residuals, residuals["copy"], residuals["copies"])
    return {**state, "topkube": {**state["topkube"], "residuals": cut}}


def case_residuals_count_once_after_two_changes_of_the_world(world: World) -> None:
    """The sum of all residuals stays the same. The second change of the world is tested twice: immediately after the
    first change, and after a step that sent a part of the residuals."""
    model = build_network()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.1)

    def step() -> None:
        x, y = draw_samples(8)
        compute_loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def sum_recut_residuals(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the sum of the residuals over nodes. All ranks of a node have the same pieces, so only those of the
        first rank count."""
        is_first = world.rank == world.node_ranks[world.node][0]
        return sum_pieces(state["topkube"]["residuals"]["pieces"] if is_first else {}, model)

    step()
    owed = sum_residuals(optimizer, model)
    if world.nodes > 1:  # a single node sends nothing to other nodes, so it keeps nothing back
        assert any(values.any() for values in owed.values())
    optimizer.load_state_dict(recut_state(optimizer, world))
    torch.testing.assert_close(sum_recut_residuals(recut_state(optimizer, world)), owed)
    step()
    pieces = optimizer.state_dict()["topkube"]["residuals"]["pieces"]
    for name, parameter in model.named_parameters():
        kept = world.comm.allreduce(sum(values.numel() for _, values in pieces.get(name, [])))
        assert kept <= parameter.numel() * world.nodes, f"{name}: a rank keeps what belongs to another rank of its node"
    torch.testing.assert_close(sum_recut_residuals(recut_state(optimizer, world)), sum_residuals(optimizer, model))
