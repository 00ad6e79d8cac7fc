"""The options and fixtures of all tests."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No property fails because the machine is busy, or because chance drew many examples that do not fit. On a new machine,
# the first text that is drawn takes seconds, because Hypothesis writes a table of Unicode. A test that suppresses other
# checks adds them to these: settings.default.suppress_health_check.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="properties and explorations try more (tests/unit/thorough.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("thorough"):
        os.environ["TEST_THOROUGHLY"] = "1"  # before modules of tests are imported, here and in xdist's processes
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a script's background job (&). The processes that tests start would ignore Ctrl-C too.
        signal.signal(signal.SIGINT, signal.default_int_handler)


_WORLD = re.compile(r"(tests/mpi/[^\[]+\[(?:mpich|openmpi)-[0-9+]+)-")
"""The tests that the ranks of one world run (tests/mpi/worlds.py)."""


def _find_scope(nodeid: str) -> str:
    world = _WORLD.match(nodeid)
    return world[1] if world else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With --dist loadscope, the tests of a file or of a world run in one process: they share what they start."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrWorld(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _find_scope(nodeid)

    return ByFileOrWorld(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --dist loadscope, spread the worlds of MPI ranks, which keep processors busy, evenly over the first three
    quarters of the run: most other tests wait for processes and for clocks."""
    if config.getoption("dist", "no") != "loadscope":
        return
    scopes = [(item.nodeid.startswith("tests/mpi/"), _find_scope(item.nodeid)) for item in items]
    order = list(dict.fromkeys(scopes))
    counts, seen, place = Counter(is_mpi for is_mpi, _ in order), Counter[bool](), {}
    for scope in order:
        seen[scope[0]] += 1
        place[scope] = seen[scope[0]] / counts[scope[0]] * (0.75 if scope[0] else 1.0)
    ranked = sorted(zip(scopes, items, strict=True), key=lambda pair: place[pair[0]])
    items[:] = [item for _, item in ranked]
