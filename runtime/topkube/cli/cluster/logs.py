"""`topkube logs`: show what all ranks print, from all pods at once, across restarts, until the job ends."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from topkube.cli.cluster.api import Api, connect
from topkube.cli.cluster.jobs import (
    FINISHED_PHASES,
    TIMEOUT_CODE,
    find_exit_code,
    find_job,
    find_waiting_reason,
    list_pods,
    read_phase,
)
from topkube.cli.cluster.log_options import LogOptions
from topkube.cli.cluster.log_printers import Collector, Printer
from topkube.cli.cluster.log_streams import LogSource, LogStreams, list_sources, read_lines
from topkube.cli.cluster.watches import JobWatch
from topkube.errors import ClusterError, JobError

POLL_SECONDS = 0.5
"""The longest wait for lines before the state of the job is checked again."""
DRAIN_SECONDS = 10.0
"""The time in which the last lines must arrive after the job has ended."""


def show_logs(options: LogOptions) -> int:
    """Show the logs. Return the job's exit code if it has ended, else 0. Raises ClusterError."""
    return _show(connect(options.location), options, Printer(options))


def read_log_lines(options: LogOptions) -> Iterator[str]:
    """Yield the lines of the logs, as `show_logs` prints them without a terminal: to the job's end with
    `options.follow`. Notes for people are left out. Raises ClusterError."""
    api = connect(options.location)
    find_job(api, options.job)
    collected: queue.Queue[str | BaseException | None] = queue.Queue(1000)
    closed = threading.Event()

    def put(entry: str | BaseException | None) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                return collected.put(entry, timeout=POLL_SECONDS)
        raise _Closed

    def collect() -> None:
        try:
            _show(api, options, Collector(options, put))
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


@dataclass
class _Announced:
    """The state and the attempt that the person has been told."""

    state: str = ""
    attempt: int = 0


def _show(api: Api, options: LogOptions, printer: Printer) -> int:
    job = find_job(api, options.job)
    _check_workers(job, options)
    if options.follow and read_phase(job) not in FINISHED_PHASES:
        return _follow(api, options, job["metadata"].get("uid"), printer)
    sources = list_sources(list_pods(api, options.job, job["metadata"].get("uid"), options.workers), options)
    printed = _show_present_logs(api, sources, options, printer)
    if not sources:
        _show_kept_failure(job, options, printer)
    elif not printed:
        state = f"{read_phase(job)} ({find_waiting_reason(job)})" if find_waiting_reason(job) else read_phase(job)
        printer.print_note(
            f"{options.job} is {state}; its pods have printed nothing; next: topkube status {options.job}"
        )
    return find_exit_code(job) if options.follow else 0


def _check_workers(job: dict[str, Any], options: LogOptions) -> None:
    """Raise JobError if the options name a worker that the job does not have: its logs would never come."""
    count = (job.get("spec") or {}).get("workers")
    if not isinstance(count, int):
        return
    if absent := [index for index in options.workers or () if not 0 <= index < count]:
        raise JobError(
            f"{options.job} has no worker {absent[0]}",
            cause=f"the indexes of its workers are 0 to {count - 1}",
            next_step="pass one of these indexes as --worker",
        )


def _show_present_logs(api: Api, sources: list[LogSource], options: LogOptions, printer: Printer) -> bool:
    """Show the logs of all sources up to now. Return True if they have lines. Raises ClusterError if a log cannot be
    read: at once if the server refuses, and after the other logs if a node does not answer the server."""
    printed, unread = False, list[ClusterError]()
    for source in sources:
        try:
            for stamp, text in read_lines(api, source, options):
                printer.print_line(source, stamp, text)
                printed = True
        except ClusterError as error:
            if not error.passing or not error.status:
                raise
            unread.append(error)
    if unread:
        raise ClusterError(
            f"the logs of {len(unread)} of {len(sources)} containers cannot be read: {unread[0].what}",
            status=unread[0].status,
            cause="their nodes do not answer the API server, or it is overloaded",
            next_step=f"topkube status {options.job}; kubectl get nodes",
        )
    return printed


