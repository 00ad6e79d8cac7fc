"""What the operator and the pods of one job agree on: ports, files, variables, plans, the status and the last words.

The operator imports this module (it loads neither torch nor MPI nor NumPy), writes the plans into the pods' environment
and reads `LauncherStatus` over TLS and `Ending`s from the pods' termination messages. The runtime in the image may be
older or newer than the operator: readers pass over fields that they do not know, and every field that was added later
has a default.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from topkube.errors import LaunchError
from topkube.job import CacheStatus, FirstFailure, Progress

LAUNCHER_PORT = 7077
"""TLS, on the launcher's pod and its Service: workers join, the operator asks for the status. No other port of the
launcher needs to be reachable."""
METRICS_PORT = 9477
"""Prometheus, on the workers."""
JOIN_PATH = "/v1/join"
"""A worker's session (a WebSocket)."""
STATUS_PATH = "/v1/status"
"""GET with `Authorization: Bearer OPERATOR_TOKEN` gives a LauncherStatus."""

PLAN_VARIABLE = "TOPKUBE_LAUNCH"
"""Holds a LaunchPlan in the launcher's container."""
WORKER_VARIABLE = "TOPKUBE_WORKER"
"""Holds a WorkerPlan in the worker's container."""
POD_IP_VARIABLE = "TOPKUBE_POD_IP"
"""The pod's address (fieldRef status.podIP), in both containers."""
NODE_NAME_VARIABLE = "TOPKUBE_NODE_NAME"
"""The node's name (fieldRef spec.nodeName), in both containers."""

CREDENTIALS_DIRECTORY = "/etc/topkube/credentials"
CERTIFICATE_FILE = "tls.crt"
"""In both pods. Workers and the operator trust this certificate and no other; the names in it mean nothing."""
CERTIFICATE_NAME = "topkube-launcher"
"""The certificate's common name and subject alternative name."""
KEY_FILE = "tls.key"
"""In the launcher's pod only."""
TOKEN_KEY_FILE = "launcher.key"
"""In the launcher's pod only: the key that all workers' tokens derive from, as text."""
OPERATOR_TOKEN_FILE = "operator.token"
"""In the launcher's pod only."""
TOKEN_FILE = "token"
"""In a worker's pod: its own token, item `token_item(index, attempt)` of the Secret."""
LONGEST_NAME = 63
"""Of a label's value or a hostname."""
VARIABLE_BYTES = 128 << 10
"""What Linux takes of one environment variable, its name included."""
TERMINATION_MESSAGE_BYTES = 4096
"""What Kubernetes keeps of /dev/termination-log."""

State = Literal["Waiting", "Starting", "Running", "Succeeded", "Failed"]
"""Waiting for workers; starting MPI; ranks run; over."""


_LONG_TEXT = VARIABLE_BYTES // 4  # quotation may double it


def child_name(*parts: str | int) -> str:
    """The parts joined by '-', cut and given a hash where they would be longer than a label or hostname may be."""
    name = "-".join(str(part) for part in parts)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('-.')}-{digest}"


def worker_name(job: str, index: int, attempt: int) -> str:
    """The name of the pod of worker `index` that was made in `attempt`."""
    return child_name(job, "worker", index, attempt)


def token_item(index: int, attempt: int) -> str:
    """The Secret's key that holds the token of worker `index` made in `attempt`."""
    return f"worker-{index}-{attempt}"


def worker_token(key: str, job_uid: str, index: int, attempt: int) -> str:
    """The token of the worker pod `index` that was made in `attempt` (64 hexadecimal digits).

    `key` is the content of launcher.key; white space around it does not count.
    """
    text = f"topkube worker {job_uid} {index}/{attempt}".encode()
    return hmac.new(key.strip().encode(), text, hashlib.sha256).hexdigest()


class Message(BaseModel):
    """Plain data between the operator and pods: camelCase in JSON, unknown fields passed over."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )
    called: ClassVar[str] = "a message"

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """The message in JSON `text`. Raises LaunchError that names what is wrong with it."""
        try:
            return cls.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            found = "; ".join(
                f"{'.'.join(str(step) for step in one['loc']) or 'the text'}: {one['msg']}"
                for one in error.errors()[:5]
            )
            raise LaunchError(
                f"{cls.called} is unusable: {found}",
                exit_code=2,
                cause="it was written by hand, or by an operator of another version",
                next_step="install the operator and the image of one release",
            ) from None

    def text(self) -> str:
        """As JSON on one line, without what is None."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    def data(self) -> dict[str, Any]:
        """As plain data with YAML's names, without what is None."""
        return self.model_dump(by_alias=True, exclude_none=True)


class ExpectedWorker(Message):
    """A worker pod that the launcher waits for; it refuses all others."""

    index: int = Field(ge=0)
    attempt: int = Field(ge=1)
    """The attempt in which the pod was made; a pod that lives on keeps it."""
    pod: str


