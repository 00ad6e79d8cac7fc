"""Start `topkube run` as a user does, with a script that does not use torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

SCRIPT = Path(__file__).with_name("rank_script.py")


def write_job(directory: Path, command: list[str], workers: int = 2, **spec: Any) -> Path:
    """Write a job of `workers` x 2 ranks; return its path."""
    container = {"name": "worker", "image": "none", "command": command[:1], "args": command[1:]}
    job = {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "workers": workers,
            "slotsPerWorker": 2,
            "template": {"spec": {"containers": [container]}},
            "aggregation": {"algorithm": "hitopk"},
            **spec,
        },
    }
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def build_command(job: Path, directory: Path, *options: str) -> list[str]:
    """Return the command of `topkube run` with its run directory inside `directory`."""
    directory_option = ["--run-directory", str(directory / "run")]
    return [sys.executable, "-m", "topkube.cli", "run", str(job), *directory_option, *options]


def start_run(
    job: Path, directory: Path, *options: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = build_command(job, directory, *options)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=directory, env=environment
    )


def finish_run(running: subprocess.Popen[str], seconds: float = 280) -> subprocess.CompletedProcess[str]:
    try:
        stdout, stderr = running.communicate(timeout=seconds)
    finally:
        running.kill()
    return subprocess.CompletedProcess(running.args, running.returncode, stdout, stderr)


def run_job(
    job: Path, directory: Path, *options: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return finish_run(start_run(job, directory, *options, environment=environment))


def list_living_processes(directory: Path) -> list[str]:
    """Return the command lines of living processes whose working directory is `directory`: the runs that tests started
    there."""
    command_lines = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if Path(os.readlink(process / "cwd")) == directory:
                    command_lines.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return command_lines
