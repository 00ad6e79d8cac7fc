"""The messages between the launcher and a worker. Parameters are sent as checked data, never as a shell command."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from topkube.errors import LaunchError
from topkube.launch.contract import Message
from topkube.launch.host.arguments import STRING_BYTES

Word = Annotated[str, StringConstraints(max_length=64, pattern=r"^[a-zA-Z][a-zA-Z0-9_-]*$")]
Value = Annotated[str, StringConstraints(max_length=STRING_BYTES, pattern=r"^[^\x00-\x1f\x7f]*$")]


class ProxyParameters(Message):
    """The parameters of one worker's MPI process (hydra_pmi_proxy, prted or orted), as mpiexec requests them, without
    the program and the address of the control port: the worker has its own for both."""

    mpi: Literal["MPICH", "OpenMPI"]
    options: tuple[tuple[Word, Value], ...] = ()
    """MPICH: `--name value`. Open MPI: an MCA parameter and its value."""
    contact: Value = ""
    """Open MPI: mpiexec's name in the protocol; the worker adds the address."""


class Hello(Message):
    """A worker's first message on a connection."""

    kind: Literal["hello"] = "hello"
    session: str = Field(max_length=64)
    """Random, and different for each worker process."""
    run: str | None = None
    """The launcher's run that this worker belongs to, if it calls again after a broken connection."""
    received: int = 0
    """The number of frames of that run that it has received."""
    busy: bool = False
    """True if it runs ranks: it can join only the run that they belong to."""
    ip: str = Field(max_length=64)
    slots: int
    python: str = Field(max_length=4096)
    """The Python interpreter that runs the rank shim."""
    mpi: str = Field(default="", max_length=256)
    """The MPI and its version, such as 'MPICH 5.0.2'; empty if the worker has no MPI."""
    source: str = Field(default="", max_length=64)
    """The digest of the source that this worker has fetched; empty if its code is in the image."""
    problem: str = Field(default="", max_length=4096)
    """Why this worker cannot run ranks; empty if it can."""
    problem_code: int = 1
    """The exit code of a run that ends because of `problem`."""
    time: float
    """The worker's clock, Unix seconds."""


class Welcome(Message):
    """The launcher's answer. If `resumed` is false, a new session begins, and the worker's earlier attempt is over."""

    kind: Literal["welcome"] = "welcome"
    run: str
    attempt: int
    received: int = 0
    resumed: bool
    lost_seconds: float = 20.0
    """The time without a message after which each end regards the other as lost."""


class Start(Message):
    """A request to start this proxy, which starts the ranks of this worker."""

    kind: Literal["start"] = "start"
    proxy: ProxyParameters
    ranks: tuple[int, ...]
    environment: dict[str, str] = Field(default={})


class End(Message):
    """A request to end the attempt: SIGTERM to the ranks, SIGKILL after `grace_seconds` (0: at once). The worker
    answers with `Ended`."""

    kind: Literal["end"] = "end"
    grace_seconds: float = 0.0
    over: bool = False
    """True if the whole run is over: the worker ends too."""


class CheckRanks(Message):
    """A question after a failure. The worker answers with `RanksChecked` as soon as each of its ranks has a report or
    runs."""

    kind: Literal["look"] = "look"


class RanksChecked(Message):
    """The answer to `CheckRanks`: all failures on this worker before the question have been reported."""

    kind: Literal["looked"] = "looked"


class Open(Message):
    """A proxy has connected to the worker's control port; bytes of stream `stream` follow."""

    kind: Literal["open"] = "open"
    stream: int = Field(ge=0, le=0xFFFF)


class Close(Message):
    """Stream `stream` has ended, or could not be opened."""

    kind: Literal["close"] = "close"
    stream: int = Field(ge=0, le=0xFFFF)


class Running(Message):
    """All ranks of this worker run."""

    kind: Literal["running"] = "running"


class Report(Message):
    """One rank has ended (the fields of RankReport)."""

    kind: Literal["report"] = "report"
    report: dict[str, Any]
    oom_kills: int = 0
    """Processes of this pod that the kernel has killed for memory since the attempt began."""


class NodeCache(Message):
    """The counters of a node's cache: requested and missing samples, bytes from the remote, and cached bytes."""

    node: str = Field(default="", max_length=253)
    requests: int = Field(default=0, ge=0)
    misses: int = Field(default=0, ge=0)
    remote_bytes: int = Field(default=0, ge=0)
    cached_bytes: int = Field(default=0, ge=0)


class StepDone(Message):
    """The newest step (the fields of StepRecord), at most a few times per second, the counters of the cache, and other
    signs of life."""

    kind: Literal["step"] = "step"
    record: dict[str, Any] = Field(default={})
    cache: NodeCache | None = None
    collectives: dict[int, int] = Field(default={})
    """The number of collectives that ranks of this worker have entered, for ranks whose number has changed."""
    printed: bool = False
    """True if a rank has printed something."""


class Terminating(Message):
    """The pod was asked to end. Its ranks save their state and end."""

    kind: Literal["terminating"] = "terminating"


class ProxyEnded(Message):
    """The proxy and its ranks have ended, or the proxy could not be started."""

    kind: Literal["proxy-ended"] = "proxy-ended"
    exit_code: int
    problem: str = ""


class Ended(Message):
    """No process of the attempt is left on this worker. All reports have been sent, and the ranks' output is in the
    pod's log, except `lost_output_bytes`."""

    kind: Literal["ended"] = "ended"
    lost_output_bytes: int = Field(default=0, ge=0)


AnyMessage = Annotated[
    Hello
    | Welcome
    | Start
    | End
    | CheckRanks
    | RanksChecked
    | Open
    | Close
    | Running
    | Report
    | StepDone
    | Terminating
    | ProxyEnded
    | Ended,
    Field(discriminator="kind"),
]
_adapter: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


def parse_message(text: str) -> AnyMessage:
    """Return the message in `text`. Raises LaunchError if there is none."""
    try:
        return _adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(step) for step in first["loc"])
        raise LaunchError(
            f"the other end sent an invalid message: {field}: {first['msg']}",
            cause="launcher and worker are of different releases",
            next_step="use the same image for both",
        ) from None
