"""`topkube status`: show a job's phase, progress, pods, first failure and events."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from topkube.algorithms import AUTO, DENSITY, describe
from topkube.cli.cluster.api import Api, ClusterLocation, connect
from topkube.cli.cluster.jobs import (
    FINISHED_PHASES,
    find_job,
    find_waiting_reason,
    join_lines,
    list_events,
    list_jobs,
    list_pods,
    read_attempt,
    read_container_state,
    read_event_time,
    read_index,
    read_phase,
    show_control_characters,
)
from topkube.cli.cluster.watches import JobWatch, find_list_pause
from topkube.cli.columns import align_columns
from topkube.errors import ClusterError
from topkube.telemetry.bar import format_bytes, format_duration, format_rate
from topkube.timestamps import parse_timestamp

MOST_EVENTS = 12
MOST_PODS = 24
_BAR_CELLS = 30
_REFUSED = "ChangeRefused"
_COLOURS = {"Succeeded": "green", "Failed": "red", "Running": "cyan", "Suspended": "yellow", "Restarting": "yellow"}


@dataclass(frozen=True)
class StatusOptions:
    """The options of the command line."""

    job: str | None
    location: ClusterLocation
    everywhere: bool = False
    watch: bool = False
    json: bool = False


@dataclass(frozen=True)
class View:
    """The objects of one job that are shown."""

    job: dict[str, Any]
    pods: list[dict[str, Any]]
    events: list[dict[str, Any]]
    unread: Mapping[str, str] = field(default_factory=dict)
    """Why `pods` or `events` could not be read."""


def show_status(options: StatusOptions) -> int:
    """Show one job, or list all jobs. Return the exit code. Raises ClusterError."""
    api = connect(options.location)
    if options.job is None:
        return _list_all_jobs(api, options)
    if options.watch:
        return _follow(api, options, options.job)
    view = gather_view(api, find_job(api, options.job))
    _show(view, options.json)
    return 0


def gather_view(api: Api, job: dict[str, Any]) -> View:
    """Read the pods and events of a job. The view contains why those that this account may not read are missing."""
    pods, events, unread = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, str]()
    try:
        pods = list_pods(api, job["metadata"]["name"], job["metadata"].get("uid"))
    except ClusterError as error:
        if error.status != 403:
            raise
        unread["pods"] = error.what
    try:
        events = list_events(api, job, pods)
    except ClusterError as error:
        if error.status != 403:
            raise
        unread["events"] = error.what
    return View(job, pods, events, unread)


def _show(view: View, as_json: bool) -> None:
    if as_json:
        for kind, reason in view.unread.items():
            print(f"warning: the {kind} are unknown: {reason}", file=sys.stderr)
        data = {"job": view.job, "pods": view.pods, "events": view.events}
        print(json.dumps({**data, **dict.fromkeys(view.unread)}, indent=1), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in build_report(view, datetime.now(UTC), bar=console.is_terminal):
        console.print(show_control_characters(line), markup=True, soft_wrap=True, emoji=False)


def _follow(api: Api, options: StatusOptions, name: str) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    live = None if options.json or not console.is_terminal else Live(console=console, refresh_per_second=4)
    printed = ""
    view: View | None = None
    read_again_at = 0.0
    with live or contextlib.nullcontext():
        for job in JobWatch(api, name).read_states():
            if job is None:
                print(f"the job {name} was deleted", file=sys.stderr)
                return 1
            if live is not None:
                if view is None or time.monotonic() >= read_again_at or read_phase(job) in FINISHED_PHASES:
                    view = _gather_view_while_watching(api, job)
                    read_again_at = time.monotonic() + find_list_pause(len(view.pods))
                lines = build_report(replace(view, job=job), datetime.now(UTC), bar=True)
                live.update(
                    Text("\n").join(Text.from_markup(show_control_characters(line), emoji=False) for line in lines)
                )
            elif options.json:
                print(json.dumps(job), flush=True)
            else:
                line = show_control_characters(_format_line(job))
                if line != printed:
                    print(line, flush=True)
                printed = line
            if read_phase(job) in FINISHED_PHASES:
                break
    return 0


def _gather_view_while_watching(api: Api, job: dict[str, Any]) -> View:
    """Return the view of a job. A server that does not answer now does not end the watch."""
    try:
        return gather_view(api, job)
    except ClusterError as error:
        if not error.passing:
            raise
        return View(job, [], [], {"pods": error.what, "events": error.what})


def _format_line(job: dict[str, Any]) -> str:
    return "  ".join(
        part
        for part in (job["metadata"]["name"], read_phase(job), _describe_progress(job), find_waiting_reason(job))
        if part
    )


def _list_all_jobs(api: Api, options: StatusOptions) -> int:
    """List all jobs, like `kubectl get tj`."""
    jobs = list_jobs(api, options.everywhere)
    if options.json:
        print(json.dumps(jobs, indent=1))
        return 0
    if not jobs:
        print("no jobs" if options.everywhere else f"no jobs in namespace {api.namespace}", file=sys.stderr)
        return 0
    head = [*(["NAMESPACE"] if options.everywhere else []), "NAME", "PHASE", "WORKERS", "STEP", "PROGRESS"]
    rows = [[*head, "RATE", "LEFT", "RESTARTS", "AGE"]]
    now = datetime.now(UTC)
    for job in jobs:
        status, metadata = job.get("status") or {}, job["metadata"]
        progress = status.get("progress") or {}
        rows.append(
            [
                *([metadata["namespace"]] if options.everywhere else []),
                metadata["name"],
                read_phase(job),
                str(status.get("workersReady") or ""),
                _format_step(progress),
                f"{progress['percent']}%" if "percent" in progress else "",
                format_rate(progress["samplesPerSecond"]) if "samplesPerSecond" in progress else "",
                _format_time_left(job),
                str(status.get("restarts") or 0),
                _format_age(metadata.get("creationTimestamp"), now),
            ]
        )
    print("\n".join(map(show_control_characters, align_columns(rows, ""))))
    return 0


def build_report(view: View, now: datetime, bar: bool = False) -> Iterator[str]:
    """Yield the lines of the report, in rich's markup."""
    from rich.markup import escape

    job = view.job
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    phase = read_phase(job)
    colour = _COLOURS.get(phase, "bold")
    yield f"[bold]{metadata['name']}[/bold]  [{colour}]{phase}[/]  in namespace {metadata.get('namespace', '')}"
    for name, text in _summarize_job(job, now):
        yield f"  [bold]{name:<12}[/bold]{escape(text)}"
    progress = status.get("progress") or {}
    if bar and "percent" in progress:
        full_cells = round(_BAR_CELLS * progress["percent"] / 100)
        yield f"  {'':<12}[cyan]{'━' * full_cells}[/][dim]{'━' * (_BAR_CELLS - full_cells)}[/]"
    generation = metadata.get("generation")
    if status and generation and (status.get("observedGeneration") or 0) < generation:
        yield "  [yellow]the operator has not seen the last change yet[/]"
    if not status and spec.get("runPolicy", {}).get("managedBy", "topkube.dev/operator") == "topkube.dev/operator":
        yield "[yellow]no operator has handled this job yet[/]: kubectl get pods -n topkube-system"
    if refused := _list_refusals(status):
        yield "  [yellow]a change of the spec was refused; the job follows status.acceptedSpec[/]:"
        yield from (f"  {escape(line)}" for line in refused)
    yield from _format_section("Conditions", [escape(line) for line in _format_conditions(status, now)])
    pods = _list_unread(view, "pods") or _format_pods(view.pods, now)
    yield from _format_section("Pods", [escape(line) for line in pods])
    yield from _format_section("First failure", [escape(line) for line in _format_failure(status)])
    yield from _format_section("Cache", [escape(line) for line in _format_cache(status)])
    events = _list_unread(view, "events") or _format_events(view.events, now)
    yield from _format_section("Events", [escape(line) for line in events])


