"""The display of `TrainingClient.wait`: the progress of a job, and in a notebook the plot at its end."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from topkube.job import Progress, TrainingJob
from topkube.telemetry.bar import ProgressDisplay
from topkube.telemetry.history import History
from topkube.telemetry.progress import StepRecord


@contextlib.contextmanager
def show_progress(job: TrainingJob, history: History, show: bool) -> Iterator[ProgressDisplay]:
    """Yield a display of `history`: a bar in a terminal or a notebook, else a line every few seconds; nothing without
    `show`."""
    from rich.console import Console

    console = Console(stderr=not is_notebook(), quiet=not show)
    with ProgressDisplay(console, history, job.name, job.spec.workers, job.ranks) as display:
        yield display


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def add_progress(history: History, progress: Progress | None) -> None:
    """Add the progress in a job's status to `history`. The status has the last step only: the samples of the steps in
    between follow from its rate."""
    if progress is None or progress.step is None or (history.steps and history.steps[-1] == progress.step):
        return
    now = datetime.fromisoformat(progress.updated_at).timestamp() if progress.updated_at else 0.0
    rate = progress.samples_per_second or 0.0
    elapsed = max(0.0, now - history.times[-1]) if history.times else 0.0
    try:
        loss = float(progress.loss) if progress.loss is not None else None
    except ValueError:
        loss = None
    record = StepRecord(
        step=progress.step,
        total_steps=progress.total_steps,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        samples=round(rate * elapsed),
        samples_per_second=rate,
        checkpoint_step=progress.checkpoint_step,
        time=now,
    )
    history.add(record)


def show_plot(job: TrainingJob, history: History) -> None:
    """Show the plot of `history` below the cell of a notebook, if matplotlib is installed. Elsewhere show nothing."""
    if not is_notebook() or len(history.steps) < 2:
        return
    with contextlib.suppress(ImportError):
        import matplotlib

        from topkube.telemetry.plot import PlotError, draw

        backend: Any = matplotlib.get_backend()
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.suppress(PlotError):
                path = Path(folder) / "plot.png"
                draw(history, path, f"{job.name}: {job.spec.workers} x {job.spec.slots_per_worker} ranks")
                ipython_display = importlib.import_module("IPython.display")
                ipython_display.display(ipython_display.Image(data=path.read_bytes()))
        finally:
            matplotlib.use(backend)  # the notebook's own plots stay inline
