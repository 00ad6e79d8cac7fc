"""The history that a client draws from the status of a job on a cluster."""

from __future__ import annotations

import math

from topkube.job import Progress
from topkube.sdk.display import add_progress, is_notebook
from topkube.telemetry.bar import describe_progress
from topkube.telemetry.history import History


def _build_progress(second: int, step: int, loss: str | None = None) -> Progress:
    time = f"2026-01-01T00:00:{second:02}Z"
    return Progress(step=step, total_steps=100, loss=loss, samples_per_second=50.0, updated_at=time)


def test_statuses_become_a_history_with_rate_loss_and_time_left() -> None:
    history = History()
    for progress in (
        None,
        Progress(),
        _build_progress(0, 10, "2.5"),
        _build_progress(0, 10, "2.5"),
        _build_progress(10, 30, "1.25"),
        _build_progress(20, 50),
    ):
        add_progress(history, progress)
    assert list(history.steps) == [10, 30, 50]
    assert list(history.losses[:2]) == [2.5, 1.25]
    assert math.isnan(history.losses[2])
    assert history.samples_per_second == 50.0
    assert history.estimate_seconds_left() == 25.0
    assert describe_progress(history, 2, 4) == "step 50/100  50 samples/s  25 s left"


def test_a_loss_that_is_not_a_number_is_left_out() -> None:
    history = History()
    for step, loss in enumerate(("nan", "inf", "much"), 1):
        add_progress(history, _build_progress(step, step, loss))
    assert all(math.isnan(loss) for loss in history.losses)


def test_a_restart_from_a_checkpoint_replaces_the_repeated_steps() -> None:
    history = History()
    for second, step in enumerate((10, 20, 30, 20, 40)):
        add_progress(history, _build_progress(second, step, "1"))
    assert list(history.steps) == [10, 20, 40]


def test_a_test_is_not_a_notebook() -> None:
    assert not is_notebook()
