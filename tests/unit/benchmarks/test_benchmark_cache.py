"""benchmarks/cache.py in several runs: each run measures what the runs before have not measured."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import cache


def build_row(measurement: cache.Measurement) -> dict[str, Any]:
    return {"problem": measurement.problem.name, "contender": measurement.contender.label, "link": measurement.rate}


def test_a_resumed_run_measures_only_what_the_file_lacks_and_keeps_the_order_of_the_tables() -> None:
    whole = cache.plan_measurements(list(cache.PROBLEMS), [])
    slow = [m for m in whole if m.rate == cache.SLOW_LINK]
    assert slow
    assert all(m.problem.name != "files-3k" and m.contender is not cache.OURS_DISK for m in slow)

    stored: dict[str, Any] = {}
    for measurement in reversed(whole):
        assert not measurement.is_stored(stored)
        stored = cache.add_rows(stored, measurement.problem, [build_row(measurement)], [])
        assert measurement.is_stored(stored)
    assert stored["first"] == [build_row(measurement) for measurement in whole]
    assert list(stored["problems"]) == [problem.name for problem in cache.PROBLEMS]


def test_a_peer_that_cannot_be_imported_is_reported_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_libraries(kind: str) -> None:
        if kind == "Mosaic":
            raise ImportError("No module named 'catalogue'")

    module = SimpleNamespace(import_libraries=import_libraries)
    monkeypatch.setitem(sys.modules, "datacache.contenders", module)  # type: ignore[arg-type]
    kinds = {m.contender.kind for m in cache.leave_out_missing(cache.plan_measurements(list(cache.PROBLEMS), []))}
    assert kinds == {"OurCache", "FileCache", "LitData"}
    assert "skipping Mosaic (No module named 'catalogue'): pip install" in capsys.readouterr().out


def test_nothing_is_measured_if_the_time_is_too_short() -> None:
    """The bench is None, so that a measurement would raise an error."""
    waiting = cache.plan_measurements(list(cache.PROBLEMS), ["TopKube"])
    assert cache.measure_all(None, waiting, {"first": []}, 0.0, print) == {"first": []}  # type: ignore[arg-type]
