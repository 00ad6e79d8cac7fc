"""Kubernetes quantities as numbers of bytes."""

from __future__ import annotations

import re
from decimal import Decimal

_SCALES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{unit + "i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def in_bytes(quantity: str) -> int:
    """The bytes of a valid quantity, rounded up as Kubernetes does. '64Mi' -> 67108864."""
    match = re.fullmatch(r"\+?([0-9.]+)(?:[eE]([+-]?[0-9]+)|([A-Za-z]*))", quantity)
    assert match is not None, quantity
    number, exponent, unit = match.groups()
    scale = Decimal(10) ** int(exponent) if exponent else _SCALES[unit]
    exact = Decimal(number) * scale
    whole = int(exact)
    return whole if whole == exact else whole + 1
