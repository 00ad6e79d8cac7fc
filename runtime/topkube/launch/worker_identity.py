"""A worker as it introduces itself to a launcher: its address, its MPI, its Python and its source."""

from __future__ import annotations

import sys
import time
import uuid

from topkube.errors import LaunchError
from topkube.launch.connection.messages import Hello
from topkube.launch.connection.session import Session
from topkube.launch.contract import WorkerPlan
from topkube.launch.mpi import mpi_library

_PROBLEM_CHARACTERS = 4096


class WorkerIdentity:
    """The identity of a worker process. `ip` is the address of its pod; `source_digest` is empty if its code is in the
    image."""

    def __init__(self, plan: WorkerPlan, ip: str, source_digest: str) -> None:
        self._plan, self._source_digest = plan, source_digest
        self.ip = ip
        self._session_id = uuid.uuid4().hex
        self.mpi: mpi_library.Mpi | None = None
        self.problem: LaunchError | None = None
        """Why this worker cannot run ranks; None if it can."""
        try:
            mpi = mpi_library.find_mpi()
            mpi_library.check_same_mpi(mpi, mpi_library.read_library())
            self.mpi = mpi
        except LaunchError as error:
            self.problem = error

    def build_hello(self, session: Session, *, busy: bool) -> Hello:
        """Return the first message of a call, which continues `session` if one exists. `busy`: ranks run here."""
        link, welcome = session.link, session.welcome
        return Hello(
            session=self._session_id,
            run=welcome.run if welcome is not None else None,
            received=link.received if link is not None else 0,
            busy=busy,
            ip=self.ip,
            slots=self._plan.slots,
            python=sys.executable,
            mpi=str(self.mpi) if self.mpi is not None else "",
            source=self._source_digest,
            problem=str(self.problem)[:_PROBLEM_CHARACTERS] if self.problem is not None else "",
            problem_code=self.problem.exit_code if self.problem is not None else 1,
            time=time.time(),
        )
