"""Fixtures of the MPI tests: worlds start once per (MPI, layout, modules) and their cases are reported one by one."""

from __future__ import annotations

import pytest
import worlds

_found: dict[tuple[str, tuple[int, ...], str], dict[str, str]] = {}


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
