"""The contract between the operator and the pods of a job: ports, files, variables, plans, the launcher's status and
the termination messages.

The operator imports this module (it loads neither torch nor MPI nor NumPy), writes the plans into the pods' environment
and reads `LauncherStatus` over TLS and `Ending`s from the pods' termination messages. The runtime in the image may be
older or newer than the operator: readers ignore unknown fields, and every field that was added later has a default.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from topkube.errors import LaunchError
from topkube.job import CacheStatus, FirstFailure, Progress, Setup, Source
from topkube.job.base.part import INT32
from topkube.job.status import MOST_WORKERS

LAUNCHER_PORT = 7077
"""The port of the launcher's pod and its Service, with TLS: workers join, and the operator reads the status. No other
port of the launcher needs to be reachable."""
METRICS_PORT = 9477
"""The port of the workers' Prometheus metrics."""
JOIN_PATH = "/v1/join"
"""The path of a worker's session (a WebSocket)."""
STATUS_PATH = "/v1/status"
"""GET with `Authorization: Bearer OPERATOR_TOKEN` returns a LauncherStatus."""
DOMAINS_HEADER = "X-Topkube-Domains"
"""Header of the same request: the zone, rack or block of each worker, as numbers by index such as 0,1,0,1. If that is
too long, a number may stand for several workers with consecutive indexes: 0*64,1*64 (`encode_domains`)."""
LONGEST_DOMAINS = 8000
"""The most characters of this header. HTTP servers accept a little more."""

PLAN_VARIABLE = "TOPKUBE_LAUNCH"
"""Holds a LaunchPlan in the launcher's container."""
WORKER_VARIABLE = "TOPKUBE_WORKER"
"""Holds a WorkerPlan in the worker's container."""
SOURCE_VARIABLE = "TOPKUBE_SOURCE"
"""Holds a SourcePlan in the init container of a worker that fetches the source."""
SOURCE_CONTAINER = "topkube-source"
"""The name of that init container."""
SOURCE_FILES_DIRECTORY = "/etc/topkube/source"
"""The ConfigMap of spec.source, in the init container."""
SOURCE_SECRET_DIRECTORY = "/etc/topkube/source-credentials"
"""The Secret of spec.source.git, in the init container."""
CODE_DIRECTORY = "/var/lib/topkube"
"""The volume that the init container fills and the worker mounts too."""
SOURCE_DIRECTORY, PACKAGES_DIRECTORY = f"{CODE_DIRECTORY}/source", f"{CODE_DIRECTORY}/packages"
"""The folder of the source, in which the ranks run, and the folder of the packages of spec.setup."""
POD_IP_VARIABLE = "TOPKUBE_POD_IP"
"""The pod's address (fieldRef status.podIP), in both containers."""
NODE_NAME_VARIABLE = "TOPKUBE_NODE_NAME"
"""The node's name (fieldRef spec.nodeName), in both containers."""

CREDENTIALS_DIRECTORY = "/etc/topkube/credentials"
CERTIFICATE_FILE = "tls.crt"
"""In both pods. Workers and the operator trust this certificate only; they do not check the names in it."""
CERTIFICATE_NAME = "topkube-launcher"
"""The certificate's common name and subject alternative name."""
KEY_FILE = "tls.key"
"""In the launcher's pod only."""
TOKEN_KEY_FILE = "launcher.key"
"""In the launcher's pod only: the key that all workers' tokens derive from, as text."""
OPERATOR_TOKEN_FILE = "operator.token"
"""In the launcher's pod only."""
TOKEN_FILE = "token"
"""In a worker's pod: its own token, item `name_token_item(index, attempt)` of the Secret."""
LONGEST_NAME = 63
"""The longest value of a label, and the longest hostname."""
UID_LETTERS = 5
"""The number of letters of the job's UID in the names of its pods."""
VARIABLE_BYTES = 128 << 10
"""The most bytes of an environment variable in Linux, with its name."""
UNREACHABLE_REASON, REFUSED_REASON = "LauncherUnreachable", "LauncherRefused"
"""`firstFailure.reason` in the termination message of a worker whose calls to the launcher get no answer, or are
rejected. The message states what was tried, the likely causes and the next command."""
UNREACHABLE_CODE = 69
"""Exit code of a worker whose calls failed for `WorkerPlan.unreachable_seconds` (EX_UNAVAILABLE of sysexits.h)."""
TERMINATION_MESSAGE_BYTES = 4096
"""The most bytes of /dev/termination-log that Kubernetes keeps."""

