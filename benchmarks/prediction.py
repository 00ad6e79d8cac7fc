"""Compare the steps that `topkube plan` predicts from a trace with measured steps.

    python benchmarks/prediction.py [--part 2x1|2x2|4x1 ...] [--rate unshaped|10gbit|1gbit|200mbit|100mbit ...]
    python benchmarks/prediction.py --again        # predict again from the stored profiles; measure nothing
    python benchmarks/prediction.py --links        # only measure what the links cost, and predict again

Nodes are network namespaces, as in benchmarks/step.py; this needs root. One trace per algorithm is recorded over links
that are not shaped. From these traces alone, and from the bandwidth that a plain TCP stream reaches on a link, the
steps over this link are predicted. Shaping costs processor time, which a network card does not take from ranks: it is
measured alone, and the prediction contains it. Then the same training is measured over the link, in turns. Traces are
recorded anew before the turns of each link: the speed of a machine that others share changes within minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from allreduce import probes
from allreduce.link_cost import measure_link_cost
from allreduce.network import Network, explain_why_unavailable
from allreduce.scratch import create_scratch
from allreduce.worlds import RankWorld, Recipe
from step import LAYOUTS, MODELS, UNSHAPED, WARM_STEPS, WORLDS, StepBench, describe_machine

RESULTS = Path(__file__).parent / "results" / "prediction.json"
RATES = (UNSHAPED, "10gbit", "1gbit", "200mbit", "100mbit")
TRACED = ("dense", "hitopk", "onebit", "int4", "int3", "acpsgd")
VARIANTS = {"dear": "dense", "onebit_delayed": "onebit"}
"""Contenders that are predicted from the trace of another contender."""
CONTENDERS = (*TRACED, *VARIANTS)
TRACED_STEPS = 8
MEMORY = 20e9
"""Bytes per second, the default of `topkube plan`. Measured costs of the host replace most of it."""
_PROBE_BYTES = 4_000_000
PAPER = {"resnet50": (64, 96, 128, 256), "resnet50-96": (128, 256), "bert-large": (64, 128)}
"""Models and samples per GPU for the cluster of the HiTopK paper: 16 nodes with 8 V100 each, 25 Gbit/s."""
PAPER_FLOPS, PAPER_LINK, PAPER_MEMORY = 30e12, 0.95 * 25e9 / 8, 300e9
"""Assumptions: what a V100 sustains in mixed precision, what a link of 25 Gbit/s carries, what NVLink carries."""
Row = dict[str, Any]


def record_trace(part: str, contender: str, directory: Path, network: Network) -> dict[str, Any]:
    """Return the trace of some steps of `contender`. Links must not be shaped."""
    folder = Path(tempfile.mkdtemp(prefix="trace-", dir=directory))
    trace_settings = (("TOPKUBE_TRACE_DIRECTORY", str(folder)), ("TOPKUBE_TRACE_STEPS", str(TRACED_STEPS)))
    recipe: Recipe = dataclasses.replace(
        WORLDS["mpich"], name=f"trace-{contender}", environment=WORLDS["mpich"].environment + trace_settings
    )
    with RankWorld(recipe, LAYOUTS[part], directory, network) as world:
        world.ask(do="steps", contender=contender, warm=WARM_STEPS, steps=TRACED_STEPS + 1)
    from topkube.telemetry import trace_files

    return trace_files.read_trace(folder)


def probe_link(network: Network) -> dict[str, float]:
    """Return the bytes per second that a TCP stream reaches, the seconds of a short message, and the processor seconds
    that a byte on the shaped link takes from all cores. Traces come from links that are not shaped, so the last is not
    in them: a real network card does this work itself."""
    answer = probes.time_link(network, [_PROBE_BYTES])
    bandwidth = _PROBE_BYTES / answer["seconds"][0]
    return {
        "bandwidth": bandwidth,
        "latency": answer["latency"] / 2,
        "link_cost": measure_link_cost(network, bandwidth),
    }


def build_profile(traces: list[dict[str, Any]], part: str) -> Any:
    """Return the profile of a layout: the computation from the first trace, the costs of the host from all."""
    from topkube.planning.traced_profile import add_host_costs, read_traced_profile

    profiles = [read_traced_profile(trace, f"trace of {part}") for trace in traces]
    return add_host_costs(profiles[0], profiles[1:])


def predict_milliseconds(profile: Any, row: Row, cores: int) -> float:
    """Return the predicted milliseconds of a step of a row."""
    from topkube.algorithms import DENSITY, Machines, resolve
    from topkube.planning.situation import Situation
    from topkube.planning.step import predict_step

    nodes, slots = map(int, row["part"].split("x"))
    machines = Machines(nodes, slots, row["bandwidth"], MEMORY, profile.latency or row["latency"])
    contender = row["contender"]
    algorithm = resolve(VARIANTS.get(contender, contender), nodes, sys.maxsize, DENSITY.default)
    situation = Situation(
        machines,
        cores=cores / nodes,
        is_decoupled=contender == "dear",
        delay=int(contender == "onebit_delayed"),
        network_cores=row["link_cost"] * row["bandwidth"],
    )
    return 1e3 * predict_step(profile, situation, algorithm).step


def compute_error(row: Row) -> float:
    """Return the relative error of a prediction: negative if the prediction is too fast."""
    return float(row["predicted_ms"] / row["ms"] - 1)


def predict_rows(stored: dict[str, Any]) -> None:
    """Replace the predictions of all rows by those of this version, from the stored profiles."""
    for row in stored["rows"]:
        profile = load_profile(stored["profiles"][row["part"]][row["rate"]])
        row["predicted_ms"] = round(predict_milliseconds(profile, row, stored["facts"]["processors"]), 1)
        row["error"] = round(compute_error(row), 3)


def predict_paper() -> list[Row]:
    """Return the predicted steps on the cluster of the HiTopK paper, dense and with 1% of the entries."""
    from topkube.algorithms import Machines, find_algorithm
    from topkube.planning.models import find_model
    from topkube.planning.situation import Situation
    from topkube.planning.step import predict_step

    situation = Situation(Machines(16, 8, PAPER_LINK, PAPER_MEMORY))
    rows = []
    for name, batches in PAPER.items():
        model = find_model(name)
        for batch in batches:
            profile = model.build_profile(model.flops * batch / PAPER_FLOPS)
            steps = {
                algorithm: predict_step(profile, situation, find_algorithm(algorithm))
                for algorithm in ("torus2d", "hitopk")
            }
            row: Row = {"model": model.name, "batch": batch, "compute_ms": round(1e3 * profile.compute, 1)}
            for algorithm, prediction in steps.items():
                row[f"{algorithm}_ms"] = round(1e3 * prediction.step, 1)
                row[f"{algorithm}_efficiency"] = round(prediction.efficiency, 3)
            rows.append({**row, "faster": round(steps["torus2d"].step / steps["hitopk"].step - 1, 3)})
    return rows


def probe_links_again(stored: dict[str, Any]) -> None:
    """Measure the processor time of the links of all rows anew."""
    for part, profiles in stored["profiles"].items():
        with Network(len(LAYOUTS[part])) as network:
            for rate in profiles:
                network.shape(None if rate == UNSHAPED else rate)
                cost = probe_link(network)["link_cost"]
                for row in stored["rows"]:
                    if (row["part"], row["rate"]) == (part, rate):
                        row["link_cost"] = cost


def load_profile(stored: dict[str, Any]) -> Any:
    """Return the profile that `dataclasses.asdict` has stored."""
    from topkube.planning.profile import Gradient, HostCost, StepProfile

    values = {
        **stored,
        "gradients": tuple(Gradient(**gradient) for gradient in stored["gradients"]),
        "host": {name: HostCost(**cost) for name, cost in stored["host"].items()},
    }
    return StepProfile(**values)


def measure(part: str, rates: list[str], rounds: int, steps: int) -> Iterator[tuple[str, dict[str, Any], list[Row]]]:
    """Yield for every link: its name, the profile of the traces, and a measured row for every contender."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(create_scratch())
        network = stack.enter_context(Network(len(LAYOUTS[part])))
        bench = StepBench(part, MODELS[0], directory, network)
        stack.callback(bench.close)
        for rate in rates:
            network.shape(None)
            traces = [record_trace(part, contender, directory, network) for contender in TRACED]
            measured = bench.measure(rate, list(CONTENDERS), rounds, steps)
            link = probe_link(network)
            rows = [
                {**{key: row[key] for key in ("part", "rate", "contender", "ms", "ms_min", "ms_max", "steps")}, **link}
                for row in measured
            ]
            yield rate, dataclasses.asdict(build_profile(traces, part)), rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=LAYOUTS, action="append", help="only this layout; may be repeated")
    parser.add_argument("--rate", choices=RATES, action="append", help="only this link; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every contender (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per turn (%(default)s)")
    parser.add_argument("--again", action="store_true", help="only predict again, from the stored profiles")
    parser.add_argument("--links", action="store_true", help="only measure what the links cost, and predict again")
    parser.add_argument("--json", type=Path, default=RESULTS, help="result file (default %(default)s)")
    options = parser.parse_args()
    target: Path = options.json
    stored = json.loads(target.read_text()) if target.exists() else {"facts": {}, "profiles": {}, "rows": []}
    if not options.again:
        if reason := explain_why_unavailable():
            print(reason, file=sys.stderr)
            return 2
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.links:
        probe_links_again(stored)
    elif not options.again:
        for part in options.part or list(LAYOUTS):
            for rate, profile, rows in measure(part, options.rate or list(RATES), options.rounds, options.steps):
                kept = [row for row in stored["rows"] if (row["part"], row["rate"]) != (part, rate)]
                stored["facts"] = {**describe_machine(), "rounds": options.rounds, "steps": options.steps}
                stored["profiles"].setdefault(part, {})[rate] = profile
                stored["rows"] = kept + rows
                target.write_text(json.dumps(stored, indent=1) + "\n")
    predict_rows(stored)
    stored["paper"] = predict_paper()
    target.write_text(json.dumps(stored, indent=1) + "\n")
    for row in stored["rows"]:
        print(json.dumps(row))
    print(f"median error {median(abs(row['error']) for row in stored['rows']):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
