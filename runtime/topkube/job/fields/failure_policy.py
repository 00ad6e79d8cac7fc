"""`spec.runPolicy.failurePolicy` of a TrainingJob: which failures end the job, and which failures restart it.

The rules follow `podFailurePolicy` of the Kubernetes Job: the first matching rule decides. A TrainingJob fails as a
whole, so a rule is compared with the first failure of an attempt, which becomes `status.firstFailure`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from topkube.job.base.part import INT32, LABEL, Allowed, Part, declare_rules

Action = Literal["Fail", "Restart", "Ignore"]

SOURCE_INVALID = "SourceInvalid"
"""The reason of a worker whose spec.source was fetched and cannot be used, such as an archive with another checksum."""
SCRIPT_ERRORS = (
    "SyntaxError",
    "ImportError",
    "UsageError",
    "ScriptNotFound",
    "CommandNotFound",
    "CommandNotRunnable",
    "ArgumentsTooLong",
    SOURCE_INVALID,
)
"""Reasons of failures that another attempt does not repair. Without a rule they end the job, unless a step was finished
before."""
SOURCE_UNAVAILABLE, SETUP_FAILED = "SourceUnavailable", "SetupFailed"
"""The reasons of a worker that could not fetch spec.source, or not install spec.setup."""
HARDWARE_FAULT = "HardwareFault"
"""The reason of a rank whose error names broken hardware, such as an uncorrectable memory error of a GPU."""
PENDING_TIMEOUT = "PendingTimeout"
AVOIDED_NODE_NEEDED = "AvoidedNodeNeeded"
DISRUPTIONS = (
    "Preempted",
    "Evicted",
    "Deleted",
    "NodeLost",
    "NodeShutdown",
    "WorkerLost",
    "Terminated",
    PENDING_TIMEOUT,
    AVOIDED_NODE_NEEDED,
)
"""Usual reasons of disruptions. Without a rule they restart the job and do not count against backoffLimit."""
BLOCKED = (
    "ImagePullBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)
"""Reasons of containers that cannot start, or of native sidecars that end before the ranks may start. Without a rule
the job waits."""
FAILURES = (
    "Error",
    "OOMKilled",
    "Stalled",
    "CollectiveTimeout",
    "RendezvousTimeout",
    "MpiAbort",
    "LaunchFailed",
    "WorkerUnfit",
    "LauncherUnreachable",
    "LauncherRefused",
    "SIGKILL",
    "SIGSEGV",
    "SIGABRT",
    "SIGBUS",
    HARDWARE_FAULT,
    SOURCE_UNAVAILABLE,
    SETUP_FAILED,
)
"""Usual reasons of other failures. Without a rule they restart the job and count against backoffLimit."""
USUAL_REASONS = (*SCRIPT_ERRORS, *FAILURES, *DISRUPTIONS, *BLOCKED)

MOST_RULES, MOST_VALUES = 20, 64
MOST_DISRUPTIONS = 100

Reason = Annotated[
    str,
    StringConstraints(max_length=64, pattern=r"^[A-Za-z][-A-Za-z0-9_.:/]*$"),
    Allowed("a reason of status.firstFailure, such as OOMKilled, at most 64 characters"),
]
ContainerName = Annotated[
    str,
    StringConstraints(max_length=63, pattern=LABEL),
    Allowed("the name of a container: lower-case letters, digits and '-', at most 63 characters"),
]
ExitCode = Annotated[int, Field(ge=0, le=255)]


class OnExitCodes(Part):
    """A condition on the container that failed first and its exit code."""

    container_name: ContainerName | None = Field(
        default=None,
        description="name of the container, init containers included; all containers by default. Ranks run in the "
        "container `worker`",
    )
    operator: Literal["In", "NotIn"] = Field(
        default="In", description="In: the exit code is one of `values`; NotIn: it is none of them"
    )
    values: list[ExitCode] = Field(
        min_length=1,
        max_length=MOST_VALUES,
        description="exit codes from 0 to 255; 128 plus the number of the signal if a signal ended the rank",
    )


class FailureRule(Part):
    """What to do after some failures. All conditions of a rule must match."""

    model_config = ConfigDict(
        json_schema_extra=declare_rules(
            ("has(self.onExitCodes) || has(self.onReasons)", "a rule needs onExitCodes, onReasons, or both")
        )
    )

    action: Action = Field(
        description="Fail: the job fails; Restart: the next attempt begins, and the restart counts against "
        "backoffLimit; Ignore: the next attempt begins, and the restart counts as a disruption"
    )
    on_exit_codes: OnExitCodes | None = Field(
        default=None, description="matches a container and its exit code, as in a Job's podFailurePolicy"
    )
    on_reasons: Annotated[list[Reason], Field(min_length=1, max_length=MOST_VALUES)] | None = Field(
        default=None, description="matches `status.firstFailure.reason`, such as OOMKilled, NodeLost, ImagePullBackOff"
    )

    @model_validator(mode="after")
    def _check_condition(self) -> FailureRule:
        if self.on_exit_codes is None and self.on_reasons is None:
            raise ValueError("a rule needs onExitCodes, onReasons, or both")
        return self


class FailurePolicy(Part):
    """Which failures end the job, which restart it, and how many disruptions are accepted."""

    rules: list[FailureRule] = Field(
        default=[], max_length=MOST_RULES, description="the first rule that matches a failure decides"
    )
    max_disruptions: int | None = Field(
        default=None,
        ge=0,
        le=MOST_DISRUPTIONS,
        description="number of disruptions within disruptionWindowSeconds that the job survives; "
        "by default they are not limited",
    )
    disruption_window_seconds: int = Field(
        default=3600, ge=1, le=INT32, description="seconds for which a disruption counts against maxDisruptions"
    )
    pending_timeout_seconds: int | None = Field(
        default=None,
        ge=1,
        le=INT32,
        description="seconds for which workers may occupy nodes while other pods of the attempt have not started. "
        "Then all pods are deleted, and made again after a pause. By default they wait",
    )
