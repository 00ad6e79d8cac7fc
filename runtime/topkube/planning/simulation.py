"""A discrete-event simulation of tasks that wait for each other.

A task runs in a lane: a thread, or the link. A lane runs its tasks one at a time, in the order in which they were
added. A task that fills a gap runs only if no other task of its lane can run at that moment. If several such tasks can
run, the task that was added last runs. The processor lanes share `cores`: while more of them work than there are cores,
each is slower. If cores suffice and nothing fills gaps, every start is the maximum of earlier ends, so a shorter task
never makes the whole longer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

COMPUTE, COMMUNICATION, DELIVERY, LINK, INPUT = "compute", "communication", "delivery", "link", "input"
LATENCY = "latency"
"""The lane of waits: any number of them at the same time."""
PROCESSOR_LANES = (COMPUTE, COMMUNICATION, DELIVERY)


@dataclass(eq=False)
class Task:
    """Work of `seconds` in `lane`. It starts when all tasks of `after` have ended and its lane is free. A task that
    `fills_gaps` starts only if no other task can run in its lane. `start` and `end` are seconds, set by the
    simulation."""

    name: str
    lane: str
    seconds: float
    after: tuple[Task, ...] = ()
    start: float = 0.0
    end: float = 0.0
    fills_gaps: bool = False
    _left: float = 0.0
    _missing: int = 0
    _followers: list[Task] = field(default_factory=list)


def simulate(tasks: Collection[Task], cores: float = float("inf")) -> float:
    """Run all tasks, and return the end of the last in seconds. `cores` is the number of processor cores that the
    processor lanes share. Raises ValueError if tasks wait for each other in a circle."""
    queues: dict[str, deque[Task]] = {task.lane: deque() for task in tasks}
    fillers: dict[str, list[tuple[int, Task]]] = {lane: [] for lane in queues}  # heaps of tasks that can run
    numbers = {id(task): number for number, task in enumerate(tasks)}
    for task in tasks:
        task._left, task._missing = task.seconds, len(task.after)
        task._followers = []
        if not task.fills_gaps:
            queues[task.lane].append(task)
        elif not task.after:
            heapq.heappush(fillers[task.lane], (-numbers[id(task)], task))
    for task in tasks:
        for earlier in task.after:
            earlier._followers.append(task)
    waits = queues.pop(LATENCY, deque())
    running: dict[str, Task] = {}
    waiting = {id(task): task for task in waits if not task._missing}
    now, done = 0.0, 0
    while done < len(tasks):
        for lane, queue in queues.items():
            if lane not in running and queue and not queue[0]._missing:
                running[lane] = queue.popleft()
                running[lane].start = now
            elif lane not in running and fillers[lane]:
                running[lane] = heapq.heappop(fillers[lane])[1]
                running[lane].start = now
        active = [*running.values(), *waiting.values()]
        if not active:
            waiting_task = next(task.name for task in tasks if task._missing)
            raise ValueError(f"the tasks wait for each other in a circle: {waiting_task} never starts")
        working = sum(lane in PROCESSOR_LANES for lane in running)
        share = min(1.0, cores / working) if working else 1.0
        rates = [share if task.lane in PROCESSOR_LANES else 1.0 for task in active]
        elapsed = min(task._left / rate for task, rate in zip(active, rates, strict=True))
        now += elapsed
        for task, rate in zip(active, rates, strict=True):
            ends = task._left / rate <= elapsed
            task._left -= elapsed * rate
            if not ends:
                continue
            task.end = now
            done += 1
            if task.lane == LATENCY:
                del waiting[id(task)]
            else:
                del running[task.lane]
            for follower in task._followers:
                follower._missing -= 1
                if follower.lane == LATENCY and not follower._missing:
                    follower.start = now
                    waiting[id(follower)] = follower
                elif follower.fills_gaps and not follower._missing:
                    heapq.heappush(fillers[follower.lane], (-numbers[id(follower)], follower))
    return now
