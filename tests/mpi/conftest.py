"""Fixtures of the MPI tests: worlds start once per (MPI, layout, module) and their cases are reported one by one."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import worlds  # noqa: E402  the folder of this file comes first

# Ranks of each node. Open MPI runs the layouts that differ in kind; MPICH runs all.
LAYOUTS = {
    "mpich": [(1,), (2,), (1, 1), (4,), (2, 2), (1, 1, 1, 1), (3, 1), (2, 2, 2)],
    "openmpi": [(2,), (2, 2), (3, 1)],
}
_found: dict[tuple[str, tuple[int, ...], str], dict[str, str]] = {}


def cases_of(module: str) -> list[str]:
    """Names of the cases in ranks/module.py, without importing it: it needs ranks."""
    tree = ast.parse((HERE / "ranks" / f"{module}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")]


def parameters(module: str) -> list[object]:
    """(mpi, layout, case) for every case of a module in every world."""
    return [
        pytest.param(mpi, layout, case, id=f"{mpi}-{'+'.join(map(str, layout))}-{case.removeprefix('case_')}")
        for mpi, layouts in LAYOUTS.items()
        for layout in layouts
        for case in cases_of(module)
    ]


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory):
    """What went wrong in a case, "" where nothing did. The world runs when its first case is asked for."""

    def of(module: str, mpi: str, layout: tuple[int, ...], case: str) -> str:
        reason = worlds.missing(mpi)
        if reason:
            pytest.fail(reason)
        key = (mpi, layout, module)
        if key not in _found:
            _found[key] = worlds.run_cases(mpi, layout, module, tmp_path_factory.mktemp("world"))
        found = _found[key]
        return found.get(case, found.get("the world ends well", "the case did not run"))

    return of
