"""A program that looks like a training to its launcher: all ranks make steps together, report progress, and save a
state every five steps and on SIGTERM.

`marching.py STEPS SECONDS [RANK:STEP:FAULT …]`: a step takes SECONDS. In the first attempt, RANK fails with FAULT at
STEP: raise=TEXT, exit=CODE, crash, sleep=SECONDS or hang.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from topkube.settings import Settings
from topkube.telemetry.progress import ProgressWriter, StepRecord


def cause_fault(fault: str) -> None:
    """Make this rank fail, or sleep."""
    name, _, value = fault.partition("=")
    if name == "raise":
        raise ValueError(value)
    if name == "exit":
        print("about to leave", flush=True)
        os._exit(int(value))
    if name == "crash":
        ctypes.string_at(0)
    if name == "sleep":
        time.sleep(float(value))
    if name == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    steps, seconds = int(sys.argv[1]), float(sys.argv[2])
    faults = {(int(rank), int(step)): fault for rank, step, fault in (word.split(":") for word in sys.argv[3:])}
    world, settings = MPI.COMM_WORLD, Settings.from_environment()
    saved_step = Path(settings.checkpoint_directory or ".") / "step"
    step = int(world.bcast(saved_step.read_text() if world.rank == 0 and saved_step.exists() else "0"))
    own_stop = np.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: own_stop.fill(1))
    writer = ProgressWriter(Path(settings.run_directory)) if world.rank == 0 else None
    print(f"from step {step} in attempt {settings.attempt} as process {os.getpid()}", flush=True)
    while step < steps:
        if (world.rank, step) in faults and settings.attempt == 1:
            cause_fault(faults[world.rank, step])
        stops = np.zeros(1)  # how many ranks were asked to end
        request = world.Iallreduce(own_stop, stops)
        while not request.Test():  # a call that blocks would use a processor for as long as another rank hangs
            time.sleep(0.001)
        step += 1
        time.sleep(seconds)
        if world.rank == 0:
            if step % 5 == 0 or stops[0]:
                saved_step.write_text(str(step))
            assert writer is not None
            writer.write(StepRecord(step=step, total_steps=steps, loss=1 / step, time=time.time()))
        if stops[0]:
            raise SystemExit(143)
    print(f"done at step {step}", flush=True)


def abort_all_ranks(kind: type[BaseException], error: BaseException, trace: object) -> None:
    sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)


sys.excepthook = abort_all_ranks
main()