State = Literal["Waiting", "Starting", "Running", "Succeeded", "Failed"]
"""Waiting: for workers. Starting: MPI. Running: the ranks run. Succeeded and Failed: the attempt has ended."""

MOST_REFUSALS, REASON_CHARACTERS = 8, 400
"""The most rejected workers in a LauncherStatus, and the most characters of each reason."""
_LONG_TEXT = VARIABLE_BYTES // 4  # quotation may double it


def name_child(*parts: str | int) -> str:
    """Return the parts joined by '-'. A name that is too long for a label or hostname is cut and gets a hash."""
    name = "-".join(str(part) for part in parts)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('-.')}-{digest}"


def name_worker_pod(job: str, job_uid: str, index: int, attempt: int) -> str:
    """Return the name of the pod of worker `index` that was created in `attempt`.

    It ends in letters of the job's UID: a pod of an earlier job of the same name, which may take long to end, has
    another name.
    """
    return name_child(job, "worker", index, attempt, job_uid[:UID_LETTERS])


def name_token_item(index: int, attempt: int) -> str:
    """Return the key in the Secret of the token of worker `index` that was created in `attempt`."""
    return f"worker-{index}-{attempt}"


def compute_worker_token(key: str, job_uid: str, index: int, attempt: int) -> str:
    """Return the token of the worker pod `index` that was created in `attempt` (64 hexadecimal digits).

    `key` is the content of launcher.key; white space around it is ignored.
    """
    text = f"topkube worker {job_uid} {index}/{attempt}".encode()
    return hmac.new(key.strip().encode(), text, hashlib.sha256).hexdigest()


class Message(BaseModel):
    """A message between the operator and pods: plain data with camelCase names in JSON. Unknown fields are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )
    what: ClassVar[str] = "a message"
    """The name of the message in errors."""

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """Return the message in the JSON `text`. Raises LaunchError, which names the invalid fields."""
        try:
            return cls.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(step) for step in entry['loc']) or 'the text'}: {entry['msg']}"
                for entry in error.errors()[:5]
            )
            raise LaunchError(
                f"{cls.what} is invalid: {problems}",
                exit_code=2,
                cause="it was written by hand, or by an operator of another version",
                next_step="use the operator and the image of the same release",
            ) from None

    def to_json(self) -> str:
        """Return the message as JSON on one line, without fields that are None."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the message as plain data with the names of YAML, without fields that are None."""
        return self.model_dump(by_alias=True, exclude_none=True)


class ExpectedWorker(Message):
    """A worker pod that the launcher waits for. The launcher rejects all others."""

    index: int = Field(ge=0)
    attempt: int = Field(ge=1)
    """The attempt in which the pod was created. It stays the same when the pod takes part in later attempts."""
    pod: str


