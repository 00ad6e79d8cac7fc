"""A dataset of a million objects: the time and memory to list it and open its cache, in a separate process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENTRIES = 1_000_000
_OPEN = """
import sys, time
from pathlib import Path
start = time.perf_counter()
from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.opening import list_dataset
from topkube.data.formats.shards import Shards
from topkube.data.remote.object_store import ObjectStore
store = ObjectStore(sys.argv[1])
shards = Shards(store.uri, list_dataset(store, DiskTier(Path(sys.argv[2]))))
assert len(shards.listing) == int(sys.argv[3])
keys = len(shards.list_keys())
seconds = time.perf_counter() - start
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) * 1024, keys)
"""


def measure() -> dict[str, Any]:
    """Return the seconds (including imports) and the peak bytes of the process: for the first read of the manifest, and
    for a listing from the cache."""
    with tempfile.TemporaryDirectory(prefix="topkube-entries-") as name:
        manifest = Path(name) / "manifest.jsonl"
        with manifest.open("w") as file:
            file.writelines(
                f'{{"path": "train/{number:07}.jpg", "size": {100_000 + number % 977}, "etag": "{number:x}"}}\n'
                for number in range(ENTRIES)
            )
        command = [sys.executable, "-c", _OPEN, manifest.as_uri(), str(Path(name) / "cache"), str(ENTRIES)]
        result: dict[str, Any] = {"entries": ENTRIES}
        for read in ("first", "again"):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, peak, shards = done.stdout.split()
            result |= {f"{read}_seconds": round(float(seconds), 2), f"{read}_peak_mb": round(int(peak) / 1e6)}
            result["shards"] = int(shards)
    return result
