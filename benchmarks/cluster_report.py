"""The sections of docs/benchmarks.md about clusters: the operator, recovery, starts, and steps over slow links."""

from __future__ import annotations

from typing import Any

from tables import format_number, format_table


def build_operator_section(stored: dict[str, Any]) -> dict[str, str]:
    targets, many, idle = stored["targets"], stored.get("many"), stored.get("idle")
    rows = []
    for key in ("start_2", "start_64"):
        start = stored[key]
        words = f"one job of {start['workers']} workers: from sending it to its last pod"
        rows.append([words, f"{start['seconds']:.2f} s", f"{targets[key]:g} s"])
        if "floor_seconds" in start:
            rows.append(_format_floor_row(start["floor_seconds"], start["seconds"], "s", 2))
    if many:
        words = (
            f"{many['jobs']} jobs of {many['workers']} workers at once: all {many['jobs'] * (many['workers'] + 1)} pods"
        )
        rows.append([words, f"{many['pods_seconds']:.1f} s", ""])
        rows.append(
            [
                "the same, until every status is correct",
                f"{many['statuses_seconds']:.1f} s",
                f"{targets['many_created']:g} s",
            ]
        )
        rows.append(_format_floor_row(many["floor_seconds"], many["statuses_seconds"], "s", 1))
    if idle:
        words = f"{idle['jobs']:,} finished jobs with {idle['pods']:,} pods at rest"
        rows.append([f"{words}: share of a core", f"{idle['cpu_percent']:.2f}%", f"{targets['idle_cpu_percent']:g}%"])
        if "floor_cpu_percent" in idle:
            times = f"{idle['cpu_percent'] / idle['floor_cpu_percent']:.1f}×" if idle["floor_cpu_percent"] else "–"
            floor = f"a process that only keeps the same watches open; the operator: {times}"
            rows.append([floor, f"{idle['floor_cpu_percent']:.2f}%", ""])
        rows.append([f"{words}: memory", f"{idle['rss_mb']:.0f} MB", f"{targets['idle_rss_mb']:g} MB"])
    facts = " · ".join(f"{name}: {value}" for name, value in stored["machine"].items())
    loads = [stored[key]["load"] for key in ("start_2", "start_64", "many", "idle") if "load" in stored.get(key, {})]
    if loads:
        facts += f" · load average before each part: {', '.join(f'{load:.1f}' for load in loads)}"
    return {"OPERATOR": f"{format_table(['', 'measured', 'target'], rows)}\n\n{facts}"}


def _format_floor_row(floor: float, measured: float, unit: str, digits: int) -> list[str]:
    words = f"a plain client that creates the same objects; the operator: {measured / floor:.1f}×"
    return [words, f"{floor:.{digits}f} {unit}", ""]


def build_recovery_section(stored: dict[str, Any]) -> dict[str, str]:
    names = {
        "worker": "a worker's pod: all of its processes",
        "rank": "one rank",
        "launcher": "the launcher",
        "delete": "the job is deleted: until all its objects are gone",
    }
    rows = []
    for key, words in names.items():
        if key not in stored:
            continue
        rounds = stored[key]["rounds"]
        seconds = sorted(measured["seconds"] for measured in rounds)
        lost = [measured["steps_lost"] for measured in rounds if "steps_lost" in measured]
        rows.append(
            [
                words,
                f"{stored[key]['median_seconds']:.1f}",
                f"{seconds[0]:.1f}–{seconds[-1]:.1f}",
                f"{stored['target_seconds']:g}",
                f"{max(lost):.0f} of {stored['every_steps']}" if lost else "",
            ]
        )
    headings = [
        "killed with SIGKILL",
        "seconds",
        "min–max",
        "allowed",
        "most lost steps, at most a checkpoint's interval",
    ]
    facts = f"Kubernetes {stored['kubernetes']} · cores: {stored['machine']['cores']} · {stored['when']}"
    return {"RECOVERY": f"{format_table(headings, rows)}\n\n{facts}"}


def build_step_section(stored: dict[str, Any]) -> dict[str, str]:
    rows = [
        [
            f"`{name}`",
            format_number(1e3 * seconds),
            ", ".join(format_number(1e3 * seconds) for seconds in stored["rounds"][name]),
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
    return {"STEP": f"{about}\n\n{format_table(headings, rows)}\n\n{gain}\n\n{facts}"}


def build_launch_section(stored: dict[str, Any]) -> dict[str, str]:
    rows = []
    for run in stored["runs"]:
        start, floor, ratio = run["start_seconds"], run["floor_seconds"], run.get("times_the_floor")
        device = run["way"].partition("-")[2]
        rows.append(
            [
                f"{run['mpi']}{' over ' + device if device else ''}, {run['workers']} workers",
                f"{start:.1f}" if run["ok"] else "a rank did not start",
                f"{floor:.1f}" if floor is not None else "a rank did not start",
                f"{ratio:.1f}×" if ratio else "",
                f"{run['launcher_processor_seconds']:.1f}",
                f"{run['workers_processor_seconds']:.1f}",
                run["date"],
            ]
        )
    headings = ["", "start, s", "floor, s", "start / floor", "launcher's CPU, s", "all workers' CPU, s", "date"]
    facts = " · ".join(f"{name}: {value}" for name, value in stored["machine"].items())
    return {"LAUNCH": f"{format_table(headings, rows)}\n\n{facts}"}


def build_chaos_section(stored: dict[str, Any]) -> dict[str, str]:
    promises = {
        "not_ended": "jobs that did not end",
        "wrong_end": "jobs with a wrong end",
        "ran_after_the_end": "jobs that ran again after their end",
        "two_attempts": "jobs with two attempts at the same time",
        "steps_lost": f"attempts that lost more than {stored['every_steps']} steps",
        "counters": "jobs with wrong counters of attempts",
        "orphans": "objects left after all jobs were deleted",
    }
    hits = [[name, str(count)] for name, count in sorted(stored["hits"].items(), key=lambda entry: -entry[1])]
    kept = [[words, str(len(stored["findings"][name]))] for name, words in promises.items()]
    jobs = stored["jobs"]
    about = (
        f"{len(jobs)} jobs in {stored['seconds'] / 60:.0f} minutes, {sum(stored['hits'].values())} hits; "
        f"{sum(job['restarts'] for job in jobs)} restarts and {sum(job['disruptions'] for job in jobs)} disruptions; "
        f"at most {max(job['most_steps_lost'] for job in jobs)} steps lost by one attempt."
    )
    facts = f"Kubernetes {stored['kubernetes']} · cores: {stored['machine']['cores']} · seed {stored['seed']}"
    return {
        "CHAOS": f"{about}\n\n{format_table(['what was broken', 'times'], hits)}\n\n"
        f"{format_table(['broken promises', 'found'], kept)}\n\n{facts} · {stored['when']}"
    }


SECTIONS = {
    "operator-scale": build_operator_section,
    "cluster-recovery": build_recovery_section,
    "cluster-chaos": build_chaos_section,
    "cluster-step": build_step_section,
    "launch-scale": build_launch_section,
}
