"""The progress of a run while it trains, and the reports about it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from topkube.cli.run.report import build_result_table
from topkube.telemetry.bar import (
    ProgressDisplay,
    describe_progress,
    describe_sent_bytes,
    format_bytes,
    format_duration,
    format_rate,
)
from topkube.telemetry.history import History, LogFollower, ProgressReader, split_step
from topkube.telemetry.plot import PlotError, average_groups, draw, smooth_values
from topkube.telemetry.progress import ProgressWriter, StepRecord
from topkube.telemetry.summary import list_rows, summarize


def build_record(step: int, **fields: object) -> StepRecord:
    values: dict[str, object] = {
        "total_steps": 100,
        "loss": 10.0 / step,
        "samples": 8,
        "time": 100 + 0.5 * step,
        **fields,
    }
    return StepRecord(step=step, **values)  # type: ignore[arg-type]


def build_history(*records: StepRecord) -> History:
    result = History()
    for record in records:
        result.add(record)
    return result


def test_after_a_restart_the_later_step_counts() -> None:
    steps = build_history(*(build_record(n) for n in (1, 2, 3)), build_record(2, loss=7.0, time=110.0))
    assert list(steps.steps) == [1, 2]
    assert list(steps.losses) == [10.0, 7.0]
    assert all(len(column) == 2 for column in steps.seconds.values())


def test_the_parts_of_a_step_add_up_to_it() -> None:
    seconds = {"data": 1.0, "forward": 2.0, "backward": 5.0, "update": 1.0, "select": 0.5, "intra": 1.0, "inter": 2.0}
    waits = {"wait for data": 1.0, "compute": 4.5}
    assert split_step(seconds) == {**waits, "select": 0.5, "inside node": 1.0, "between nodes": 2.0}
    longer = split_step({"backward": 3.0, "select": 1.0, "inter": 5.0})
    exchange = {"select": 0.5, "inside node": 0.0, "between nodes": 2.5}
    assert longer == pytest.approx({"wait for data": 0.0, "compute": 0.0, **exchange})
    late = split_step({"data": 4.0, "backward": 3.0, "select": 1.0, "inter": 5.0})
    assert late == pytest.approx({"wait for data": 4.0, "compute": 0.0, **exchange})
    assert sum(split_step({"select": 1.0}).values()) == 0


def test_the_remaining_time_follows_from_the_speed() -> None:
    steps = build_history(*(build_record(n) for n in range(1, 21)))
    assert steps.samples_per_second == pytest.approx(16)
    assert steps.estimate_seconds_left() == pytest.approx(40)
    assert (
        build_history(build_record(1, total_steps=None), build_record(2, total_steps=None)).estimate_seconds_left()
        is None
    )


def test_bytes_between_nodes_are_compared_with_those_of_a_dense_exchange() -> None:
    steps = build_history(build_record(1, intra_bytes=900, inter_bytes=100, dense_bytes=10_000))
    assert describe_sent_bytes(steps, nodes=2, ranks=4) == "100 B, 50x less than dense"
    assert describe_sent_bytes(steps, nodes=4, ranks=4) == "100 B, 100x less than dense"
    assert describe_sent_bytes(steps, nodes=1, ranks=2) == "1.0 kB, 10x less than dense"
    assert (
        describe_sent_bytes(build_history(build_record(1, inter_bytes=5_000, dense_bytes=10_000)), 2, 4)
        == "5.0 kB, as dense"
    )
    assert (
        describe_sent_bytes(build_history(build_record(1, inter_bytes=10_000, dense_bytes=10_000)), 2, 4)
        == "10 kB, 2.0x more than dense"
    )
    assert describe_sent_bytes(build_history(build_record(1)), 1, 1) == ""


def test_the_progress_line_contains_only_known_facts() -> None:
    steps = build_history(*(build_record(n, samples_per_second=5120.4, skipped_steps=2) for n in (1, 2)))
    assert describe_progress(steps, 1, 1) == "step 2/100  loss 5  5,120 samples/s  2 skipped  49 s left"
    assert describe_progress(History(), 1, 1) == "starting"
    assert describe_progress(build_history(build_record(3, total_steps=None, loss=None)), 1, 1) == "step 3"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_bar_fits_the_terminal_and_always_shows_the_time_left(width: int) -> None:
    steps = build_history(
        *(
            build_record(n, samples_per_second=5120.4, inter_bytes=10**6, dense_bytes=10**8, skipped_steps=1)
            for n in (1, 2)
        )
    )
    console = Console(width=width, height=25, force_terminal=True, file=io.StringIO(), color_system="standard")
    display = ProgressDisplay(console, steps, "a-name-that-is-rather-long-for-a-job", 2, 4)
    display.update()
    [line] = "".join(part.text for part in console.render(display._bar.get_renderable())).splitlines()
    assert len(line.rstrip()) <= width
    assert "step 2/100" in line
    assert "49 s left" in line
    assert ("samples/s" in line) == (width >= 80)
    assert ("less than dense" in line) == (width >= 120)
    assert sum(character in "━╸╺" for character in line) >= (8 if width >= 60 else 1)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_lines_of_ranks_go_to_a_file_as_they_are(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Rich, which needs 160 µs for a line."""
    raw = io.BytesIO()
    console = Console(width=20, file=io.TextIOWrapper(raw, encoding=encoding))
    display = ProgressDisplay(console, History(), "job", 2, 4)
    monkeypatch.setattr(console, "print", pytest.fail)
    display.show_lines(1, 3, ["x" * 100, "[bold]\tü", ""])
    display.show_lines(0, 0, [])
    prefix, letter = "[worker1.rank3] ", "ü" if encoding == "utf-8" else "?"
    assert raw.getvalue().decode(encoding) == f"{prefix}{'x' * 100}\n{prefix}[bold]\t{letter}\n{prefix}\n"


