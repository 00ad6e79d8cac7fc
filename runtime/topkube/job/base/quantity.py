"""Kubernetes quantities as numbers."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

_SCALES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{unit + "i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


_FORM = re.compile(r"\+?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([A-Za-z]*))")


def parse_quantity(value: Any) -> Decimal | None:
    """Return the exact number of a quantity; None if `value` is no quantity. '500m' -> 0.5, '64Mi' -> 67108864."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    match = _FORM.fullmatch(text)
    if match is None or (match[3] or "") not in _SCALES:
        return None
    number, exponent, unit = match.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _SCALES[unit or ""])


def parse_bytes(quantity: str) -> int:
    """Return the bytes of a valid quantity, rounded up as Kubernetes does. '64Mi' -> 67108864."""
    exact = parse_quantity(quantity)
    assert exact is not None, quantity
    return math.ceil(exact)
