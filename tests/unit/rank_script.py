"""The script of each rank in the tests, with the arguments STEPS MODE RANK. The script reports progress as training
does. In step 3, RANK fails in the way MODE."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import topkube
from topkube.settings import Settings
from topkube.telemetry.progress import ProgressWriter, StepRecord

steps, mode, failing_rank = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
topkube.init()
settings = Settings.from_environment()
print("up", topkube.rank(), topkube.node(), os.environ["OMP_NUM_THREADS"], os.environ.get("LEVEL"), flush=True)
assert settings.run_path is not None
writer = ProgressWriter(settings.run_path) if topkube.rank() == 0 else None
world = topkube.world.current()


def fail() -> None:
    if mode == "raise":
        raise ValueError("boom")
    if mode == "exit":
        os._exit(7)
    if mode == "sys-exit":
        sys.exit(7)
    if mode == "raise-exit":
        raise SystemExit(7)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "crash":
        ctypes.string_at(0)
    if mode == "hang":
        time.sleep(1000)


for step in range(1, steps + 1):
    if mode == "hang" and step == 3:  # the ranks may have started more than a second apart
        assert world.deadline_seconds == 30
        world.deadline_seconds = 1
    world.agree(True)
    if step == 3 and topkube.rank() == failing_rank:
        fail()
    if writer is not None:
        writer.write(
            StepRecord(
                step=step,
                total_steps=steps,
                loss=4.0 / step,
                samples=64,
                samples_per_second=6400.0,
                seconds={
                    "data": 0.001,
                    "forward": 0.002,
                    "backward": 0.007,
                    "update": 0.001,
                    "select": 0.001,
                    "intra": 0.001,
                    "inter": 0.002,
                },
                intra_bytes=1000,
                inter_bytes=100,
                dense_bytes=10_000,
                density=settings.density,
                time=time.time(),
            )
        )
    if mode == "none" and steps > 1000:
        time.sleep(0.01)
print("done")
