"""Measure all parts of a training with many real ranks on this machine: seconds, memory and open files per rank.

    python benchmarks/ranks.py                          16, 32, 64 and 128 ranks, MPICH and Open MPI
    python benchmarks/ranks.py --ranks 128 --mpi mpich  one of these; the other results stay

All ranks share the cores of the machine, so the seconds show correctness and growth, not the speed of a cluster. Ranks
are forks of a process that has imported torch; otherwise 128 ranks would need 30 GB. The memory is that of a rank
beyond that process. The ranks run tests/mpi/ranks/scale.py, which is also part of `make test`. Each world resumes from
the checkpoint of two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "mpi"), str(ROOT)]

import worlds  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "ranks.json"
LAYOUTS = ("2 uneven nodes", "8 uneven nodes", "16 nodes")
SECONDS = 1500


def measure(mpi: str, ranks: int, layout: str, directory: Path) -> dict[str, Any]:
    """Return the row of one world."""
    result, checkpoints = directory / "row.json", str(directory / "checkpoints")
    with worlds.start_forks(mpi, directory) as forks:
        outcomes = worlds.run_cases(mpi, (1, 1), "scale", directory, "leave_checkpoint", checkpoints, forks=forks)
        start = time.monotonic()
        arguments = ["measure", str(result), layout, checkpoints]
        outcomes |= worlds.run_cases(mpi, (1,) * ranks, "scale", directory, *arguments, forks=forks, seconds=SECONDS)
    if not result.exists():  # written last: ranks leave such a world without calling MPI_Finalize
        raise SystemExit("\n".join(outcomes.values()))
    row: dict[str, Any] = {"mpi": mpi, "ranks": ranks, **json.loads(result.read_text())}
    row["whole_seconds"] = time.monotonic() - start
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--mpi", nargs="+", choices=("mpich", "openmpi"), default=["mpich", "openmpi"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    stored["machine"] = {
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }
    for mpi in arguments.mpi:
        for ranks in arguments.ranks:
            for layout in arguments.layouts:
                with tempfile.TemporaryDirectory() as directory:
                    row = measure(mpi, ranks, layout, Path(directory))
                key = (mpi, ranks, layout)
                others = [old for old in stored["rows"] if (old["mpi"], old["ranks"], old["layout"]) != key]
                stored["rows"] = sorted([*others, row], key=lambda row: (row["mpi"], row["ranks"], row["layout"]))
                RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