def test_lines_of_ranks_on_a_terminal_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=200, force_terminal=True, file=io.StringIO(), color_system="standard")
    display = ProgressDisplay(console, History(), "job", 2, 4)
    printed, printing = list[object](), console.print
    monkeypatch.setattr(console, "print", lambda text, **options: (printed.append(text), printing(text, **options)))
    display.show_lines(1, 3, ["one", "\x1b[31mtwo\x1b[0m", "three"])
    assert len(printed) == 1
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.count("[worker1.rank3] ") for line in lines] == [1, 1, 1]
    assert "\x1b[31mtwo" in lines[1]
    assert "three" in lines[2]


def test_paths_in_the_results_are_shown_as_they_are() -> None:
    """Rich takes [lr=0.1] for a style that it leaves out, and [/x] for a mistake."""
    console = Console(width=200, force_terminal=True, file=io.StringIO(), color_system=None)
    console.print(build_result_table([("logs", "runs/a[lr=0.1]/[/x]/rank-*.log")]))
    assert isinstance(console.file, io.StringIO)
    assert "runs/a[lr=0.1]/[/x]/rank-*.log" in console.file.getvalue()


def test_numbers_are_short_and_have_units() -> None:
    sizes = [0, 999, 1000, 12_345_678, 999_999, 1.5e9, 2e12, 5e15]
    assert [format_bytes(n) for n in sizes] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "12 MB",
        "1.0 MB",
        "1.5 GB",
        "2.0 TB",
        "5000 TB",
    ]
    assert [format_duration(s) for s in (0.31, 41, 200, 7500)] == ["0.3 s", "41 s", "3 min 20 s", "2 h 5 min"]
    assert [format_rate(r) for r in (5120.2, 3.14)] == ["5,120", "3.1"]


def test_the_summary_holds_averages_of_the_first_and_last_steps() -> None:
    empty = summarize(History(), 1, 1)
    assert (empty.steps, empty.first_loss, empty.samples_per_second, empty.seconds_per_step) == (0, None, None, {})
    assert (empty.bytes_between_nodes, empty.bytes_sent, empty.bytes_dense) == (None, None, None)
    summary = summarize(build_history(*(build_record(n, loss=None if n % 2 else float(n)) for n in range(1, 41))), 1, 1)
    assert summary.first_loss == np.mean(np.arange(2, 21, 2))
    assert summary.final_loss == np.mean(np.arange(22, 41, 2))


def test_without_run_progress_only_the_steps_are_known() -> None:
    own_loop = build_history(*(build_record(n, total_steps=None, loss=None, samples=0) for n in (1, 2)))
    summary = summarize(own_loop, 2, 4)
    assert (summary.steps, summary.samples_per_second, summary.seconds_per_step) == (2, None, {})
    assert (summary.bytes_between_nodes, summary.bytes_sent, summary.bytes_dense) == (None, None, None)
    own_loop.add(build_record(3, seconds={"forward": 1.0}, inter_bytes=5, dense_bytes=10))
    assert summarize(own_loop, 2, 4).bytes_between_nodes == 5


