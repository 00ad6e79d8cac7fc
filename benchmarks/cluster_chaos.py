"""Kill operators, launchers, workers, ranks, kubelets and the API server at random while jobs run; then count damage.

    sudo make cluster NODES=3 && sudo .venv/bin/python benchmarks/cluster_chaos.py [--minutes 10] [--seed 1]

Twenty small jobs of two workers each run on the real Kubernetes of `make cluster`, a few at a time. Their ranks meet in
an all-reduce at every step, and rank 0 saves the number of the step every 20 steps. Three of the jobs fail by design.
Every few seconds the script breaks one thing, which a random generator with a recorded seed chooses. Afterwards the
script checks each guarantee of the operator against the records of the run: see `Findings`. The result is one JSON
file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kubernetes
from kubernetes.client.exceptions import ApiException

from on_cluster import describe_measurement, find_running_cluster  # finds the modules of tests/cluster

from conftest import _has_account, _install_operator  # isort: skip
from jobs import build_job  # isort: skip
from target import GROUP, OPERATOR_NAMESPACE, PLURAL, VERSION, Namespace, Target, create_shared_claim, wait_for  # isort: skip

from topkube.launch.rank import find_commands

RESULTS = Path(__file__).with_name("results") / "cluster-chaos.json"
JOBS, AT_ONCE, STEPS, EVERY_STEPS, PAUSE = 20, 5, 500, 20, 0.05
"""The number of jobs, how many run at the same time, the steps of a job, the steps between two saves, and the seconds
between two steps."""
FAILING = 3
"""The number of jobs that end with exit code 7 in the middle of their steps."""
SCRIPT = """
import os, pathlib, sys, time, numpy as np, topkube
name, fails, count, every, pause = sys.argv[1], sys.argv[2] == "fails", *map(int, sys.argv[3:5]), float(sys.argv[5])
topkube.init()
attempt, folder = os.environ["TOPKUBE_ATTEMPT"], pathlib.Path("/out")
saved, log = folder / f"{name}.saved", folder / f"{name}.log"
start = np.array([int(saved.read_text()) if saved.exists() and topkube.rank() == 0 else 0], np.float32)
topkube.allreduce_(start, algorithm="flat", op="sum")
def note(text):
    if topkube.rank() == 0:
        with log.open("a") as file:
            file.write(f"{time.time()} {attempt} {text}\\n")
note(f"start {int(start[0])}")
for step in range(int(start[0]), count):
    topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
    note(f"step {step + 1}")
    if fails and step + 1 >= count // 2 and topkube.rank() == 1:
        sys.exit(7)
    if (step + 1) % every == 0 and topkube.rank() == 0:
        aside = saved.with_suffix(f".{attempt}")
        aside.write_text(str(step + 1))
        os.replace(aside, saved)
    time.sleep(pause)
