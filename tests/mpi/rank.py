"""What every rank of a test world runs: all cases of a module, in order. `rank.py MODULE RESULTS`."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import topkube
from topkube import world as worlds


def main(module: str, results: Path) -> None:
    topkube.init()
    world = worlds.current()
    cases = importlib.import_module(f"ranks.{module}")
    with results.open("w") if world.rank == 0 else open("/dev/null", "w") as out:
        for name in [name for name in vars(cases) if name.startswith("case_")]:
            problem = ""
            try:
                getattr(cases, name)(world)
            except Exception:
                problem = f"rank {world.rank}: {traceback.format_exc()}"
            problems = world.comm.gather(problem)
            if world.rank == 0:
                out.write(json.dumps({name: "\n".join(filter(None, problems))}) + "\n")
                out.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
