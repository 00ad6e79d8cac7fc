"""The sections of docs/benchmarks.md about the cluster: the operator, recovery, starts, steps over slow links."""

from __future__ import annotations

from typing import Any

from tables import number, table


def operator_section(stored: dict[str, Any]) -> dict[str, str]:
    targets, many, idle = stored["targets"], stored.get("many"), stored.get("idle")
    rows = []
    for key in ("start_2", "start_64"):
        start = stored[key]
        words = f"one job of {start['workers']} workers: from sending it to its last pod"
        rows.append([words, f"{start['seconds']:.2f} s", f"{targets[key]:g} s"])
    if many:
        words = (
            f"{many['jobs']} jobs of {many['workers']} workers at once: all {many['jobs'] * (many['workers'] + 1)} pods"
        )
        rows.append([words, f"{many['pods_seconds']:.1f} s", ""])
        rows.append(
            ["the same, and every status right", f"{many['statuses_seconds']:.1f} s", f"{targets['many_created']:g} s"]
        )
        times = f"{many['statuses_seconds'] / many['floor_seconds']:.1f}×"
        words = f"a client that makes the same objects and decides nothing; the operator: {times}"
        rows.append([words, f"{many['floor_seconds']:.1f} s", ""])
    if idle:
        words = f"{idle['jobs']:,} finished jobs with {idle['pods']:,} pods at rest"
        rows.append([f"{words}: share of a core", f"{idle['cpu_percent']:.2f}%", f"{targets['idle_cpu_percent']:g}%"])
        rows.append([f"{words}: memory", f"{idle['rss_mb']:.0f} MB", f"{targets['idle_rss_mb']:g} MB"])
    facts = " · ".join(f"{name}: {value}" for name, value in stored["machine"].items())
    return {"OPERATOR": f"{table(['', 'measured', 'target'], rows)}\n\n{facts}"}


def recovery_section(stored: dict[str, Any]) -> dict[str, str]:
    names = {
        "worker": "a worker's pod: all of its processes",
        "rank": "one rank",
        "launcher": "the launcher",
        "delete": "the job is deleted: until nothing of it is left",
    }
    rows = []
    for key, words in names.items():
        if key not in stored:
            continue
        rounds = stored[key]["rounds"]
        seconds = sorted(one["seconds"] for one in rounds)
        lost = [one["steps_lost"] for one in rounds if "steps_lost" in one]
        rows.append(
            [
                words,
                f"{stored[key]['median_seconds']:.1f}",
                f"{seconds[0]:.1f}–{seconds[-1]:.1f}",
                f"{stored['target_seconds']:g}",
                f"{max(lost):.0f} of {stored['every_steps']}" if lost else "",
            ]
        )
    headings = ["killed with SIGKILL", "seconds", "min–max", "allowed", "most steps lost, of a checkpoint's interval"]
    facts = f"Kubernetes {stored['kubernetes']} · cores: {stored['machine']['cores']} · {stored['when']}"
    return {"RECOVERY": f"{table(headings, rows)}\n\n{facts}"}


def step_section(stored: dict[str, Any]) -> dict[str, str]:
    rows = [
        [
            f"`{name}`",
            number(1e3 * seconds),
            ", ".join(number(1e3 * one) for one in stored["rounds"][name]),
        ]
        for name, seconds in stored["median_seconds"].items()
    ]
    about = (
        f"char_gpt, {stored['parameters']:,} parameters, {stored['nodes']} nodes × {stored['ranks_per_node']} ranks, "
        f"every node's link shaped to {stored['rate'].replace('mbit', ' Mbit/s')} in both directions; "
        f"{stored['steps']} steps a job, the jobs taking turns."
    )
    gain = f"**{stored['dense_over_hitopk']:.1f}× as fast per step** with `hitopk` at 1% as with `dense`."
    facts = f"Kubernetes {stored['kubernetes']} · cores: {stored['machine']['cores']} · {stored['when']}"
    headings = ["spec.aggregation.algorithm", "ms per step", "of each job"]
    return {"STEP": f"{about}\n\n{table(headings, rows)}\n\n{gain}\n\n{facts}"}


def launch_section(stored: dict[str, Any]) -> dict[str, str]:
    rows = []
    for run in stored["runs"]:
        start, floor, ratio = run["start_seconds"], run["floor_seconds"], run.get("times_the_floor")
        device = run["way"].partition("-")[2]
        rows.append(
            [
                f"{run['mpi']}{' over ' + device if device else ''}, {run['workers']} workers",
                f"{start:.1f}" if run["ok"] else "not all ranks left it",
                f"{floor:.1f}" if floor is not None else "not all ranks left it",
                f"{ratio:.1f}×" if ratio else "",
                f"{run['launcher_processor_seconds']:.1f}",
                f"{run['workers_processor_seconds']:.1f}",
                run["date"],
            ]
        )
    headings = ["", "start, s", "floor, s", "start / floor", "launcher's CPU, s", "all workers' CPU, s", "date"]
    facts = " · ".join(f"{name}: {value}" for name, value in stored["machine"].items())
    return {"LAUNCH": f"{table(headings, rows)}\n\n{facts}"}


SECTIONS = {
    "operator-scale": operator_section,
    "cluster-recovery": recovery_section,
    "cluster-step": step_section,
    "launch-scale": launch_section,
}