note("done")
"""


@dataclass
class Findings:
    """The findings of the run. Every list must be empty."""

    not_ended: list[str] = field(default_factory=list)
    """Jobs that had not ended when the time was up."""
    wrong_end: list[str] = field(default_factory=list)
    """Jobs that could finish and did not, or that had to fail and did not."""
    ran_after_the_end: list[str] = field(default_factory=list)
    """Jobs that began another attempt after their phase was Succeeded or Failed, or whose phase then changed."""
    two_attempts: list[str] = field(default_factory=list)
    """Jobs of which steps of an older attempt were written after the first step of a newer one."""
    steps_lost: list[str] = field(default_factory=list)
    """Attempts that began more than EVERY_STEPS steps before the last step of the attempt before them."""
    counters: list[str] = field(default_factory=list)
    """Jobs whose attempt is not 1 + restarts + disruptions, or whose counters went back."""
    orphans: list[str] = field(default_factory=list)
    """Objects that are left after all jobs were deleted."""

    def count(self) -> int:
        return sum(len(entries) for entries in asdict(self).values())


class Watcher:
    """Follow the status of all jobs of a namespace, and note what must never happen."""

    def __init__(self, namespace: Namespace, findings: Findings) -> None:
        self.namespace, self.findings = namespace, findings
        self.ended: dict[str, tuple[str, float]] = {}
        self.statuses: dict[str, dict[str, Any]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        custom = self.namespace.target.custom
        while not self._stop.wait(0.3):
            with suppress(Exception):  # the script also kills the API server
                listed = custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace.name, PLURAL)
                for item in listed["items"]:
                    self._check_status(item["metadata"]["name"], item.get("status") or {})

    def _check_status(self, name: str, status: dict[str, Any]) -> None:
        before = self.statuses.get(name, {})
        for counter in ("attempt", "restarts", "disruptions"):
            if status.get(counter, 0) < before.get(counter, 0):
                self.findings.counters.append(f"{name}: {counter} went from {before[counter]} to {status.get(counter)}")
        self.statuses[name] = status
        phase = str(status.get("phase"))
        if name in self.ended and self.ended[name][0] != phase:
            self.findings.ran_after_the_end.append(f"{name}: {self.ended[name][0]} became {phase}")
        elif phase in ("Succeeded", "Failed") and name not in self.ended:
            self.ended[name] = phase, time.time()


class Chaos:
    """Break one thing after another. Every method breaks something, or returns False if there is nothing to break."""

    def __init__(self, target: Target, cluster: Any, namespace: Namespace, seed: int) -> None:
        self.target, self.cluster, self.namespace = target, cluster, namespace
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.history: list[dict[str, Any]] = []
        self._actions: dict[str, tuple[int, Callable[[], bool]]] = {
            "kill a worker": (5, lambda: self._kill_container("worker")),
            "kill a launcher": (4, lambda: self._kill_container("launcher")),
            "kill a rank": (4, self._kill_rank),
            "delete a pod": (4, self._delete_pod),
            "kill an operator": (4, self._kill_operator),
            "freeze an operator": (2, self._freeze_operator),
            "restart a kubelet": (2, self._restart_kubelet),
            "kill the API server": (1, self._kill_api_server),
        }

    def break_one_thing(self) -> None:
        weights = [weight for weight, _ in self._actions.values()]
        [name] = self.random.choices(list(self._actions), weights)
        try:
            is_done = self._actions[name][1]()
        except (ApiException, LookupError, StopIteration, OSError, RuntimeError, TimeoutError, TypeError):
            is_done = False  # the pod or process had ended before
        if is_done:
            self.done[name] += 1
            self.history.append({"at": time.time(), "what": name})

    def _choose_running_pod(self, role: str) -> Any:
        pods = [pod for pod in self.namespace.list_pods(role) if pod.status.phase == "Running"]
        return self.random.choice(pods) if pods else None

    def _kill_container(self, role: str) -> bool:
        pod = self._choose_running_pod(role)
        if pod is None:
            return False
        self.target.kill_container(pod, role)
        return True

    def _kill_rank(self) -> bool:
        pod = self._choose_running_pod("worker")
        ranks = find_commands(self.target.find_container(pod, "worker").list_processes()) if pod is not None else []
        if not ranks:
            return False
        os.kill(self.random.choice(ranks), signal.SIGKILL)
        return True

    def _delete_pod(self) -> bool:
        pod = self._choose_running_pod(self.random.choice(("worker", "launcher")))
        if pod is None:
            return False
        self.target.core.delete_namespaced_pod(pod.metadata.name, self.namespace.name)
        return True

    def _choose_operator(self) -> Any:
        return self.random.choice([pod for pod in self.target.list_operator_pods() if pod.status.phase == "Running"])

    def _kill_operator(self) -> bool:
        self.target.kill_container(self._choose_operator(), "operator")
        return True

    def _freeze_operator(self) -> bool:
        """Stop an operator for longer than its Lease lasts: another one takes over, and this one wakes up late."""
        group = self.target.find_container(self._choose_operator(), "operator")
        group.freeze()
        thaw = threading.Timer(self.random.uniform(5, 25), lambda: suppress_errors(group.thaw))
        thaw.daemon = True
        thaw.start()
        return True

    def _restart_kubelet(self) -> bool:
        self.random.choice(list(self.cluster.nodes.values())).kubelet.restart()
        return True

    def _kill_api_server(self) -> bool:
        self.cluster.restart_api_server()
        return True


def suppress_errors(act: Callable[[], object]) -> None:
    with suppress(Exception):
        act()


def call_with_retries(act: Callable[[], Any], seconds: float = 60) -> Any:
    """Return the result of an API call, tried again while the API server is down."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def build_chaos_job(name: str, fails: bool) -> dict[str, Any]:
    words = ["python", "-c", SCRIPT, name, "fails" if fails else "ends", str(STEPS), str(EVERY_STEPS), str(PAUSE)]
    job = build_job(name, words, workers=2, slots=1, runPolicy={"backoffLimit": 0 if fails else 100})
    pod = job["spec"]["template"]["spec"]
    pod["volumes"] = [{"name": "out", "persistentVolumeClaim": {"claimName": "out"}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "out", "mountPath": "/out"}]
    return job


def check_log(name: str, text: str, ended: tuple[str, float] | None, findings: Findings) -> dict[str, int]:
    """Check what rank 0 of all attempts wrote."""
    entries = [line.split() for line in text.splitlines()]
    last: dict[int, int] = {}
    newest = lost = 0
    for at, attempt_text, what, *number in entries:
        attempt = int(attempt_text)
        if attempt < newest:
            findings.two_attempts.append(f"{name}: attempt {attempt} wrote {what} {number} beside attempt {newest}")
        newest = max(newest, attempt)
        if what == "start":
            before = max((step for older, step in last.items() if older < attempt), default=0)
            lost = max(lost, before - int(number[0]))
            if before - int(number[0]) > EVERY_STEPS:
                findings.steps_lost.append(f"{name}: attempt {attempt} began at {number[0]}, after step {before}")
            if ended is not None and float(at) > ended[1]:
                findings.ran_after_the_end.append(f"{name}: attempt {attempt} began after {ended[0]}")
        if what == "step":
            last[attempt] = int(number[0])
    return {"attempts": newest, "most_steps_lost": lost}


