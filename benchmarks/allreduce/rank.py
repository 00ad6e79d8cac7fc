"""The program of every rank: it takes an order, runs a collective between barriers, checks the result, and answers.

rank.py LIBRARY SOCKET LAYOUT        LIBRARY: mpich | openmpi | gloo; LAYOUT: ranks per node, "2,2"
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from allreduce import contenders, orders
from allreduce.problem import SumProblem


def serve(library: str, path: str) -> None:
    backend = contenders.BACKENDS[library]()
    orders.follow(path, backend.rank, lambda order: run_order(backend, order))
    backend.close()


_work = np.empty(0, np.float32)
"""The array on which collectives work. It is kept between orders."""


def run_order(backend: Any, order: dict[str, Any]) -> dict[str, Any]:
    global _work
    if order["do"] == "probe":
        from allreduce.probes import time_memory

        return time_memory(order["kind"], order["length"], backend.barrier)
    problem = SumProblem(Path(order["problem"]))
    if _work.size != problem.length:
        _work = np.empty(problem.length, np.float32)
    values = np.array(problem.load_input(backend.rank))
    collective = backend.build_collective(order["contender"], order["density"])
    gc.collect()
    gc.disable()
    try:
        backend.barrier()
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        for _ in range(order["repeats"]):
            np.copyto(_work, values)
            result = collective(_work)
        end = time.clock_gettime(time.CLOCK_MONOTONIC)
        backend.barrier()
    finally:
        gc.enable()
    answer = {"start": start, "end": end, "phases": backend.take_phases()}
    if order["check"]:
        problem.check(np.asarray(result), order["reference"], order["tolerance"])
    return answer


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