def test_the_plot_ends_with_the_loss_of_the_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.axes import Axes

    written: list[str] = []
    monkeypatch.setattr(Axes, "annotate", lambda self, text, *rest, **options: written.append(text))
    steps = build_history(*(build_record(n) for n in range(1, 31)))
    draw(steps, tmp_path / "plot.png", "a run")
    final = summarize(steps, 1, 1).final_loss
    assert written == [f"{final:.4g} (mean of the last 10 steps)"]
    assert ("loss", f"2.929 → {final:.4g} (means of the first and the last 10 steps)") in list_rows(
        summarize(steps, 1, 1), steps, 1, 1, 1.0
    )


def test_progress_is_read_as_it_grows(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path)
    assert reader.read() == []
    writer = ProgressWriter(tmp_path)
    writer.write(build_record(1))
    assert [step_record.step for step_record in reader.read()] == [1]
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write(build_record(2).to_json() + "\n" + build_record(3).to_json()[:10])
        file.flush()
        assert [step_record.step for step_record in reader.read()] == [2]
        file.write(build_record(3).to_json()[10:] + "\n")
    assert [step_record.step for step_record in reader.read()] == [3]
    writer.close()


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "null",
        '{"step": 2}',
        '{"step": "2", "total_steps": 3}',
        '{"step": 2, "total_steps": "3"}',
        '{"step": 2, "total_steps": 3, "samples": null}',
        '{"step": 1e400, "total_steps": 3}',
        '{"step": 99999999999999999999, "total_steps": 3}',
        '{"step": 2, "total_steps": 3, "seconds": [1]}',
        '{"step": 2, "total_steps": 3, "seconds": {"data": "1"}}',
    ],
)
def test_a_line_that_is_no_record_is_an_error_of_one_kind(tmp_path: Path, line: str) -> None:
    """A script may write anything into the run's directory, and its run must not end because of that."""
    reader = ProgressReader(tmp_path)
    (tmp_path / "progress.jsonl").write_text(build_record(1).to_json() + "\n" + line + "\n")
    with pytest.raises(ValueError, match="not the record of a step"):
        reader.read()


def test_logs_are_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    log = LogFollower(path)
    assert log.read() == []
    with path.open("wb") as file:
        for data, expected in [
            (b"a\nb", ["a"]),
            (b"c\n", ["bc"]),
            (b"10%\r20%\n", ["20%"]),
            (b"\xff\n", ["�"]),
            (b"end", []),
        ]:
            file.write(data)
            file.flush()
            assert log.read() == expected
    assert [line for lines in log.finish() for line in lines] == ["end"]
    assert [line for lines in log.finish() for line in lines] == []


def test_a_log_that_ends_in_a_long_line_is_shown_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("x" * (3 << 20) + "\nthe end\n")
    lines = [line for lines in LogFollower(path).finish() for line in lines]
    assert "".join(lines) == "x" * (3 << 20) + "the end"


def test_smoothing_keeps_constants_and_ends_near_the_last_values() -> None:
    assert smooth_values(np.full(50, 3.0)) == pytest.approx(3.0)
    falling = smooth_values(np.linspace(10, 0, 1000))
    assert falling[0] == 10
    assert 0 < falling[-1] < 0.5


def test_plotted_points_are_averages_of_neighbours() -> None:
    assert average_groups(np.arange(7.0), 3) == pytest.approx([1, 4, 6])


@pytest.mark.parametrize("steps", [1, 2, 5000])
def test_runs_of_any_length_are_drawn(tmp_path: Path, steps: int) -> None:
    seconds = {"forward": 0.1, "inter": 0.02}
    losses: list[float | None] = [None if n % 7 == 3 else 1 / (1 + n) for n in range(steps)]
    run = build_history(*(build_record(n + 1, loss=loss, seconds=seconds) for n, loss in enumerate(losses)))
    draw(run, tmp_path / "new" / "plot.png", "title")
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000


def test_a_run_without_losses_or_times_is_drawn(tmp_path: Path) -> None:
    draw(build_history(build_record(1, loss=None), build_record(2, loss=float("nan"))), tmp_path / "plot.svg", "title")
    assert "reported no loss" in (tmp_path / "plot.svg").read_text()


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlotError, match="cannot be written"):
        draw(build_history(build_record(1)), tmp_path / "file" / "plot.png", "title")
    with pytest.raises(PlotError, match="cannot be written"):
        draw(build_history(build_record(1)), tmp_path / "plot.unknown", "title")