def _follow(api: Api, options: LogOptions, uid: str | None, printer: Printer) -> int:
    streams, stopped = LogStreams(api, options, uid), threading.Event()
    states: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
    watch = JobWatch(api, options.job, options.timeout_seconds)
    threading.Thread(target=_collect_states, args=(watch, states, stopped), daemon=True).start()
    try:
        return _show_streams(streams, states, options, printer)
    finally:
        streams.stop()
        stopped.set()


def _show_streams(
    streams: LogStreams,
    states: queue.SimpleQueue[dict[str, Any] | Exception | None],
    options: LogOptions,
    printer: Printer,
) -> int:
    """Show the lines of the streams and the changes of the job until it has ended. Return the exit code."""
    announced = _Announced()
    last: dict[str, Any] | None = None
    ended_at: float | None = None
    has_all_pods = False
    while True:
        for note in streams.follow_new_containers():
            printer.print_note(note)
        for source, stamp, text in streams.take_lines(POLL_SECONDS):
            printer.print_line(source, stamp, text)
        while not states.empty():
            change = states.get()
            if isinstance(change, TimeoutError):
                printer.print_note(
                    f"{options.job} is still {read_phase(last or {})} after {options.timeout_seconds:g} s and continues"
                )
                return TIMEOUT_CODE
            if isinstance(change, Exception):
                raise change
            if change is None and last is not None and read_phase(last) not in FINISHED_PHASES:
                printer.print_note(f"the job {options.job} was deleted")
                return 1
            if change is not None:
                last = change
                _announce(last, announced, printer)
        if last is not None and read_phase(last) in FINISHED_PHASES:
            ended_at = ended_at or time.monotonic()
            is_late = time.monotonic() - ended_at > DRAIN_SECONDS
            if not has_all_pods and not is_late:
                has_all_pods = streams.list_all_pods()
            elif streams.has_ended() or is_late:
                for source, stamp, text in streams.take_lines(0):
                    printer.print_line(source, stamp, text)
                if not streams.seen:
                    _show_kept_failure(last, options, printer)
                _note_failure(last, options.job, printer)
                return find_exit_code(last)


def _collect_states(
    watch: JobWatch, states: queue.SimpleQueue[dict[str, Any] | Exception | None], stopped: threading.Event
) -> None:
    try:
        for job in watch.read_states():
            states.put(job)
            if stopped.is_set() or job is None or read_phase(job) in FINISHED_PHASES:
                return
    except Exception as error:  # the thread that waits for the job's end must receive every error
        states.put(error)


def _announce(job: dict[str, Any], announced: _Announced, printer: Printer) -> None:
    attempt = (job.get("status") or {}).get("attempt") or 0
    if attempt > announced.attempt > 0:
        reason = ((job.get("status") or {}).get("firstFailure") or {}).get("message")
        printer.print_note(f"attempt {attempt} begins" + (f"; the last one ended: {reason}" if reason else ""))
    state = f"{read_phase(job)}: {find_waiting_reason(job)}" if find_waiting_reason(job) else read_phase(job)
    if state != announced.state:
        printer.print_note(f"{job['metadata']['name']} is {state}")
    announced.state, announced.attempt = state, attempt


def _note_failure(job: dict[str, Any], name: str, printer: Printer) -> None:
    failure = (job.get("status") or {}).get("firstFailure") or {}
    if read_phase(job) == "Failed":
        text = failure.get("message") or failure.get("reason") or "no reason is known"
        printer.print_note(f"{name} failed: {text}; next: topkube status {name}")


def _show_kept_failure(job: dict[str, Any], options: LogOptions, printer: Printer) -> None:
    """Show what the status holds of the first failure, if the pods are gone."""
    failure = (job.get("status") or {}).get("firstFailure") or {}
    if failure.get("logTail"):
        printer.print_kept_failure(
            f"the pods are gone; the last lines of {failure.get('pod', 'the first failure')}:", failure
        )
    else:
        next_step = "kubectl get events" if read_phase(job) in FINISHED_PHASES else f"topkube status {options.job}"
        printer.print_kept_failure(
            f"{options.job} is {read_phase(job)} and has no pods with logs; next: {next_step}", {}
        )
