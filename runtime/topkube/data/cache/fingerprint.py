"""Fingerprints of decode functions. Samples that one function decoded are never returned for another function."""

from __future__ import annotations

from typing import Any

import xxhash

from topkube.data.cache.reached_code import describe_value


def compute_fingerprint(decode: Any) -> str:
    """Return 32 hexadecimal digits that identify what the function does; "" for None.

    If the object has a `fingerprint` attribute (text), that text is used. Otherwise the fingerprint covers the code of
    the function and everything that the code reaches: defaults, closures, globals and helpers, and the objects that
    these reach. Installed libraries are covered by their names and versions. Raises DatasetError if the code uses an
    object that cannot be described; then the user must pass a fingerprint.
    """
    if decode is None:
        return ""
    own_fingerprint = getattr(decode, "fingerprint", None)
    parts = [own_fingerprint] if isinstance(own_fingerprint, str) else describe_value(decode)
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))
