"""The program of every rank of a test world: it runs all cases of some modules, in order, or one function of a module.

`rank.py MODULES RESULTS [FUNCTION ARGUMENT...]`, modules separated by commas.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import topkube
from topkube import world as worlds

HANGS_SECONDS = 220
"""A rank that runs longer than this prints its stacks, before the world is killed."""


def select_functions(modules: str, chosen: list[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the function of each case. If `chosen` is set, yield only the function that it names, with
    the other texts of `chosen` as arguments."""
    for module in (importlib.import_module(f"ranks.{name}") for name in modules.split(",")):
        if chosen:
            name, *arguments = chosen
            function = getattr(module, name)
            yield name, lambda world, f=function, a=arguments: f(world, *a)
        else:
            yield from ((name, value) for name, value in list(vars(module).items()) if name.startswith("case_"))


def main(modules: str, results: Path, chosen: list[str]) -> None:
    topkube.init()
    world = worlds.current()
    with results.open("w") if world.rank == 0 else open("/dev/null", "w") as out:
        for name, function in select_functions(modules, chosen):
            problem = ""
            worlds.current().cache.pop("measuring turn", None)  # an optimizer of an earlier case may have kept it
            try:
                function(worlds.current())
            except BaseException:  # pytest's own failures do not derive from Exception
                problem = f"rank {world.rank}: {traceback.format_exc()}"
                print(problem, file=sys.stderr, flush=True)  # others may wait for this rank until they are killed
            problems = worlds.current().comm.gather(problem)  # a case may have created the world again
            if world.rank == 0:
                out.write(json.dumps({name: "\n".join(filter(None, problems))}) + "\n")
                out.flush()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANGS_SECONDS)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
