"""The bar of `topkube plan`: on a terminal only, and only if the predictions take long."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from topkube.cli.plan import progress


@pytest.mark.parametrize(
    ("is_terminal", "quiet_seconds", "is_shown"), [(True, 0.0, True), (True, 3600.0, False), (False, 0.0, False)]
)
def test_the_bar_appears_on_a_terminal_if_the_work_takes_long(
    is_terminal: bool, quiet_seconds: float, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_QUIET_SECONDS", quiet_seconds)
    shown = io.StringIO()
    with progress.PlanProgress(Console(file=shown, force_terminal=is_terminal), 3) as bar:
        assert list(bar.track("abc")) == ["a", "b", "c"]
    assert ("predicting steps" in shown.getvalue()) is is_shown
    assert is_shown or not shown.getvalue()
