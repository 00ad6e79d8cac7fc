"""Mistakes in the options of `topkube bench train`. tests/mpi/test_bench_train.py measures on real ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from topkube.bench.contenders import list_aggregations
from topkube.cli.entry import run_app


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--aggregations", "dense,int5"], ["unknown algorithm 'int5'", "next: did you mean"]),
        (["--aggregations", " , "], ["no aggregation is named", "next: pass names"]),
        (["--width", "30"], ["width is 30", "next: pass a multiple of 4, for example 32"]),
        (["--overlap", "none"], ["overlap is 'none'", "next: choose one of backward, dear"]),
        (["--rounds", "0"], ["--rounds"]),
    ],
)
def test_mistakes_end_with_2_and_the_next_step(
    options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["bench", "train", *options]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in parts), printed


def test_names_count_once_in_their_order() -> None:
    assert list_aggregations("int8, dense,int8,") == ["int8", "dense"]


def test_the_help_does_not_load_torch() -> None:
    code = "import sys, topkube.bench.train; print({'torch', 'mpi4py.MPI'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True)
    assert ended.stdout == "set()\n"
