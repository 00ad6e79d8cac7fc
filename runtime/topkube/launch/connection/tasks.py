"""Tasks of asyncio that nothing waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


def run_task(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    """Run `work` as a task. The task stays in `tasks` until it ends, because asyncio itself keeps only a weak reference
    to it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
