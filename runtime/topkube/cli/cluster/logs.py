"""`topkube logs`: show what all ranks print, from all pods at once, across restarts, until the job ends.

A pod that survives a restart is one stream. If a pod is replaced, its successor's stream follows. A stream that breaks
is requested again from its last time stamp, so that no line is lost or shown twice.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from topkube.cli.cluster.api import Api, Where, connect, path_of
from topkube.cli.cluster.jobs import (
    OVER,
    WAIT_CODE,
    Watch,
    container_state,
    exit_code,
    find_job,
    index_of,
    main_container,
    phase,
    pods_of,
    waiting_reason,
)
from topkube.errors import ClusterError

LOOK_SECONDS = 0.5
SILENT_SECONDS = 3600.0
DRAIN_SECONDS = 10.0
"""How long the last lines may take to arrive after the job has ended."""
MOST_STREAMS = 512
_LAUNCHER = "launcher"
"""The name of the launcher's container, in a pod of its own or beside worker 0."""
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")
_RANK = re.compile(r"\[rank (\d+)\] ")
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) ?")


@dataclass(frozen=True)
class LogOptions:
    """The options of the command line."""

    job: str
    where: Where
    follow: bool = True
    workers: list[int] | None = None
    """None: all workers and the launcher."""
    tail: int | None = None
    timestamps: bool = False
    json: bool = False
    timeout_seconds: float | None = None
    """How long to follow the job; None: until it ends."""


def show_logs(options: LogOptions) -> int:
    """Show the logs. Return the job's exit code if it has ended, else 0."""
    return _show(connect(options.where), options, _Printer(options))


