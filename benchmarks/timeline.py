"""Record what a rank does in one training step, for TopKube's algorithms and for DistributedDataParallel.

    python benchmarks/timeline.py [--rate 1gbit|100mbit] [--contender NAME ...]

Two nodes are network namespaces, as in benchmarks/step.py; this needs root. The same GPT of 4.8 million parameters
trains on one thread per rank. TopKube's steps are traced by the product (docs/trace.md), those of DDP by this
benchmark: an exchange of DDP lasts from the call of the communication hook to its result. The recorded step is
that of median duration among the last eleven steps of rank 0. benchmarks/report.py draws the picture. Recording makes
steps slightly longer: compare times with benchmarks/step.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from allreduce.network import Network, explain_why_unavailable
from allreduce.scratch import create_scratch
from allreduce.worlds import RankWorld
from step import LAYOUTS, WORLDS, choose_world, describe_machine

RESULTS = Path(__file__).parent / "results" / "timeline.json"
SCRIPT = Path(__file__).with_name("timeline_rank.py")
PART = "2x1"
CONTENDERS = ("ddp", "fp16", "powersgd1", "dense", "dear", "hitopk", "onebit", "onebit_delayed")
STEPS = {"mpich": 45, "gloo": 16}
"""Steps of a run. TopKube needs more: `dense` measures in its first steps."""
SKIPPED = 3
"""The first steps, which a trace of TopKube leaves out."""


def record_step(contender: str, directory: Path, network: Network) -> dict[str, Any]:
    """Return a step of rank 0 of a contender."""
    name = choose_world(contender)
    steps = STEPS[name]
    folder = directory / contender
    environment = (
        *WORLDS[name].environment,
        ("TOPKUBE_TRACE_DIRECTORY", str(folder)),
        ("TOPKUBE_TRACE_STEPS", str(steps - SKIPPED)),
    )
    recipe = dataclasses.replace(WORLDS[name], environment=environment, script=SCRIPT)
    with RankWorld(recipe, LAYOUTS[PART], directory, network) as world:
        return {"contender": contender, **world.ask(contender=contender, steps=steps)[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", choices=("1gbit", "100mbit"), default="1gbit", help="the link (%(default)s)")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="only this contender; may be repeated")
    parser.add_argument("--json", type=Path, default=RESULTS, help="result file (%(default)s)")
    options = parser.parse_args()
    if reason := explain_why_unavailable():
        print(reason, file=sys.stderr)
        return 2
    with create_scratch() as directory, Network(len(LAYOUTS[PART])) as network:
        network.shape(options.rate)
        steps = [record_step(contender, directory, network) for contender in options.contender or CONTENDERS]
    for step in steps:
        print(f"{step['contender']}: {step['ms']:.0f} ms")
    stored = {"facts": describe_machine(), "part": PART, "rate": options.rate, "steps": steps}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(stored, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
