"""summary.json, which `topkube run` writes, and docs/run-summary.md: `python -m topkube.cli.run.summary > FILE`."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

_HEAD = """\
# summary.json

`topkube run` writes `summary.json` into the run directory when the run ends, whether it succeeded or not. With
`-o json` it prints the same object on stdout. All keys are in camelCase, and every key is always present; unknown
values are null. Newer versions may add keys. This page is generated:
`python -m topkube.cli.run.summary > docs/run-summary.md`.
"""
_TYPES = {str: "string", int: "integer", float: "number", bool: "true or false", type(None): "null"}


class _Values(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="forbid", frozen=True)


class PartsOfStep(_Values):
    """Mean seconds of a step by part. The parts add up to the step; all are null without steps of `run.progress`."""

    wait_for_data: float | None = Field(default=None, description="wait for the next batch")
    compute: float | None = Field(default=None, description="forward, backward without the exchange, and update")
    select: float | None = Field(default=None, description="selection of the largest entries")
    inside_node: float | None = Field(default=None, description="exchange between the ranks of a node")
    between_nodes: float | None = Field(default=None, description="exchange between nodes")


class RankEnd(_Values):
    """The end of the rank that failed first. rank-N.json in the run directory has the same fields in snake_case."""

    rank: int = Field(description="number of the rank")
    host: str = Field(description="name of the machine")
    command: list[str] = Field(description="the command of the rank")
    started: float = Field(description="time of its start, Unix seconds")
    ended: float = Field(description="time of its end, Unix seconds")
    exit_code: int = Field(description="exit code; 128 plus the number of the signal if a signal ended the rank")
    signal: str | None = Field(description="name of the signal that ended the rank")
    told_to_end: bool = Field(description="the rank was stopped from outside, so it is not the cause")
    aborted: bool = Field(description="MPI printed that this rank ended the run")
    out_of_memory: bool = Field(description="the kernel killed the rank because memory was used up")
    not_started: str | None = Field(description="why the command could not be started")
    missing: list[int] = Field(description="ranks that never entered the collective in which this rank timed out")
    traceback: str | None = Field(description="Python's traceback")
    tail: list[str] = Field(description="last lines of the log")
    log_bytes: int | None = Field(description="bytes of output in the log")
    lost_bytes: int = Field(description="bytes of output that are not in the log")
    lost_why: str = Field(description="why output was lost")


class RunSummary(_Values):
    """A run that has ended."""

    job: str = Field(description="name of the job")
    outcome: Literal["succeeded", "failed", "interrupted"] = Field(description="how the run ended")
    workers: int = Field(description="workers, which are nodes")
    slots_per_worker: int = Field(description="ranks per worker")
    mpi: str = Field(description="the MPI and its version")
    algorithm: str = Field(description="all-reduce algorithm of the job; a script may use another")
    density: float = Field(description="share of the gradient's entries that is sent between nodes")
    wall_seconds: float = Field(description="seconds from the start of the ranks to the end of the last rank")
    steps: int = Field(description="finished steps")
    total_steps: int | None = Field(description="steps of the whole training")
    first_loss: float | None = Field(description="mean loss of the first `lossSteps` steps")
    final_loss: float | None = Field(description="mean loss of the last `lossSteps` steps, as in the plot")
    loss_steps: int = Field(description="number of steps in these means, at most 10; 0 without losses")
    samples_per_second: float | None = Field(description="samples per second of all ranks, over the whole run")
    seconds_per_step: PartsOfStep = Field(description="mean seconds of a step by part")
    bytes_between_nodes: int | None = Field(description="bytes that all ranks sent to other nodes")
    bytes_sent: int | None = Field(description="bytes that all ranks sent, inside nodes and between nodes")
    bytes_dense: int | None = Field(
        description="bytes that a dense ring would have sent between nodes (with one node: inside the node)"
    )
    skipped_steps: int = Field(description="steps that all ranks skipped because a gradient was NaN or infinite")
    choice: str | None = Field(
        description="what `auto` or `dense` stood for, and why, with the measured link; null if nothing was chosen"
    )
    run_directory: str = Field(description="the run directory")
    plot: str | None = Field(description="file of the plot")
    first_failure: RankEnd | None = Field(description="the rank that failed first")
    failure: str | None = Field(description="why the run failed")

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `topkube run` writes and prints."""
        return self.model_dump(by_alias=True)


def build_page() -> str:
    """Return the page."""
    parts: list[tuple[str, type[_Values]]] = [
        ("The object", RunSummary),
        ("secondsPerStep", PartsOfStep),
        ("firstFailure", RankEnd),
    ]
    lines = [_HEAD]
    for heading, part in parts:
        lines += [f"## {heading}", "", " ".join((part.__doc__ or "").split()), ""]
        lines += ["| key | type | meaning |", "|---|---|---|"]
        lines += [
            f"| `{field.alias}` | {_describe_type(field.annotation)} | {field.description} |"
            for field in part.model_fields.values()
        ]
        lines.append("")
    return "\n".join(lines)


def _describe_type(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return f"list of {_describe_type(typing.get_args(annotation)[0])}s"
    if isinstance(annotation, types.UnionType):
        return " or ".join(_describe_type(choice) for choice in typing.get_args(annotation))
    return _TYPES.get(annotation, "object")


if __name__ == "__main__":
    print(build_page(), end="")
