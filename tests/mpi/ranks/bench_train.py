"""`topkube bench train`: the contenders that it compares, and those that it leaves out."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from topkube.bench import contenders, ddp, train
from topkube.bench.contenders import DDP, DDP_FP16, NO_EXCHANGE, Task
from topkube.training.exchange.autograd.backward_pass import current_pass
from topkube.world import World

TINY: dict[str, int] = {"layers": 1, "width": 32, "batch": 1}
ON_CPU = patch.object(contenders, "device", lambda: torch.device("cpu"))


def measure(world: World, names: list[str], overlap: str = "backward") -> tuple[dict[Any, Any], dict[str, Any], str]:
    """Return the rows by contender, the facts, and what this rank printed to stderr."""
    with ON_CPU, contextlib.redirect_stderr(io.StringIO()) as printed:
        report = train.measure(world, Task(overlap=overlap, **TINY), names, steps=2, rounds=2)
    assert not dist.is_initialized()
    return {row["contender"]: row for row in report.rows}, report.facts, printed.getvalue()


def case_the_command_compares_aggregations_with_ddp(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        with ON_CPU, contextlib.redirect_stdout(io.StringIO()) as printed:
            train.command("dense,auto,int8,onebit", **TINY, steps=2, rounds=3, json=path)
        assert path.exists() == (world.rank == 0)
        if world.rank != 0:
            return
        stored = json.loads(path.read_text())
    assert (stored["facts"]["steps"], stored["facts"]["times as fast as"]) == (6, DDP)
    rows = {row["contender"]: row for row in stored["rows"]}
    assert list(rows) == [NO_EXCHANGE, DDP, DDP_FP16, "dense", "auto", "int8", "onebit"]
    for name, row in rows.items():
        assert name in printed.getvalue()
        assert 0 < row["minimum_ms"] <= row["median_ms"] <= row["maximum_ms"]
        assert row["speed"] == rows[DDP]["median_ms"] / row["median_ms"]
        assert (row["sent_mb"] is None) == (name in (NO_EXCHANGE, DDP, DDP_FP16))
        assert (row["choice"] is not None) == (world.nodes > 1 and name in ("dense", "auto"))
    if world.nodes > 1:
        whole = 4 * stored["facts"]["parameters"] / 1e6  # with two nodes, each sends half of the gradients twice
        assert 0.99 * whole < rows["dense"]["sent_mb"] < 1.05 * whole
        assert 0 < rows["onebit"]["sent_mb"] < rows["int8"]["sent_mb"] < rows["dense"]["sent_mb"] / 3
    else:
        assert rows["dense"]["sent_mb"] == 0


def case_a_contender_that_cannot_train_is_left_out_on_all_ranks(world: World) -> None:
    rows, _, printed = measure(world, ["onebit", "nccl", "dense"], overlap="dear")
    assert list(rows) == [NO_EXCHANGE, DDP, DDP_FP16, "dense"]
    assert [line.split(" is left out")[0] for line in printed.splitlines() if "left out" in line] == (
        ["warning: onebit", "warning: nccl"] if world.rank == 0 else []
    )
    assert not current_pass.has_several


def case_a_failure_on_one_rank_is_one_of_all_ranks(world: World) -> None:
    def fail() -> None:
        if world.rank == world.size - 1:
            raise RuntimeError("out of memory\nmore lines")

    assert train.attempt(world, fail) == f"Rank {world.size - 1}: out of memory"
    assert train.attempt(world, lambda: None) == ""


def case_ddp_is_left_out_if_gloo_cannot_connect_a_rank(world: World) -> None:
    devices = {"GLOO_SOCKET_IFNAME": "none0"} if world.rank == world.size - 1 else {}
    with patch.dict("os.environ", devices), patch.object(ddp, "_CONNECT_SECONDS", 2.0):
        rows, facts, printed = measure(world, ["dense"])
    assert list(rows) == [NO_EXCHANGE, "dense"]
    assert facts["times as fast as"] == NO_EXCHANGE
    assert rows[NO_EXCHANGE]["speed"] == 1
    assert printed.count("the rows of DDP are left out") == (world.rank == 0)
