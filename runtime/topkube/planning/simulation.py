"""A discrete-event simulation of tasks that wait for each other.

A task runs in a lane: a thread, or the link. A lane runs its tasks one at a time, in the order in which they were
added. A task that fills a gap runs only if no other task of its lane can run at that moment. If several such tasks can
run, the task that was added last runs. The processor lanes share `cores`: while more of them work than there are cores,
each is slower. The network may take a part of the cores while the link is busy. If cores suffice and nothing fills
gaps, every start is the maximum of earlier ends, so a shorter task never makes the whole longer.
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
_LEAST_SHARE = 0.1
"""The share of the cores that the threads of a step keep, whatever the network takes: the system divides them."""


@dataclass(eq=False, slots=True)
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
    _seconds_left: float = 0.0
    _predecessors_left: int = 0
    """The number of tasks of `after` that have not ended."""
    _followers: list[Task] = field(default_factory=list)
    """The tasks that wait for this task."""


def simulate(tasks: Collection[Task], cores: float = float("inf"), network_cores: float = 0.0) -> float:
    """Run all tasks, and return the end of the last in seconds. `cores` is the number of processor cores that the
    processor lanes share; `network_cores` of them are taken while the lane LINK has a task. Raises ValueError if tasks
    wait for each other in a circle."""
    simulation = _Simulation(tasks, cores, network_cores)
    while simulation.unended_count:
        simulation.start_tasks()
        simulation.run_until_next_end()
    return simulation.now


class _Simulation:
    """The state of the lanes and of all tasks at the time `now`, in seconds."""

    def __init__(self, tasks: Collection[Task], cores: float, network_cores: float) -> None:
        self._tasks, self._cores, self._network_cores = tasks, cores, network_cores
        self.now, self.unended_count = 0.0, len(tasks)
        self._numbers = {id(task): number for number, task in enumerate(tasks)}
        self._queues: dict[str, deque[Task]] = {task.lane: deque() for task in tasks}
        """The tasks that have not started, by lane, without those that fill gaps."""
        self._fillers: dict[str, list[tuple[int, Task]]] = {lane: [] for lane in self._queues}
        """The tasks that fill gaps and can run, by lane: heaps, with the task that was added last on top."""
        self._running: dict[str, Task] = {}
        """The running task of each lane that is not free."""
        for task in tasks:
            task._seconds_left, task._predecessors_left, task._followers = task.seconds, len(task.after), []
            if not task.fills_gaps:
                self._queues[task.lane].append(task)
            elif not task.after:
                self._add_filler(task)
        for task in tasks:
            for earlier in task.after:
                earlier._followers.append(task)
        waits = self._queues.pop(LATENCY, deque())  # in this lane, all tasks that can run do so
        self._waits = {id(task): task for task in waits if not task._predecessors_left}
        """The running tasks of the lane LATENCY."""

    def start_tasks(self) -> None:
        """Start a task in every free lane that has one: the first of its queue if it can run, otherwise a filler."""
        for lane, queue in self._queues.items():
            if lane in self._running:
                continue
            if queue and not queue[0]._predecessors_left:
                task = queue.popleft()
            elif self._fillers[lane]:
                task = heapq.heappop(self._fillers[lane])[1]
            else:
                continue
            task.start = self.now
            self._running[lane] = task

    def run_until_next_end(self) -> None:
        """Let time pass until one or more of the running tasks end."""
        active = [*self._running.values(), *self._waits.values()]
        if not active:
            waiting_task = next(task.name for task in self._tasks if task._predecessors_left)
            raise ValueError(f"the tasks wait for each other in a circle: {waiting_task} never starts")
        share = self._compute_share()
        if share == 1.0:  # without a division of cores, which is faster to simulate
            elapsed = min([task._seconds_left for task in active])
            self.now += elapsed
            for task in active:
                ends = task._seconds_left <= elapsed
                task._seconds_left -= elapsed
                if ends:
                    self._end_task(task)
            return
        rates = [share if task.lane in PROCESSOR_LANES else 1.0 for task in active]
        elapsed = min(task._seconds_left / rate for task, rate in zip(active, rates, strict=True))
        self.now += elapsed
        for task, rate in zip(active, rates, strict=True):
            ends = task._seconds_left / rate <= elapsed
            task._seconds_left -= elapsed * rate
            if ends:
                self._end_task(task)

    def _compute_share(self) -> float:
        """Return how many of its seconds a task of a processor lane does in a second: less than one if lanes share
        cores."""
        cores = self._cores
        if LINK in self._running:
            cores = max(cores - self._network_cores, cores * _LEAST_SHARE)
        if cores >= len(PROCESSOR_LANES):
            return 1.0
        working = sum(lane in PROCESSOR_LANES for lane in self._running)
        return min(1.0, cores / working) if working else 1.0

    def _end_task(self, task: Task) -> None:
        """Free the lane of a task that has ended, and let the tasks that wait only for it run."""
        task.end = self.now
        self.unended_count -= 1
        if task.lane == LATENCY:
            del self._waits[id(task)]
        else:
            del self._running[task.lane]
        for follower in task._followers:
            follower._predecessors_left -= 1
            if follower._predecessors_left:
                continue
            if follower.lane == LATENCY:
                follower.start = self.now
                self._waits[id(follower)] = follower
            elif follower.fills_gaps:
                self._add_filler(follower)
        task._followers = []  # without references in circles, memory is freed at once

    def _add_filler(self, task: Task) -> None:
        heapq.heappush(self._fillers[task.lane], (-self._numbers[id(task)], task))
