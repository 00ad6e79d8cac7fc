"""Compare hitopk with dense on a real Kubernetes: char_gpt as a TrainingJob, 2 nodes x 2 ranks, shaped links.

    sudo make cluster && sudo .venv/bin/python benchmarks/cluster_step.py

The operator must be installed (kubectl apply -f manifests/), and the cluster must be that of `make cluster`. Two jobs
alternate several times and differ only in spec.aggregation. Each runs the unchanged topkube.examples.char_gpt; the end
of every step is recorded. Results are medians over the steps after the first steps. If an algorithm sends compressed
values, they have 16 bits (wire: bf16). dense is `algorithm: dense`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import uuid
from pathlib import Path

import kubernetes

from on_cluster import describe_measurement, find_running_cluster  # finds the modules of tests/cluster

from jobs import build_job  # isort: skip
from target import Namespace, wait_for  # isort: skip

RESULTS = Path(__file__).with_name("results") / "cluster-step.json"
WORKERS, SLOTS = 2, 2
# 4 blocks of width 256: 3.3 million parameters. Few characters per step, so that the exchange dominates, not the
# processors, which all ranks share.
MODEL = ["--layers", "4", "--width", "256", "--heads", "4", "--context", "32", "--batch-size", "2"]
TIMED_SCRIPT = """
import json, sys, time
import topkube, topkube.examples.char_gpt as example

ends = []
class Timed(topkube.DistributedOptimizer):
    def step(self, *arguments, **options):
        result = super().step(*arguments, **options)
        ends.append(time.perf_counter())
        return result

topkube.DistributedOptimizer = Timed
example.main(sys.argv[1:])
if topkube.rank() == 0:
    print("step-ends", json.dumps([round(end - ends[0], 6) for end in ends]), flush=True)
"""


def measure_step_seconds(namespace: Namespace, algorithm: str, steps: int, skip: int) -> tuple[list[float], int, str]:
    """Run a job to its end. Return the seconds of each step after the first `skip`, the number of parameters, and the
    last line that the job printed."""
    name = f"step-{algorithm}-{uuid.uuid4().hex[:4]}"
    command = ["python", "-c", TIMED_SCRIPT, "--steps", str(steps), *MODEL]
    aggregation = {"algorithm": algorithm, "density": 0.01, "wire": "bf16"}
    namespace.create(build_job(name, command, workers=WORKERS, slots=SLOTS, aggregation=aggregation))
    status = namespace.wait_phase(name, "Succeeded", seconds=300)
    assert status["restarts"] == 0, status
    logs = "".join(namespace.read_log(pod.metadata.name) for pod in namespace.list_pods("worker", name))
    ends = json.loads(re.search(r"step-ends (\[.*\])", logs)[1])
    last = re.search(r"([\d,]+) parameters after .*", logs)
    namespace.delete(name)
    wait_for(lambda: not namespace.list_pods(job=name), "the job's pods to be gone", 60)
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return seconds[skip:], int(last[1].replace(",", "")), last[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="rate of every node's link in both directions (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each job (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often both are run (%(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file for the result (%(default)s)")
    args = parser.parse_args()
    target, cluster = find_running_cluster()
    namespace_name = f"bench-{uuid.uuid4().hex[:6]}"
    target.core.create_namespace(
        kubernetes.client.V1Namespace(metadata=kubernetes.client.V1ObjectMeta(name=namespace_name))
    )
    namespace = Namespace(target, namespace_name)
    rounds_of: dict[str, list[list[float]]] = {"dense": [], "hitopk": []}
    parameters, last_lines = 0, {}
    cluster.shape(args.rate)
    try:
        for _ in range(args.rounds):
            for algorithm, rounds in rounds_of.items():
                seconds, parameters, last_lines[algorithm] = measure_step_seconds(
                    namespace, algorithm, args.steps, skip=5
                )
                rounds.append(seconds)
                print(
                    f"{algorithm}: {statistics.median(seconds) * 1e3:.0f} ms per step; {last_lines[algorithm]}",
                    flush=True,
                )
    finally:
        cluster.shape("off")
        target.core.delete_namespace(namespace_name)
    medians = {name: statistics.median(list(itertools.chain(*rounds))) for name, rounds in rounds_of.items()}
    result = {
        "what": "char_gpt as a TrainingJob on a real Kubernetes, seconds per step",
        **describe_measurement(target),
        "nodes": WORKERS,
        "ranks_per_node": SLOTS,
        "rate": args.rate,
        "parameters": parameters,
        "arguments": MODEL,
        "steps": args.steps,
        "median_seconds": medians,
        "rounds": {name: [statistics.median(seconds) for seconds in rounds] for name, rounds in rounds_of.items()},
        "dense_over_hitopk": medians["dense"] / medians["hitopk"],
        "last_words": last_lines,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"hitopk is {result['dense_over_hitopk']:.1f} times as fast per step as dense at {args.rate}")


if __name__ == "__main__":
    main()