def _format_section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"[bold]{title}[/bold]"
        yield from lines


def _list_unread(view: View, kind: str) -> list[str]:
    return [f"  unknown: {view.unread[kind]}"] if kind in view.unread else []


def _summarize_job(job: dict[str, Any], now: datetime) -> Iterator[tuple[str, str]]:
    status, metadata = job.get("status") or {}, job["metadata"]
    spec = status.get("acceptedSpec") or job.get("spec") or {}
    aggregation, policy = spec.get("aggregation") or {}, spec.get("runPolicy") or {}
    workers, slots = spec.get("workers", 1), spec.get("slotsPerWorker", 1)
    ready = status.get("workersReady") or f"0/{workers}"
    ready += " succeeded" if read_phase(job) == "Succeeded" else " ready"
    yield (
        "workers",
        f"{ready}, {slots} rank{'s' if slots != 1 else ''} each, {spec.get('mpiImplementation', 'MPICH')}",
    )
    algorithm, density = aggregation.get("algorithm", AUTO), aggregation.get("density", DENSITY.default)
    yield "aggregation", describe(algorithm, density)
    if facts := _describe_progress(job):
        yield "progress", facts
    attempts = [f"attempt {status['attempt']}"] if status.get("attempt") else []
    attempts.append(f"{status.get('restarts') or 0} of {policy.get('backoffLimit', 3)} restarts used")
    if status.get("disruptions"):
        attempts.append(f"{status['disruptions']} disruptions")
    yield "attempts", ", ".join(attempts)
    if avoided := status.get("avoidedNodes"):
        yield "avoids", ", ".join(f"{entry['name']} ({entry.get('reason') or 'fault'})" for entry in avoided)
    times = [f"created {_format_age(metadata.get('creationTimestamp'), now)} ago"]
    started, ended = parse_timestamp(status.get("startTime")), parse_timestamp(status.get("completionTime"))
    if started:
        times.append(f"started {_format_age(status['startTime'], now)} ago")
    if started and ended:
        times.append(f"ran {format_duration((ended - started).total_seconds())}")
    yield "time", ", ".join(times)
    if checkpoint := spec.get("checkpoint"):
        interval = checkpoint.get("everySteps", 500)
        claim = checkpoint.get("claimName")
        yield "checkpoint", f"{describe_newest_checkpoint(job, now)}; claim {claim}, every {interval} steps"
    if source := spec.get("source"):
        yield "source", _describe_source(source)
    if packages := (spec.get("setup") or {}).get("requirements"):
        yield "packages", ", ".join(packages)
    if dataset := spec.get("dataset"):
        yield "dataset", f"{dataset.get('uri')} at {dataset.get('mountPath')}"


