"""A backward pass inside another one, as with reentrant activation checkpoints."""

from __future__ import annotations

import sys
import threading

from topkube.errors import TrainingError


def refuse_nested_backward() -> None:
    """Raise TrainingError inside a backward() that another backward() runs: the inner pass ends before the outer pass,
    so it is unknown when all gradients are ready, and the inner pass does not know the factor of a gradient scaler."""
    frame, depth = sys._getframe(), 0
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    started_by_torch = isinstance(threading.current_thread(), threading._DummyThread)  # a device's backward thread
    if depth > (0 if started_by_torch else 1):
        raise TrainingError(
            "backward() runs inside another backward()",
            cause="torch.utils.checkpoint with use_reentrant=True",
            next_step="pass use_reentrant=False to torch.utils.checkpoint.checkpoint (in Hugging Face:"
            " gradient_checkpointing_kwargs={'use_reentrant': False})",
        )
