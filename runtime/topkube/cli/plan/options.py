"""The options of `topkube plan`, and how their numbers and units are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topkube.errors import ArgumentError

_LEAST, _MOST = 1e-9, 1e18
"""The bounds of all numbers with units: beyond them, a number is a slip, and its results would mean nothing."""
_LEAST_PLAIN = 1e6
"""The least number without a unit. A smaller one would be a link of a few bits per second: its unit was forgotten."""
_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)((?i:e)[+-]?[0-9]+)?"
_PREFIX = r"(?P<prefix>[kKmMgGtTpPeE]i?|)"
_SCALES = {
    "": 1.0,
    **{prefix: 1e3**power for power, prefix in enumerate("kmgtpe", 1)},
    **{f"{prefix}i": 1024.0**power for power, prefix in enumerate("kmgtpe", 1)},
}
_FORMS = {
    "--parameters": "25.6M or 7B",
    "--link": "10Gbit/s, 400Mbit, 10Gbps or 1.25GB/s; b stands for bits, B for bytes",
    "--memory": "20GB/s, 3.3TB/s or 16GiB/s",
    "--compute": "0.15 (seconds), 150ms or 60TFLOP/s",
    "--device-memory": "16GB or 80GiB",
}
"""The accepted forms of each option, for people."""


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


def parse_count(text: str, option: str) -> float:
    """Return the number that `text`, the value of `option`, states: 25600000.0 for '25.6M'. Raises ArgumentError, as
    the functions below, with the accepted forms of the option, also for a number that no machine or model has."""
    return _parse(text, option, {r"(?P<prefix>[kKmMgGtT]?)": 1.0, "[bB]": 1e9}, least=1.0)


def parse_link(text: str, option: str) -> float:
    """Return the bytes per second of a link: 1.25e9 for '10Gbit/s', and 1e9 for '1GB/s'. Without a B, a prefix counts
    bits. A number alone counts bits, from a million on: a smaller one lacks its unit, and is refused."""
    prefix = r"(?P<prefix>[kKmMgGtT]?)"
    bits = {rf"{prefix}(?:b|(?i:bits?))(?i:/s|ps)?": 1 / 8, r"(?P<prefix>[kKmMgGtT])": 1 / 8}
    return _parse(text, option, {**bits, rf"{_PREFIX}(?:B|(?i:bytes?))(?:/s|ps)?": 1.0}, least=_LEAST / 8, plain=1 / 8)


def parse_memory_rate(text: str, option: str) -> float:
    """Return bytes per second: 20e9 for '20GB/s' or '20G', and 16 * 2**30 for '16GiB/s'. A number alone must be at
    least a million, as in `parse_link`."""
    return _parse(
        text, option, {rf"{_PREFIX}B(?i:/s|ps)?": 1.0, rf"(?!/|$){_PREFIX}(?i:/s)?": 1.0}, least=1.0, plain=1.0
    )


def parse_size(text: str, option: str) -> float:
    """Return bytes: 16e9 for '16GB' and 16 * 2**30 for '16GiB' or '16Gi'. A number alone must be at least a million,
    as in `parse_link`."""
    return _parse(text, option, {rf"{_PREFIX}[bB]": 1.0, rf"(?!$){_PREFIX}": 1.0}, least=1.0, plain=1.0)


def parse_seconds(text: str, option: str) -> float:
    """Return seconds: 0.15 for '0.15', '0.15s' or '150ms'."""
    return _parse(text, option, {"(?i:s?)": 1.0, "(?i:ms)": 1e-3, "(?i:us)": 1e-6})


def parse_operations_rate(text: str, option: str) -> float:
    """Return floating-point operations per second: 60e12 for '60TFLOP/s' or '60TFLOPS'."""
    return _parse(text, option, {rf"{_PREFIX}(?i:flop(?:s|/s|s/s|ps))": 1.0})


def _parse(
    text: str, option: str, units: Mapping[str, float], least: float = _LEAST, plain: float | None = None
) -> float:
    """Return the number of `text` in the unit that follows it. `units` has the factor by the pattern of the unit, whose
    group `prefix` may contain a prefix such as k or Gi. `plain` is the factor of a number without a unit, if it counts
    from a million on."""
    value = 0.0
    if plain is not None and re.fullmatch(_NUMBER, text.strip()) and float(text) >= _LEAST_PLAIN:
        value = float(text) * plain
    for unit, factor in units.items():
        if match := re.fullmatch(rf"{_NUMBER}\s*{unit}", text.strip()):
            value = float(match[1] + (match[2] or "")) * _SCALES[match.groupdict().get("prefix", "").lower()] * factor
            break
    if not least <= value <= _MOST:
        raise ArgumentError(f"{option} is {text!r}", next_step=f"write it as {_FORMS[option]}")
    return value