def _describe_source(source: dict[str, Any]) -> str:
    """Return where the job's code comes from, in a few words."""
    if git := source.get("git"):
        return f"commit {str(git.get('commit'))[:12]} of {git.get('url')}"
    if archive := source.get("archive"):
        return str(archive.get("uri"))
    return f"ConfigMap {(source.get('configMap') or {}).get('name')}"


def _describe_progress(job: dict[str, Any]) -> str:
    progress = (job.get("status") or {}).get("progress") or {}
    parts = [f"step {_format_step(progress)}"] if "step" in progress else []
    if "percent" in progress:
        parts.append(f"{progress['percent']}%")
    if progress.get("loss"):
        parts.append(f"loss {progress['loss']}")
    if progress.get("samplesPerSecond"):
        parts.append(f"{format_rate(progress['samplesPerSecond'])} samples/s")
    if left := _format_time_left(job):
        parts.append(f"{left} left")
    return "  ".join(parts)


def _format_time_left(job: dict[str, Any]) -> str:
    """Return the time until the last step of a running job as text; empty if it is unknown."""
    seconds = ((job.get("status") or {}).get("progress") or {}).get("etaSeconds")
    return format_duration(seconds) if seconds and read_phase(job) == "Running" else ""


def describe_newest_checkpoint(job: dict[str, Any], now: datetime) -> str:
    """Return the newest checkpoint of a job in a few words: "newest of step 500, 41s ago"."""
    progress = (job.get("status") or {}).get("progress") or {}
    if not progress.get("checkpointStep"):
        return "none yet"
    age = _format_age(progress.get("checkpointAt"), now)
    return f"newest of step {progress['checkpointStep']}" + (f", {age} ago" if age else "")


def _format_step(progress: dict[str, Any]) -> str:
    total = f"/{progress['totalSteps']}" if progress.get("totalSteps") else ""
    return f"{progress['step']}{total}" if "step" in progress else ""