class LaunchPlan(Message):
    """The plan of a launcher. A launcher's pod runs one attempt."""

    what: ClassVar[str] = f"the launch plan ({PLAN_VARIABLE})"

    name: str
    namespace: str
    uid: str
    """The uid of the TrainingJob."""
    attempt: int = Field(ge=1)
    workers: tuple[ExpectedWorker, ...] = Field(min_length=1)
    """The workers by index, 0 to n-1. If the text is too long for a variable, it holds `made` instead: only the
    attempts, from which the names of the pods follow."""
    slots: int = Field(default=1, ge=1)
    """Ranks per worker."""
    mpi: Literal["MPICH", "OpenMPI"] = "MPICH"
    rendezvous_seconds: float = Field(default=600.0, gt=0)
    """The longest time that the workers may take to join. Then the attempt fails and names the missing workers."""
    stall_seconds: float = Field(default=0.0, ge=0)
    """The attempt fails if no rank finishes a step for this time after the first step; 0: never."""
    startup_seconds: float = Field(default=0.0, ge=0)
    """The same limit for the first step of the attempt, from the start of the ranks; 0: never."""
    lost_seconds: float = Field(default=20.0, gt=0)
    """The time after which a silent worker makes the attempt fail. Shorter interruptions of the network have no
    effect."""
    grace_seconds: float = Field(default=25.0, ge=0)
    """Time between SIGTERM and SIGKILL to the ranks, for a checkpoint."""
    domains_seconds: float = Field(default=0.0, ge=0)
    """The longest wait for the operator's DOMAINS_HEADER after all workers have joined; 0: ranks are in the order of
    the workers' indexes. With the header, the workers of each domain have consecutive ranks."""
    order: tuple[int, ...] = ()
    """Indexes of the workers in the order of their ranks; empty: by index. The launcher sets it."""
    check_address: bool = True
    """True if a worker must call from the pod IP in its hello. Use False only if the network rewrites addresses: a
    service mesh, whose sidecar forwards calls from 127.0.0.6, or a Service with SNAT. Tokens and the certificate are
    checked in any case."""
    address: str = ""
    """The address on which the launcher listens; every address of the pod by default."""
    port: int = Field(default=LAUNCHER_PORT, ge=0, le=65535)
    environment: dict[str, str] = Field(default={})
    """Variables of the ranks besides those of their container, the same on all workers."""

    @model_validator(mode="before")
    @classmethod
    def _derive_workers(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "workers" in data or not isinstance(data.get("made"), list):
            return data
        name, uid = str(data.get("name")), str(data.get("uid"))
        workers = [
            {
                "index": index,
                "attempt": made,
                "pod": name_worker_pod(name, uid, index, made) if isinstance(made, int) else "",
            }
            for index, made in enumerate(data["made"])
        ]
        return {**data, "workers": workers}

    def reorder(self, domains: Sequence[int]) -> Self:
        """Return the plan with consecutive ranks for the workers of each domain. `domains` holds a number per worker,
        by index."""
        order = sorted(range(len(self.workers)), key=lambda index: (domains[index], index))
        return self.model_copy(update={"order": tuple(order)})

    def find_worker(self, rank: int) -> ExpectedWorker:
        """Return the worker that runs a rank."""
        position = min(rank // self.slots, len(self.workers) - 1)
        return self.workers[self.order[position] if self.order else position]

    def to_json(self) -> str:
        text = super().to_json()
        if len(text) <= _LONG_TEXT:
            return text
        derived = tuple(
            ExpectedWorker(
                index=index, attempt=worker.attempt, pod=name_worker_pod(self.name, self.uid, index, worker.attempt)
            )
            for index, worker in enumerate(self.workers)
        )
        if derived != self.workers:
            return text
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"workers"})
        return json.dumps({**data, "made": [worker.attempt for worker in self.workers]}, separators=(",", ":"))


def encode_domains(domains: Iterable[int]) -> str:
    """Return the text of DOMAINS_HEADER for the domains of all workers, by index. The text may be longer than
    LONGEST_DOMAINS, and then cannot be sent."""
    numbers = list(domains)
    text = ",".join(map(str, numbers))
    if len(text) <= LONGEST_DOMAINS:
        return text  # which launchers of earlier releases read too
    runs = [(number, len(list(run))) for number, run in itertools.groupby(numbers)]
    return ",".join(f"{number}*{length}" if length > 1 else str(number) for number, length in runs)


def parse_domains(text: str, workers: int) -> tuple[int, ...] | None:
    """Return the domains of DOMAINS_HEADER; None if the text does not hold a number for each of `workers`."""
    if len(text) > LONGEST_DOMAINS:
        return None
    domains: list[int] = []
    for part in text.split(","):
        run = re.fullmatch(r"([0-9]{1,5})(?:\*([0-9]{1,5}))?", part)
        length = int(run[2] or 1) if run else 0
        if run is None or not 0 < length <= workers - len(domains):
            return None
        domains += [int(run[1])] * length
    return tuple(domains) if len(domains) == workers else None


class WorkerPlan(Message):
    """The plan of a worker. A worker outlives attempts: the launcher sends the attempt when the worker joins."""

    what: ClassVar[str] = f"the worker's plan ({WORKER_VARIABLE})"

    name: str
    namespace: str
    uid: str
    """The uid of the TrainingJob."""
    index: int = Field(ge=0)
    attempt: int = Field(ge=1)
    """The attempt in which this pod was created."""
    pod: str
    slots: int = Field(default=1, ge=1)
    workers: int = Field(default=1, ge=1)
    """The number of workers of the job. Each fetches its share of the dataset."""
    launcher: str
    """HOST:PORT of the launcher, usually its Service's ClusterIP and LAUNCHER_PORT; [HOST]:PORT for IPv6. Missing
    brackets are added: Kubernetes may insert the address of a pod that the operator did not know yet."""
    grace_seconds: float = Field(default=25.0, ge=0)
    """Time between SIGTERM and SIGKILL to the ranks: less than the pod's terminationGracePeriodSeconds."""
    unreachable_seconds: float = Field(default=0.0, ge=0)
    """If all its calls fail for this time, the worker ends with UNREACHABLE_CODE and the reason in its termination
    message; 0: it calls for as long as its pod lives. A worker that is asked to end writes the reason in any case."""

    @field_validator("launcher")
    @classmethod
    def _add_brackets(cls, launcher: str) -> str:
        host, _, port = launcher.rpartition(":")
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else launcher


