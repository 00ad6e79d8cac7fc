"""The options of `topkube plan`, and how their numbers and units are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from topkube.errors import ArgumentError
from topkube.job.base.quantity import parse_quantity

_LEAST, _MOST = 1e-9, 1e18
"""The bounds of all numbers with units: beyond them, a number is a slip, and its results would mean nothing."""
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_EXAMPLES = {
    "--parameters": "25.6M or 7B",
    "--link": "10Gbit/s or 400Mbit",
    "--memory": "20GB/s or 3.3TB/s",
    "--compute": "0.15 (seconds) or 60TFLOP/s",
    "--device-memory": "16GB or 80GiB",
}


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    job: Path | None
    model: str | None
    traces: tuple[Path, ...]
    parameters: str | None
    link: str
    memory: str
    compute: str | None
    batch: int | None
    device_memory: str | None
    workers: int | None
    slots: int | None
    cores: int | None
    network_cores: float
    device: str | None
    data: float
    spread: float | None
    density: float | None
    wire: str | None
    dense_wire: str | None
    period: int | None
    overlap: bool
    dear: bool | None
    delay: int | None
    plot: Path | None
    json: bool


def parse_number(text: str, unit: str, option: str, least: float = _LEAST) -> float:
    """Return the number that `text`, the value of `option`, states: 25600000.0 for '25.6M'.

    `unit` is the pattern of a unit that may follow, such as bit/s. Raises ArgumentError with an example of the option,
    also for a number below `least`, or one that no machine or model has.
    """
    match = re.fullmatch(rf"([0-9.]+(?:e-?[0-9]+)?)\s*([kMGBT]?)(?:{unit})?", text.strip())
    try:
        value = float(match[1]) * _SCALES[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    return _check_bounds(value, least, text, option)


def parse_size(text: str, unit: str, option: str) -> float:
    """Return the bytes that `text`, the value of `option`, states: 16e9 for '16GB' and 16 * 2**30 for '16GiB'. `unit`
    and the errors are as in `parse_number`; the B of bytes may be left out."""
    match = re.fullmatch(rf"(\S+?)\s*([kMGTPE]|[KMGTPE]i)?B?(?:{unit})?", text.strip())
    quantity = parse_quantity(match[1] + (match[2] or "")) if match else None
    return _check_bounds(float(quantity or 0), 1.0, text, option)


def _check_bounds(value: float, least: float, text: str, option: str) -> float:
    if not least <= value <= _MOST:
        raise ArgumentError(f"{option} is {text!r}", next_step=f"write it as {_EXAMPLES[option]}")
    return value
