"""What the launcher and a worker say to each other. Parameters travel as checked data, never as a shell line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from topkube.errors import LaunchError
from topkube.launch.contract import Message

Word = Annotated[str, StringConstraints(max_length=64, pattern=r"^[a-zA-Z][a-zA-Z0-9_-]*$")]
Value = Annotated[str, StringConstraints(max_length=16384, pattern=r"^[^\x00-\x1f\x7f]*$")]


class ProxyParameters(Message):
    """The parameters of one worker's MPI process (hydra_pmi_proxy, prted or orted), as mpiexec asked for them, without
    the program and without the address of the control port: the worker has its own for both."""

    mpi: Literal["MPICH", "OpenMPI"]
    options: tuple[tuple[Word, Value], ...] = ()
    """MPICH: `--name value`. Open MPI: an MCA parameter and its value."""
    contact: Value = ""
    """Open MPI: the name under which mpiexec answers; the worker adds the address."""


class Hello(Message):
    """A worker's first words on a connection."""

    kind: Literal["hello"] = "hello"
    session: str = Field(max_length=64)
    """Drawn anew by each worker process."""
    run: str | None = None
    """The launcher's run that this worker was in, where it comes back after a broken connection."""
    received: int = 0
    """Frames of that run that it has."""
    busy: bool = False
    """Whether it runs ranks: it can join only the run that they belong to."""
    ip: str = Field(max_length=64)
    slots: int
    python: str = Field(max_length=4096)
    """The interpreter that runs the rank shim."""
    mpi: str = Field(default="", max_length=256)
    """'MPICH 5.0.2'; empty where it has none."""
    problem: str = Field(default="", max_length=4096)
    """Why this worker cannot run ranks, where it cannot."""
    problem_code: int = 1
    time: float
    """Its clock, Unix seconds."""


class Welcome(Message):
    """The launcher's answer. Where `resumed` is false the session begins anew, and what ran before is over."""

    kind: Literal["welcome"] = "welcome"
    run: str
    attempt: int
    received: int = 0
    resumed: bool
    lost_seconds: float = 20.0


class Start(Message):
    """Start this proxy, and with it the ranks of this worker."""

    kind: Literal["start"] = "start"
    proxy: ProxyParameters
    ranks: tuple[int, ...]
    environment: dict[str, str] = Field(default={})


class End(Message):
    """End the attempt: SIGTERM to the ranks, SIGKILL after `grace_seconds` (0: at once). Then say `ended`."""

    kind: Literal["end"] = "end"
    grace_seconds: float = 0.0
    over: bool = False
    """Whether the run as a whole is over: the worker ends too."""


class Look(Message):
    """Something has failed: say `looked` as soon as every rank here has been reported or is seen to live."""

    kind: Literal["look"] = "look"


class Looked(Message):
    """The answer: what failed here before the question has been told by now."""

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
    """What one node's cache has done for its ranks: samples asked for and not there, bytes from the remote; and what it
    holds."""

    node: str = Field(default="", max_length=253)
    requests: int = Field(default=0, ge=0)
    misses: int = Field(default=0, ge=0)
    remote_bytes: int = Field(default=0, ge=0)
    cached_bytes: int = Field(default=0, ge=0)


class StepDone(Message):
    """The newest step (the fields of StepRecord), at most a few times per second; what the cache says; and signs of
    life besides."""

    kind: Literal["step"] = "step"
    record: dict[str, Any] = Field(default={})
    cache: NodeCache | None = None
    collectives: dict[int, int] = Field(default={})
    """How many collectives ranks of this worker have entered, where that has changed."""
    printed: bool = False
    """Whether a rank has printed something."""


class Terminating(Message):
    """The pod was asked to end; its ranks have been told to save their state and end."""

    kind: Literal["terminating"] = "terminating"


class ProxyEnded(Message):
    """The proxy could not be started or has ended, and so have its ranks."""

    kind: Literal["proxy-ended"] = "proxy-ended"
    exit_code: int
    problem: str = ""


class Ended(Message):
    """Nothing of the attempt is left here; all reports have been sent."""

    kind: Literal["ended"] = "ended"


Said = Annotated[
    Hello
    | Welcome
    | Start
    | End
    | Look
    | Looked
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
_said: TypeAdapter[Said] = TypeAdapter(Said)


def read(text: str) -> Said:
    """The message in `text`. Raises LaunchError where it is none."""
    try:
        return _said.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise LaunchError(
            f"the other end said something unintelligible: {where}: {first['msg']}",
            cause="launcher and worker are of different releases",
            next_step="use one image for both",
        ) from None
