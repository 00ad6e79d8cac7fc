"""Fingerprints of decode functions. Samples that one function decoded are never returned for another function."""

from __future__ import annotations

from typing import Any

import xxhash

from topkube.data.cache.reached_code import describe


def fingerprint(decode: Any) -> str:
    """Return 32 hexadecimal digits that identify what the function does; "" for None.

    If the object has a `fingerprint` attribute (text), that text is used. Otherwise the fingerprint covers the code of
    the function and everything that the code reaches: defaults, closures, globals and helpers, and what those reach.
    Installed libraries count with name and version. Raises DatasetError if the code uses something that cannot be
    described; then an explicit fingerprint is needed.
    """
    if decode is None:
        return ""
    own = getattr(decode, "fingerprint", None)
    parts = [own] if isinstance(own, str) else describe(decode)
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))
