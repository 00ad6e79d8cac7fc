"""Install the packages of spec.setup into a folder, with pip, beside the packages of the image."""

from __future__ import annotations

import collections
import importlib.metadata
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from topkube.errors import SourceError
from topkube.job import Setup
from topkube.job.fields.failure_policy import SETUP_FAILED

PIP_SECONDS = 3600.0
"""The limit of one call of pip."""
KEPT = ("topkube", "torch", "mpi4py")
"""Packages of the image that may not be replaced: they fit its MPI, its CUDA and the operator."""
_TAIL_LINES = 15


def install_packages(setup: Setup, folder: Path, source: Path, scratch: Path) -> list[str]:
    """Install what the image lacks of `setup.requirements` into `folder`. Return what was installed, as NAME==VERSION.

    Packages that the image has in a version that fits are not installed again: pip's own --target would copy torch.
    Raises SourceError with pip's last lines if pip fails, and if a requirement would replace a package in KEPT.
    """
    requirements, report = scratch / "requirements.txt", scratch / "pip-report.json"
    requirements.write_text("\n".join(setup.requirements) + "\n", encoding="utf-8")
    wheel_options = _build_wheel_options(setup, source)
    _run_pip(["--dry-run", "--quiet", "--report", str(report), *wheel_options, "-r", str(requirements)], setup)
    missing: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8")).get("install", [])
    versions = {_normalize_name(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in missing}
    _check_replacements(versions, setup)
    if missing:
        exact = [_pin_version(entry) for entry in missing]
        _run_pip(["--no-deps", "--target", str(folder), *wheel_options, "--", *exact], setup)
    return [f"{name}=={version}" for name, version in versions.items()]


def _build_wheel_options(setup: Setup, source: Path) -> list[str]:
    if setup.wheels is None:
        return []
    wheels = source / setup.wheels
    if not wheels.is_dir():
        raise SourceError(
            f"spec.setup.wheels is {setup.wheels}, and there is no folder {wheels}",
            reason=SETUP_FAILED,
            cause="the source does not contain it, or the worker's template does not mount it",
            next_step="add the folder to the source, or mount it in the container `worker`; "
            "pip download -d wheels REQUIREMENT… fills it",
        )
    return ["--no-index", "--find-links", str(wheels)]


def _pin_version(entry: dict[str, Any]) -> str:
    """Return the requirement that stands for exactly this distribution."""
    name, version = entry["metadata"]["name"], entry["metadata"]["version"]
    return f"{name} @ {entry['download_info']['url']}" if entry.get("is_direct") else f"{name}=={version}"


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_replacements(versions: dict[str, str], setup: Setup) -> None:
    """Raise SourceError if `versions` (by name) contains a package in KEPT."""
    for name in KEPT:
        if name not in versions:
            continue
        try:
            kept_version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        raise SourceError(
            f"spec.setup.requirements would replace {name} {kept_version} of the image with {versions[name]}",
            reason=SETUP_FAILED,
            cause=f"one of {', '.join(setup.requirements)[:300]} needs another version of {name}",
            next_step=f"choose versions that fit {name} {kept_version}, or build an image with them",
        )


def _run_pip(arguments: list[str], setup: Setup) -> None:
    """Run `pip install` and print its output. Raises SourceError with the last lines if pip fails."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        timer = threading.Timer(PIP_SECONDS, pip.kill)
        timer.daemon = True
        timer.start()
        assert pip.stdout is not None
        for line in pip.stdout:
            print(line, end="", flush=True)
            if line.strip():
                tail.append(line.strip())
        code = pip.wait()
        timer.cancel()
    if code:
        no_pip = any("No module named pip" in line for line in tail)
        errors = [line for line in tail if line.startswith("ERROR")] or list(tail)[-3:]
        raise SourceError(
            f"the packages {', '.join(setup.requirements)[:300]} cannot be installed: {' '.join(errors)[:800]}",
            reason=SETUP_FAILED,
            cause="the image has no pip"
            if no_pip
            else "a name or version does not exist, or the pod's network reaches no package index",
            next_step="build an image with the packages, or add their wheels to the source and set spec.setup.wheels",
        )
