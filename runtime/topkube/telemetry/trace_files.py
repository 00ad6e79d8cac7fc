"""The files of traces: read the file of a rank, and merge the files of all ranks of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topkube.errors import TopKubeError
from topkube.files import write_text
from topkube.telemetry.trace import WARM_STEPS

MOST_READ = 64
"""A reader of a directory needs no more ranks than this, evenly spaced."""
_SHARED_FACTS = ("nodes", "ranksPerNode", "algorithm", "device")
"""Facts that all ranks of a run share."""


class TraceError(TopKubeError, ValueError):
    """A trace cannot be read, or lacks what the reader needs."""


def list_rank_files(directory: Path) -> list[Path]:
    """Return the files that the ranks of a run wrote, in rank order."""
    files = [path for path in directory.glob("rank-*.json") if path.stem.removeprefix("rank-").isdigit()]
    return sorted(files, key=lambda path: int(path.stem.removeprefix("rank-")))


def read_trace(path: Path) -> dict[str, Any]:
    """Return the trace in a file, or the merged trace of a directory, of at most MOST_READ ranks. Raises TraceError if
    there is none, or if the file is not a trace."""
    if path.is_dir():
        return merge_traces(path, MOST_READ)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(
            f"the trace {path} cannot be read: {error}",
            cause="the path is misspelt, or the file is not JSON",
            next_step="write a trace: topkube run --trace FILE train.py",
        ) from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("traceEvents"), list)
        or not isinstance(content.get("otherData", {}), dict)
    ):
        raise TraceError(
            f"{path} is not a trace: it has no traceEvents, or facts of another form",
            cause="the file was written by another program",
            next_step="write a trace: topkube run --trace FILE train.py",
        )
    return content


def merge_traces(directory: Path, most: int | None = None) -> dict[str, Any]:
    """Return one trace with the events of all ranks in `directory`, or of `most` of them, on a common time axis that
    starts at 0. Ranks on different machines are aligned by their clocks. Raises TraceError if no rank wrote a trace, or
    if the files are of different runs."""
    files = list_rank_files(directory)
    if most is not None and len(files) > most:
        files = [files[number * len(files) // most] for number in range(most)]
    if not files:
        raise TraceError(
            f"{directory} contains no trace of a rank",
            cause=f"the script made at most {WARM_STEPS} steps, or it does not use topkube.DistributedOptimizer",
            next_step="train for more steps, or wrap the optimizer in topkube.DistributedOptimizer",
        )
    traces = [read_trace(path) for path in files]
    for path, content in zip(files, traces, strict=True):
        facts, first = content.get("otherData", {}), traces[0].get("otherData", {})
        if "originUnixNanoseconds" not in facts or any(facts.get(name) != first.get(name) for name in _SHARED_FACTS):
            raise TraceError(
                f"{path} and {files[0]} are traces of different runs",
                cause="a run with other workers or another algorithm wrote into the same directory before",
                next_step="remove the directory, and record the trace again",
            )
    origins = [trace["otherData"]["originUnixNanoseconds"] for trace in traces]
    shifts = [(origin - min(origins)) / 1e3 for origin in origins]
    begin = min(
        (
            event["ts"] + shift
            for trace, shift in zip(traces, shifts, strict=True)
            for event in trace["traceEvents"]
            if "ts" in event
        ),
        default=0.0,
    )
    events = [
        {**event, "ts": round(event["ts"] + shift - begin, 3)} if "ts" in event else event
        for trace, shift in zip(traces, shifts, strict=True)
        for event in trace["traceEvents"]
    ]
    common = {key: value for key, value in traces[0]["otherData"].items() if key not in ("rank", "node")}
    return {"displayTimeUnit": "ms", "otherData": {**common, "tracedRanks": len(traces)}, "traceEvents": events}


def write_merged_trace(directory: Path, path: Path) -> None:
    """Write the merged trace of all ranks in `directory` to `path`. Raises TraceError, and OSError if the disk refuses
    the file."""
    content = merge_traces(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, separators=(",", ":")))
