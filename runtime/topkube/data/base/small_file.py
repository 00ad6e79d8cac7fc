"""Small files that other programs may have written: they are never read further than a bound."""

from __future__ import annotations

import errno
import os
from pathlib import Path

LARGEST_BYTES = 64 << 10
"""The largest small file. The files of the cache have less than 4 KiB."""


def read_small_text(path: Path) -> str:
    """Return the text of a small file. Raises OSError, also if the file is larger than LARGEST_BYTES (it is not read
    then), and UnicodeDecodeError."""
    with path.open("rb") as file:
        data = file.read(LARGEST_BYTES + 1) if os.fstat(file.fileno()).st_size <= LARGEST_BYTES else None
    if data is None or len(data) > LARGEST_BYTES:  # a pipe has no size
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data.decode()
