"""Fixtures of the MPI tests: worlds start once per (MPI, layout, modules) and their cases are reported one by one."""

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


def cases_of(modules: str) -> list[str]:
    """Names of the cases in ranks/MODULE.py, without importing it: it needs ranks."""
    names = []
    for module in modules.split(","):
        tree = ast.parse((HERE / "ranks" / f"{module.replace('.', '/')}.py").read_text())
        names += [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "case_"]
    return names


def parameters(modules: str, layouts: dict[str, list[tuple[int, ...]]] = LAYOUTS) -> list[object]:
    """(mpi, layout, case) for every case of some modules (separated by commas) in every world."""
    return [
        pytest.param(mpi, layout, case, id=f"{mpi}-{'+'.join(map(str, layout))}-{case.removeprefix('case_')}")
        for mpi, chosen in layouts.items()
        for layout in chosen
        for case in cases_of(modules)
    ]


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory):
    """What went wrong in a case, "" where nothing did. The world runs when its first case is asked for."""

    def of(modules: str, mpi: str, layout: tuple[int, ...], case: str) -> str:
        reason = worlds.missing(mpi)
        if reason:
            pytest.fail(reason)
        key = (mpi, layout, modules)
        if key not in _found:
            _found[key] = worlds.run_cases(mpi, layout, modules, tmp_path_factory.mktemp("world"))
        found = _found[key]
        return found.get(case, found.get("the world ends well", "the case did not run"))

    return of