class LaunchPlan(Message):
    """What the launcher is told. One launcher pod lives for one attempt."""

    called: ClassVar[str] = f"the launch plan ({PLAN_VARIABLE})"

    name: str
    namespace: str
    uid: str
    """The TrainingJob's."""
    attempt: int = Field(ge=1)
    workers: tuple[ExpectedWorker, ...] = Field(min_length=1)
    """By index, 0 to n-1. Where the text would not fit a variable, it holds `made` instead: the attempts alone, from
    which the names of the pods follow."""
    slots: int = Field(default=1, ge=1)
    """Ranks per worker."""
    mpi: Literal["MPICH", "OpenMPI"] = "MPICH"
    rendezvous_seconds: float = Field(default=600.0, gt=0)
    """How long all workers may take to call; then the attempt ends, and names the missing ones."""
    stall_seconds: float = Field(default=0.0, ge=0)
    """The attempt ends when no rank has finished a step for so long, after the first step; 0: never."""
    startup_seconds: float = Field(default=0.0, ge=0)
    """The same for the first step of the attempt, from the start of the ranks; 0: never."""
    lost_seconds: float = Field(default=20.0, gt=0)
    """How long a worker may be silent before the attempt ends without it. A cut of the network that is shorter is
    survived."""
    grace_seconds: float = Field(default=25.0, ge=0)
    """Between SIGTERM and SIGKILL to the ranks: time for a checkpoint."""
    check_address: bool = True
    """Whether a worker must call from the pod IP that it claims. False only where the network rewrites addresses."""
    address: str = ""
    """Where the launcher listens; every address of the pod by default."""
    port: int = Field(default=LAUNCHER_PORT, ge=0, le=65535)
    environment: dict[str, str] = Field(default={})
    """What the ranks get on top of their container's environment, the same on all workers."""

    @model_validator(mode="before")
    @classmethod
    def _from_attempts(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "workers" in data or not isinstance(data.get("made"), list):
            return data
        name = str(data.get("name"))
        workers = [
            {"index": index, "attempt": made, "pod": worker_name(name, index, made) if isinstance(made, int) else ""}
            for index, made in enumerate(data["made"])
        ]
        return {**data, "workers": workers}

    def text(self) -> str:
        text = super().text()
        if len(text) <= _LONG_TEXT:
            return text
        followed = tuple(
            ExpectedWorker(index=index, attempt=one.attempt, pod=worker_name(self.name, index, one.attempt))
            for index, one in enumerate(self.workers)
        )
        if followed != self.workers:
            return text
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"workers"})
        return json.dumps({**data, "made": [worker.attempt for worker in self.workers]}, separators=(",", ":"))


class WorkerPlan(Message):
    """What a worker is told. It outlives attempts: a launcher tells it the attempt when it joins."""

    called: ClassVar[str] = f"the worker's plan ({WORKER_VARIABLE})"

    name: str
    namespace: str
    uid: str
    """The TrainingJob's."""
    index: int = Field(ge=0)
    attempt: int = Field(ge=1)
    """The attempt in which this pod was made."""
    pod: str
    slots: int = Field(default=1, ge=1)
    workers: int = Field(default=1, ge=1)
    """Of the job: each brings its share of the dataset."""
    launcher: str
    """HOST:PORT of the launcher, usually its Service's ClusterIP and LAUNCHER_PORT; [HOST]:PORT for IPv6, also where it
    was written without the brackets, from a pod's address that was not known yet."""
    grace_seconds: float = Field(default=25.0, ge=0)
    """Between SIGTERM and SIGKILL to the ranks: less than the pod's terminationGracePeriodSeconds."""

    @field_validator("launcher")
    @classmethod
    def _bracketed(cls, launcher: str) -> str:
        host, _, port = launcher.rpartition(":")
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else launcher


class LauncherStatus(Message):
    """What the launcher answers the operator."""

    called: ClassVar[str] = "the launcher's status"

    attempt: int
    state: State
    joined: int = 0
    """Workers that have called."""
    missing: tuple[int, ...] = ()
    """Indexes of the workers that have not."""
    progress: Progress | None = None
    first_failure: FirstFailure | None = None
    cache: CacheStatus | None = None


class Ending(Message):
    """The last words of a launcher or a worker: its container's termination message."""

    called: ClassVar[str] = "the termination message"

    attempt: int
    """The attempt that the launcher ran, or the last one that the worker was in."""
    state: Literal["Succeeded", "Failed"]
    exit_code: int
    """Also the container's."""
    index: int | None = None
    """The worker's index; None from a launcher."""
    oom_kills: int = 0
    """Processes that the kernel killed for memory in the worker's cgroup."""
    first_failure: FirstFailure | None = None
    """The rank or pod that failed first, and why; from a worker, the first among its own ranks."""
    progress: Progress | None = None
    cache: CacheStatus | None = None
    """What the nodes' caches have done in the whole attempt."""

    def message(self) -> str:
        """As JSON of at most TERMINATION_MESSAGE_BYTES bytes: the cache's nodes give way first, then the log tail (from
        its start), then the failure's message."""
        ending = self
        if ending.cache is not None and len(ending.text().encode()) > TERMINATION_MESSAGE_BYTES:
            ending = ending.model_copy(update={"cache": None})
        while (over := len((text := ending.text()).encode()) - TERMINATION_MESSAGE_BYTES) > 0:
            failure = ending.first_failure
            if failure is None or not (failure.log_tail or failure.message):
                break
            if failure.log_tail:
                shorter = failure.log_tail[max(1, over // 6) :]
                failure = failure.model_copy(update={"log_tail": shorter or None})
            else:
                failure = failure.model_copy(update={"message": (failure.message or "")[: -max(1, over // 6)] or None})
            ending = ending.model_copy(update={"first_failure": failure})
        return text
