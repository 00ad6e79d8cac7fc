"""The stages that run other programs: the tests marked `gpu`, sanitisers, profilers."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from pathlib import Path

from gpu_plan.machine import ROOT
from gpu_plan.programs import run_group
from gpu_plan.rows import Row, Rows

_SAMPLE = """
import torch
import topkube.kernels as k

x = torch.randn(300_000).cuda()
indices, values = k.topk(x, 3000)
k.compress_(x, torch.zeros_like(x), 3000)
k.mstopk(x, 3000)
k.decode(k.encode(indices, values, x.numel(), wire="bf16"))
previous = k.PreviousThreshold("cuda")
for _ in range(2):
    k.topk(x, 3000, previous=previous)
scales, signs, _ = k.sign_pack_(x)
k.sign_unpack_add_(x, [(scales, signs)] * 2, [0.5, 0.5])
unaligned = x[1:]
messages = {
    bits: torch.zeros(k.quantised_bytes(unaligned.numel(), bits), dtype=torch.uint8).cuda() for bits in k.QUANTISED_BITS
}
for bits, message in messages.items():
    k.quantised_pack_(unaligned, bits, message)
    k.quantised_unpack_add_(unaligned, bits, [message] * 2, [0.5, 0.5])
top_signs = torch.zeros(k.top_sign_bytes(unaligned.numel(), 30_000), dtype=torch.uint8).cuda()
k.top_sign_pack_(unaligned, 30_000, top_signs)
k.top_sign_unpack_add_(unaligned, 30_000, top_signs, 0.5)
places = [slice(1, 1000), slice(1024, 200_000), slice(200_001, 299_000)]
for layout in (k.SignLayout(places), *(k.IntegerLayout(places, bits) for bits in k.QUANTISED_BITS)):
    row = torch.zeros(layout.message_bytes, dtype=torch.uint8).cuda()
    k.pack_parts_(x, row, layout)
    k.unpack_add_parts_(x, [row] * 2, [0.5, 0.5], layout)
torch.cuda.synchronize()
"""
"""A program that launches every kernel."""
_COUNTERS = (
    "dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__warps_active.avg.pct_of_peak_sustained_active,gpu__time_duration.sum"
)
_HOT = "regex:filter|collect|narrow|total|pack_"
"""The kernels that take most of the time, for the option --kernel-name of Nsight Compute."""
_BEFORE_THE_KILL = 15
"""Seconds after the deadline of a stage, before its process is killed (gpu.py: GRACE_SECONDS)."""


def run_tests(rows: Rows, dry: bool, seconds: float = 300) -> None:
    """Run the tests that are marked `gpu`: they compare every kernel with the CPU, bit for bit."""
    folders = [str(ROOT / "tests/unit" / name) for name in ("kernels", "training/test_training_devices.py")]
    options = ["-q", "--maxfail=30", "--continue-on-collection-errors", "--tb=short", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *options, *folders]
    are_installed = all(importlib.util.find_spec(name) is not None for name in ("pytest", "hypothesis"))
    skipped = "the dry mode" if dry else "" if are_installed else "pytest or hypothesis is not installed"
    rows.measure(
        "suite",
        lambda: (
            {"tool": "pytest", "skipped": skipped} if skipped else _run_command(rows, command, seconds, wrong_status=1)
        ),
    )


def read_counters(rows: Rows, dry: bool, seconds: float = 120) -> None:
    """Read the counters of the hot kernels with Nsight Compute."""
    command = ["ncu", "--metrics", _COUNTERS, "--kernel-name", _HOT, "--csv", sys.executable, "-c", _SAMPLE]
    rows.measure("counters", lambda: _run_if_installed(rows, command, seconds, dry))


def run_sanitisers(rows: Rows, dry: bool, seconds: float = 120) -> None:
    """Check all kernels for memory errors, races and wrong barriers with compute-sanitizer."""
    for tool in ("memcheck", "racecheck", "synccheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", sys.executable, "-c", _SAMPLE]
        rows.measure(f"sanitiser {tool}", lambda command=command: _run_if_installed(rows, command, seconds, dry))


def _run_if_installed(rows: Rows, command: list[str], seconds: float, dry: bool) -> Row:
    if dry or shutil.which(command[0]) is None:
        return {"tool": Path(command[0]).name, "skipped": "the dry mode" if dry else "it is not installed"}
    return _run_command(rows, command, seconds, wrong_status=3)


def _run_command(rows: Rows, command: list[str], seconds: float, wrong_status: int) -> Row:
    """Run a command. Return its exit status and its output. The command reports errors with the exit status
    `wrong_status`. Kill the command before this stage is killed: otherwise it would continue on the device. Raises
    TimeoutError if the command did not end before the deadline, so that the next call runs it again."""
    seconds_left = rows.deadline + _BEFORE_THE_KILL - time.monotonic()
    status, output = run_group(command, min(seconds, seconds_left), capture=True)
    if status is None and seconds_left < seconds:
        raise TimeoutError(f"the time was over after {seconds_left:.0f} s")
    if status is None:
        return {"tool": Path(command[0]).name, "skipped": f"it did not end within {seconds:g} s"}
    wrong = ["errors"] if status == wrong_status else []
    return {"tool": Path(command[0]).name, "status": status, "wrong": wrong, "output": output[-4000:]}