def run(minutes: float, seed: int, every: float) -> dict[str, Any]:
    target, cluster = find_running_cluster()
    _install_operator(target)
    namespace = Namespace(target, f"chaos-{uuid.uuid4().hex[:6]}")
    metadata = kubernetes.client.V1ObjectMeta(name=namespace.name)
    target.core.create_namespace(kubernetes.client.V1Namespace(metadata=metadata))
    folder = cluster.layout.state / "volumes" / namespace.name
    create_shared_claim(namespace, folder, "out")
    wait_for(lambda: _has_account(target, namespace.name), "the service account", 30)
    findings = Findings()
    watcher, chaos = Watcher(namespace, findings), Chaos(target, cluster, namespace, seed)
    names = [f"job-{number:02d}" for number in range(JOBS)]
    failing = set(chaos.random.sample(names, FAILING))
    began, deadline, submitted = time.monotonic(), time.monotonic() + minutes * 60, 0
    while time.monotonic() < deadline and len(watcher.ended) < JOBS:
        while submitted < JOBS and submitted - len(watcher.ended) < AT_ONCE:
            job = build_chaos_job(names[submitted], names[submitted] in failing)
            with suppress(ApiException):  # created, but the answer was lost
                call_with_retries(lambda job=job: namespace.create(job))
            submitted += 1
        time.sleep(chaos.random.uniform(0.5, 1.5) * every)
        chaos.break_one_thing()
        print(
            f"{time.monotonic() - began:4.0f} s: {len(watcher.ended)} ended, {sum(chaos.done.values())} hits",
            flush=True,
        )
    quiet = time.monotonic() + 180  # no more hits: whatever runs must come to its end
    while len(watcher.ended) < submitted and time.monotonic() < quiet:
        time.sleep(1)
    took = time.monotonic() - began
    rows = check_ends(namespace, folder, watcher, names[:submitted], failing, findings)
    watcher.close()
    for name in names[:submitted]:
        with suppress(ApiException):
            call_with_retries(lambda name=name: namespace.delete(name))
    try:
        wait_for(lambda: not call_with_retries(namespace.list_children), "everything to be gone", 180, interval=1)
    except AssertionError:
        findings.orphans = sorted(namespace.list_children())
    if findings.count() == 0:
        call_with_retries(lambda: target.core.delete_namespace(namespace.name))
        call_with_retries(lambda: target.core.delete_persistent_volume(namespace.name))
    else:
        print(f"namespace {namespace.name} is kept for inspection", file=sys.stderr)
    return {
        "what": f"{submitted} jobs of 2 workers while things are broken at random",
        **describe_measurement(target),
        "command": f"python benchmarks/cluster_chaos.py --minutes {minutes:g} --seed {seed}",
        "seed": seed,
        "seconds": took,
        "hits": dict(chaos.done),
        "every_steps": EVERY_STEPS,
        "jobs": rows,
        "findings": asdict(findings),
        "history": chaos.history,
    }


def check_ends(
    namespace: Namespace, folder: Path, watcher: Watcher, names: list[str], failing: set[str], findings: Findings
) -> list[dict[str, Any]]:
    """Compare the end of every job with what it had to be."""
    rows = []
    for name in names:
        status, ended = call_with_retries(lambda name=name: namespace.read_status(name)), watcher.ended.get(name)
        phase = ended[0] if ended else ""
        if not ended:
            findings.not_ended.append(f"{name}: {status.get('phase')}, attempt {status.get('attempt')}")
        elif name not in failing and phase != "Succeeded":
            findings.wrong_end.append(f"{name}: {phase}: {json.dumps(status.get('firstFailure'))}")
        elif name in failing and phase != "Failed":
            findings.wrong_end.append(f"{name}: {phase}, but its rank 1 always ends with 7")
        counted = 1 + status.get("restarts", 0) + status.get("disruptions", 0)
        if status.get("attempt") != counted:
            findings.counters.append(f"{name}: attempt {status.get('attempt')}, counters say {counted}")
        log = folder / f"{name}.log"
        row = check_log(name, log.read_text() if log.exists() else "", ended, findings)
        rows.append(
            {
                "name": name,
                "phase": phase,
                "restarts": status.get("restarts", 0),
                "disruptions": status.get("disruptions", 0),
                **row,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="minutes of breaking things (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random generator (%(default)s)")
    parser.add_argument("--every", type=float, default=10, help="seconds between two hits, on average (%(default)g)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file for the result (%(default)s)")
    args = parser.parse_args()
    result = run(args.minutes, args.seed, args.every)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"hits": result["hits"], "findings": result["findings"]}, indent=1))
    if any(result["findings"].values()):
        sys.exit(
            f"{sum(map(len, result['findings'].values()))} findings: {OPERATOR_NAMESPACE} did not keep its promises"
        )


if __name__ == "__main__":
    main()