class SourcePlan(Message):
    """The plan of a worker's init container: the source that it fetches, and the packages that it installs."""

    what: ClassVar[str] = f"the plan of the source ({SOURCE_VARIABLE})"

    pod: str
    attempt: int = Field(ge=1)
    """The attempt in which this pod was created."""
    index: int = Field(ge=0)
    """The index of the worker."""
    source: Source | None = None
    setup: Setup | None = None


class Refusal(Message):
    """A worker that the launcher rejects although its token is correct."""

    index: int = Field(ge=0)
    reason: str = Field(max_length=REASON_CHARACTERS)


class LauncherStatus(Message):
    """The launcher's answer to the operator. Any code may run in its pod, so the fields have limits, here and in
    `topkube.job.status`."""

    what: ClassVar[str] = "the launcher's status"

    attempt: int = Field(ge=0, le=INT32)
    state: State
    joined: int = Field(default=0, ge=0, le=MOST_WORKERS)
    """The number of workers that have joined."""
    missing: Annotated[tuple[Annotated[int, Field(ge=0, lt=MOST_WORKERS)], ...], FailFast()] = Field(
        default=(), max_length=MOST_WORKERS
    )
    """Indexes of the workers that have not joined."""
    refused: tuple[Refusal, ...] = ()
    """Missing workers that call and are rejected, with the reason; at most MOST_REFUSALS."""
    progress: Progress | None = None
    first_failure: FirstFailure | None = None
    cache: CacheStatus | None = None


class Ending(Message):
    """The termination message of a launcher's or a worker's container. Any code may write it, so the fields have
    limits, here and in `topkube.job.status`."""

    what: ClassVar[str] = "the termination message"

    attempt: int = Field(ge=0, le=INT32)
    """The attempt that the launcher ran, or the last attempt of the worker."""
    state: Literal["Succeeded", "Failed"]
    exit_code: int = Field(ge=-INT32, le=INT32)
    """The exit code of the container."""
    index: int | None = Field(default=None, ge=0, lt=MOST_WORKERS)
    """The worker's index; None from a launcher."""
    oom_kills: int = Field(default=0, ge=0, le=INT32)
    """Processes that the kernel killed for memory in the worker's cgroup."""
    first_failure: FirstFailure | None = None
    """The rank or pod that failed first, and why; from a worker, the first among its own ranks."""
    progress: Progress | None = None
    cache: CacheStatus | None = None
    """The counters of the nodes' caches over the whole attempt."""
    lost_output_bytes: int = 0
    """Bytes that ranks printed and that no log contains, because a disk was full or no process read the pod's output. A
    launcher reports the sum of all workers. Training is not affected."""

    def to_message(self) -> str:
        """Return the ending as JSON of at most TERMINATION_MESSAGE_BYTES bytes. If it is too long, the cache is left
        out first, then the start of the log tail, then the end of the failure's message."""
        ending = self
        if ending.cache is not None and len(ending.to_json().encode()) > TERMINATION_MESSAGE_BYTES:
            ending = ending.model_copy(update={"cache": None})
        while (excess := len((text := ending.to_json()).encode()) - TERMINATION_MESSAGE_BYTES) > 0:
            failure = ending.first_failure
            if failure is None or not (failure.log_tail or failure.message):
                break
            # JSON needs at most 6 bytes for a character, so each pass cuts off at least a sixth of the excess.
            if failure.log_tail:
                shorter = failure.log_tail[max(1, excess // 6) :]
                failure = failure.model_copy(update={"log_tail": shorter or None})
            else:
                failure = failure.model_copy(
                    update={"message": (failure.message or "")[: -max(1, excess // 6)] or None}
                )
            ending = ending.model_copy(update={"first_failure": failure})
        return text
