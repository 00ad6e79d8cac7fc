"""The picture of a plan: lines that differ, and a legend and a title that are visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from topkube.algorithms import OWN
from topkube.planning.picture import draw_sweep
from topkube.planning.step import Prediction


def test_the_picture_shows_every_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    rows = [(nodes, [Prediction(one, 0.1 * nodes, 0.1, 0.1, 0.1, ()) for one in OWN]) for nodes in (2, 4)]
    draw_sweep(rows, tmp_path / "plan.png", "a title of many words " * 10)
    monkeypatch.undo()
    [figure] = figures
    for axes in figure.axes:
        styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()}
        assert len(styles) == len(OWN)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [one.name for one in OWN]
    assert legend.get_window_extent().x0 > max(axes.get_window_extent().x1 for axes in figure.axes)
    assert legend.get_window_extent().height < figure.bbox.height
    assert figure.get_suptitle().count("\n") == 1
    assert figure._suptitle.get_window_extent().x1 < figure.bbox.width
    pyplot.close(figure)