def _list_refusals(status: dict[str, Any]) -> list[str]:
    """Return the operator's messages about a change of the spec that it refused."""
    refusals = [entry for entry in status.get("conditions") or () if entry.get("reason") == _REFUSED]
    return [line for entry in refusals for line in str(entry.get("message") or "").splitlines()[1:]]


def _format_conditions(status: dict[str, Any], now: datetime) -> list[str]:
    rows = [
        [
            condition["type"],
            condition["status"],
            _format_age(condition.get("lastTransitionTime"), now),
            condition.get("reason") or "",
            join_lines(condition.get("message") or ""),
        ]
        for condition in status.get("conditions") or ()
        if condition.get("reason") != _REFUSED
    ]
    return align_columns(rows) if rows else []


def _format_pods(pods: list[dict[str, Any]], now: datetime) -> list[str]:
    rows = []
    for pod in pods[:MOST_PODS]:
        metadata, status = pod["metadata"], pod.get("status") or {}
        index = read_index(pod)
        rows.append(
            [
                metadata["name"],
                f"worker {index}" if index >= 0 else "launcher",
                f"attempt {read_attempt(pod)}",
                _describe_pod_state(pod),
                (pod.get("spec") or {}).get("nodeName") or "no node",
                status.get("podIP") or "",
                _format_age(metadata.get("creationTimestamp"), now),
            ]
        )
    more = [f"  … and {len(pods) - MOST_PODS} more"] if len(pods) > MOST_PODS else []
    return align_columns(rows) + more if rows else []


def _describe_pod_state(pod: dict[str, Any]) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    state, details = read_container_state(pod)
    if state == "terminated":
        return f"{details.get('reason') or 'Ended'}, exit code {details.get('exitCode')}"
    if state == "waiting" and details.get("reason"):
        return str(details["reason"])
    status = pod.get("status") or {}
    return str(status.get("reason") or status.get("phase") or "Pending")


def _format_failure(status: dict[str, Any]) -> list[str]:
    failure = status.get("firstFailure") or {}
    if not failure:
        return []
    place = [f"pod {failure['pod']}"] if failure.get("pod") else []
    place += [f"node {failure['node']}"] if failure.get("node") else []
    place += [f"rank {failure['rank']}"] if failure.get("rank") is not None else []
    reasons = [failure["reason"]] if failure.get("reason") else []
    reasons += [f"exit code {failure['exitCode']}"] if failure.get("exitCode") is not None else []
    lines = [f"  {', '.join(place)}{': ' if place else ''}{', '.join(reasons)}"]
    lines += [f"  {line}" for line in str(failure.get("message") or "").splitlines()]
    lines += [f"    | {line}" for line in str(failure.get("logTail") or "").splitlines()]
    return lines


def _format_cache(status: dict[str, Any]) -> list[str]:
    cache = status.get("cache") or {}
    lines = [f"  hit ratio {cache['hitRatio']}"] if cache.get("hitRatio") else []
    if cache.get("remoteBytes") is not None:
        lines.append(f"  {format_bytes(cache['remoteBytes'])} from the remote")
    return lines + [
        f"  {node['name']}  {format_bytes(node.get('cachedBytes') or 0)}" for node in cache.get("nodes") or ()
    ]


def _format_events(events: list[dict[str, Any]], now: datetime) -> list[str]:
    rows = []
    for event in events[-MOST_EVENTS:]:
        count = event.get("count") or (event.get("series") or {}).get("count") or 1
        about = event["involvedObject"]
        message = join_lines(str(event.get("message") or ""))
        rows.append(
            [
                _format_age(read_event_time(event), now) + (f" (x{count})" if count > 1 else ""),
                str(event.get("type") or ""),
                str(event.get("reason") or ""),
                f"{about.get('name')}: {message}" if about.get("kind") == "Pod" else message,
            ]
        )
    return align_columns(rows) if rows else []


def _format_age(text: str | None, now: datetime) -> str:
    """Return an age as kubectl writes it: 41s, 3m, 5h, 4d."""
    then = parse_timestamp(text)
    if then is None:
        return ""
    seconds = max(0, int((now - then).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    minutes, hours = seconds // 60, seconds // 3600
    if minutes < 180:
        return f"{minutes}m"
    return f"{hours}h" if hours < 48 else f"{hours // 24}d"