def log_lines(options: LogOptions) -> Iterator[str]:
    """Yield the lines of the logs, as `show_logs` prints them without a terminal: to the job's end with
    `options.follow`. Notes for people are left out. Raises ClusterError."""
    api = connect(options.where)
    find_job(api, options.job)
    collected: queue.Queue[str | BaseException | None] = queue.Queue(1000)
    closed = threading.Event()

    def put(entry: str | BaseException | None) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                return collected.put(entry, timeout=LOOK_SECONDS)
        raise _Closed

    def collect() -> None:
        try:
            _show(api, options, _Collector(options, put))
            put(None)
        except _Closed:
            return
        except BaseException as error:
            with contextlib.suppress(_Closed):
                put(error)

    threading.Thread(target=collect, daemon=True).start()
    try:
        while (entry := collected.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry
    finally:
        closed.set()


class _Closed(Exception):
    """The reader of the lines has gone."""


def _show(api: Api, options: LogOptions, printer: _Printer) -> int:
    job = find_job(api, options.job)
    if options.follow and phase(job) not in OVER:
        return _follow(api, options, job["metadata"].get("uid"), printer)
    sources, printed = _sources(pods_of(api, options.job, job["metadata"].get("uid")), options), False
    for source in sources:
        for stamp, text in _lines(api, source, options, follow=False):
            printer.line(source, stamp, text)
            printed = True
    if not sources:
        _show_kept_failure(job, options, printer)
    elif not printed:
        waits = f" ({waiting_reason(job)})" if waiting_reason(job) else ""
        printer.note(
            f"{options.job} is {phase(job)}{waits}; its pods have printed nothing; next: topkube status {options.job}"
        )
    return exit_code(job) if options.follow else 0


def _follow(api: Api, options: LogOptions, uid: str | None, printer: _Printer) -> int:
    following = _Following(api, options, uid)
    announced = {"phase": "", "attempt": 0}
    last: dict[str, Any] | None = None
    watched: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
    watch = Watch(api, options.job, options.timeout_seconds)
    threading.Thread(target=_watch, args=(watch, watched), daemon=True).start()
    ended_at: float | None = None
    while True:
        for note in following.follow_new_containers():
            printer.note(note)
        for source, stamp, text in following.take_lines(LOOK_SECONDS):
            printer.line(source, stamp, text)
        while not watched.empty():
            change = watched.get()
            if isinstance(change, TimeoutError):
                printer.note(
                    f"{options.job} is still {phase(last or {})} after {options.timeout_seconds:g} s and continues"
                )
                return WAIT_CODE
            if isinstance(change, Exception):
                raise change
            if change is None and last is not None and phase(last) not in OVER:
                printer.note(f"the job {options.job} was deleted")
                return 1
            if change is not None:
                last = change
                _announce(last, announced, printer)
        if last is not None and phase(last) in OVER:
            ended_at = ended_at or time.monotonic()
            if following.has_ended() or time.monotonic() - ended_at > DRAIN_SECONDS:
                for source, stamp, text in following.take_lines(0):
                    printer.line(source, stamp, text)
                if not following.seen:
                    _show_kept_failure(last, options, printer)
                _note_failure(last, options.job, printer)
                return exit_code(last)


def _watch(watch: Watch, watched: queue.SimpleQueue[dict[str, Any] | Exception | None]) -> None:
    try:
        for job in watch.states():
            watched.put(job)
            if job is None or phase(job) in OVER:
                return
    except Exception as error:  # the thread that waits for the job's end must receive every error
        watched.put(error)


def _announce(job: dict[str, Any], announced: dict[str, Any], printer: _Printer) -> None:
    attempt = (job.get("status") or {}).get("attempt") or 0
    if attempt > announced["attempt"] > 0:
        reason = ((job.get("status") or {}).get("firstFailure") or {}).get("message")
        printer.note(f"attempt {attempt} begins" + (f"; the last one ended: {reason}" if reason else ""))
    state = f"{phase(job)}: {waiting_reason(job)}" if waiting_reason(job) else phase(job)
    if state != announced["phase"]:
        printer.note(f"{job['metadata']['name']} is {state}")
    announced.update(phase=state, attempt=attempt)


def _note_failure(job: dict[str, Any], name: str, printer: _Printer) -> None:
    failure = (job.get("status") or {}).get("firstFailure") or {}
    if phase(job) == "Failed":
        text = failure.get("message") or failure.get("reason") or "no reason is known"
        printer.note(f"{name} failed: {text}; next: topkube status {name}")


def _show_kept_failure(job: dict[str, Any], options: LogOptions, printer: _Printer) -> None:
    """Show what the status holds of the first failure, if the pods are gone."""
    failure = (job.get("status") or {}).get("firstFailure") or {}
    if failure.get("logTail"):
        printer.kept(f"the pods are gone; the last lines of {failure.get('pod', 'the first failure')}:", failure)
    else:
        note = "kubectl get events" if phase(job) in OVER else f"topkube status {options.job}"
        printer.kept(f"{options.job} is {phase(job)} and has no pods with logs; next: {note}", {})


@dataclass(frozen=True)
class _Source:
    """A container of a pod whose log is shown."""

    pod: dict[str, Any]
    container: str

    @property
    def key(self) -> tuple[str, str]:
        return self.pod["metadata"]["uid"], self.container

    @property
    def index(self) -> int:
        """The worker's index; -1 for a launcher, which may be a container of worker 0."""
        return -1 if self.container == _LAUNCHER else index_of(self.pod)

    @property
    def waits(self) -> bool:
        return container_state(self.pod, self.container)[0] == "waiting"


def _sources(pods: list[dict[str, Any]], options: LogOptions) -> list[_Source]:
    sources = []
    for pod in pods:
        launchers = [container["name"] for container in pod["spec"]["containers"] if container.get("name") == _LAUNCHER]
        sources += [_Source(pod, name) for name in dict.fromkeys([main_container(pod), *launchers])]
    return [source for source in sources if options.workers is None or source.index in options.workers]


@dataclass
class _Following:
    """The streams of all pods, with a thread for each."""

    api: Api
    options: LogOptions
    uid: str | None
    """The job's UID."""
    seen: dict[tuple[str, str], threading.Thread] = field(default_factory=dict)
    _lines: queue.Queue[tuple[_Source, str, bytes]] = field(default_factory=lambda: queue.Queue(10_000))
    _full: bool = False

    def follow_new_containers(self) -> Iterator[str]:
        """Start to follow containers that have started. Yield notes for the person."""
        try:
            sources = _sources(pods_of(self.api, self.options.job, self.uid), self.options)
        except ClusterError as error:
            if not error.passing:
                raise
            return
        for source in sources:
            if source.key in self.seen or source.waits:
                continue
            if (
                len(self.seen) >= MOST_STREAMS
                and sum(thread.is_alive() for thread in self.seen.values()) >= MOST_STREAMS
            ):
                if not self._full:
                    yield f"only the first {MOST_STREAMS} containers are followed; choose others: --worker INDEX"
                self._full = True
                return
            self.seen[source.key] = threading.Thread(target=self._read, args=(source,), daemon=True)
            self.seen[source.key].start()

    def take_lines(self, seconds: float) -> Iterator[tuple[_Source, str, bytes]]:
        """Yield lines as they arrive, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                left = deadline - time.monotonic()
                yield self._lines.get(timeout=left) if left > 0 else self._lines.get_nowait()
            except queue.Empty:
                return

    def has_ended(self) -> bool:
        """Return True if all streams have ended and all their lines were taken."""
        return not any(thread.is_alive() for thread in self.seen.values()) and self._lines.empty()

    def _read(self, source: _Source) -> None:
        for stamp, text in _lines(self.api, source, self.options, follow=True):
            self._lines.put((source, stamp, text))


def _lines(api: Api, source: _Source, options: LogOptions, follow: bool) -> Iterator[tuple[str, bytes]]:
    """Yield (time stamp, line) of a container. With `follow`, until the container ends."""
    path = path_of(api.namespace, "pods", source.pod["metadata"]["name"])
    query: dict[str, Any] = {
        "container": source.container,
        "timestamps": True,
        "follow": follow,
        "tailLines": options.tail,
    }
    last, shown = "", set[bytes]()  # the newest time stamp, and the lines that carry it
    while True:
        resumed = _moment(last)
        try:
            for line in api.lines(f"{path}/log", query, silent_seconds=SILENT_SECONDS if follow else None):
                match = _STAMP.match(line)
                stamp, text = (match[1].decode(), line[match.end() :]) if match else (last, line)
                if _moment(stamp) < resumed or (stamp == last and line in shown and _moment(stamp) == resumed):
                    continue  # shown before the stream broke
                if stamp != last:
                    last, shown = stamp, set()
                shown.add(line)
                yield stamp, text
        except ClusterError as error:
            if not error.passing:
                return  # the pod is gone, or has never run
        if not follow or not _goes_on(api, path, source):
            return
        query = {**query, "tailLines": None, "sinceTime": last or None}
        time.sleep(LOOK_SECONDS)


def _moment(stamp: str) -> str:
    """A time stamp in a form that sorts: 12:00:01.5Z -> 12:00:01.500000000."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return f"{seconds}.{fraction:<09}"


def _goes_on(api: Api, path: str, source: _Source) -> bool:
    try:
        pod = api.get(path)
    except ClusterError as error:
        return error.status != 404
    same = pod["metadata"].get("uid") == source.pod["metadata"]["uid"]
    return same and container_state(pod, source.container)[0] == "running"


class _Printer:
    """Lines behind the name of what printed them, in colour on a terminal; notes of our own on stderr."""

    def __init__(self, options: LogOptions) -> None:
        from rich.console import Console

        self.options = options
        self._out = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False)

    def line(self, source: _Source, stamp: str, raw: bytes) -> None:
        index = source.index
        rank, text = _split_rank(index, raw)
        if self.options.json:
            print(
                json.dumps(
                    {
                        "pod": source.pod["metadata"]["name"],
                        "worker": index if index >= 0 else None,
                        "rank": rank,
                        "time": stamp,
                        "text": text,
                    }
                ),
                flush=True,
            )
            return
        prefix = _prefix(index, rank)
        text = f"{stamp} {text}" if self.options.timestamps else text
        if self._out.is_terminal:
            from rich.text import Text

            colour = _COLOURS[(index if rank is None else rank) % len(_COLOURS)] if index >= 0 else "dim"
            self._out.print(Text(prefix, style=colour).append_text(Text.from_ansi(text)), soft_wrap=True)
        else:
            print(prefix + text, flush=True)

    def note(self, text: str) -> None:
        self._notes.print(text, style="dim", soft_wrap=True, markup=False, emoji=False)

    def kept(self, note: str, failure: dict[str, Any]) -> None:
        """Show what the status keeps of a failure, if there are no pods."""
        print(note, file=sys.stderr)
        if failure.get("logTail"):
            print(failure["logTail"], flush=True)


class _Collector(_Printer):
    """Passes lines to a function instead of printing them, and leaves notes out."""

    def __init__(self, options: LogOptions, put: Callable[[str], None]) -> None:
        self.options, self._put = options, put

    def line(self, source: _Source, stamp: str, raw: bytes) -> None:
        rank, text = _split_rank(source.index, raw)
        self._put(_prefix(source.index, rank) + text)

    def note(self, text: str) -> None:
        pass

    def kept(self, note: str, failure: dict[str, Any]) -> None:
        for line in str(failure.get("logTail") or "").splitlines():
            self._put(line)


def _split_rank(index: int, raw: bytes) -> tuple[int | None, str]:
    """Return the rank that a worker puts before what its ranks print, and the rest of the line."""
    text = raw.decode(errors="replace").rstrip("\r")
    match = _RANK.match(text) if index >= 0 else None
    return (int(match[1]), text[match.end() :]) if match else (None, text)


def _prefix(index: int, rank: int | None) -> str:
    name = f"worker{index}" if index >= 0 else "launcher"
    return f"[{name}] " if rank is None else f"[{name}.rank{rank}] "
