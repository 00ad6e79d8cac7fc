"""Fixtures of the MPI tests: worlds start once per (MPI, layout, modules) and their cases are reported one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import worlds

_outcomes: dict[tuple[str, tuple[int, ...], str, str], dict[str, str]] = {}


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The socket of a process that forks ranks of an MPI. One process per MPI serves all tests, from its first use."""
    with ExitStack() as servers:

        @functools.cache
        def start(mpi: str) -> Path:
            if reason := worlds.explain_missing(mpi):
                pytest.fail(reason)
            return servers.enter_context(worlds.start_forks(mpi, tmp_path_factory.mktemp("forks")))

        yield start


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory, forks: Callable[[str], Path]):
    """A function that returns the error of a case, "" if the case passed. A world runs when its first case is read."""

    def read_outcome(
        modules: str, mpi: str, layout: tuple[int, ...], case: str, links: str = "auto", connections: int = 0
    ) -> str:
        key = (mpi, layout, modules, links, connections)
        if key not in _outcomes:
            directory = tmp_path_factory.mktemp("world")
            _outcomes[key] = worlds.run_cases(
                mpi,
                layout,
                modules,
                directory,
                forks=forks(mpi),
                environment={"TOPKUBE_LINKS": links, "TOPKUBE_CONNECTIONS": str(connections)},
            )
        outcomes = _outcomes[key]
        return outcomes.get(case, outcomes.get("the world ends well", "the case did not run"))

    return read_outcome
