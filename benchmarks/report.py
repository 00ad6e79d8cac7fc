"""Write docs/benchmarks.md and its plots from the JSON files in benchmarks/results.

    python benchmarks/report.py            writes the page and the plots
    python benchmarks/report.py --check    lists stale files and writes nothing

A section without a result is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import allreduce_report
import cluster_report
import gpu_report
import prediction_report
import ranks_report
import simulated_report
import step_report
import target_loss_report
import timeline_report
from datacache import section as cache
from tables import format_number, format_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"


def load_result(name: str, results: Path = RESULTS) -> dict[str, Any] | None:
    """Return the stored result of a benchmark; None if there is none."""
    path = results / f"{name}.json"
    if not path.exists():
        return None
    stored: dict[str, Any] = json.loads(path.read_text())
    return stored


def format_report(report: dict[str, Any]) -> str:
    """Return a `topkube.bench` report with all of its columns."""
    used = {key for row in report["rows"] for key, value in row.items() if value is not None}
    columns = {key: heading for key, heading in report["columns"].items() if key in used}
    body = [[format_number(row.get(key)) for key in columns] for row in report["rows"]]
    facts = " · ".join(f"{name}: {format_number(value)}" for name, value in report.get("facts", {}).items())
    return format_table(list(columns.values()), body) + (f"\n\n{facts}" if facts else "")


def build_select_section(stored: dict[str, Any]) -> dict[str, str]:
    parts = [stored, stored["mstopk"], stored["adversarial"], stored["codecs"]]
    return {"SELECT": "\n\n".join(f"**{part['title']}**\n\n{format_report(part)}" for part in parts)}


def build_convergence_section(stored: dict[str, Any]) -> dict[str, str]:
    cells = []
    for row in stored["compared"]:
        low, high = row["interval_percent"]
        within = "yes" if row["within_1_percent"] else "better" if high < 0 else "no"
        cells.append(
            [
                f"{row['model']}, {row['optimizer']}, {row['condition']}",
                format_number(row["seeds"]),
                f"{row['dense_loss']:.4f}",
                f"{row['loss']:.4f}",
                f"{row['difference_percent']:+.2f}%",
                f"{low:+.2f} to {high:+.2f}%",
                within,
            ]
        )
    headings = ["model, optimizer, exchange", "seeds", "dense loss", "loss", "difference", "95% interval", "within 1%"]
    steps = sorted({run["steps"] for run in stored["runs"]})
    about = {**stored["about"], "steps": ", ".join(map(str, steps))}
    listed = "; ".join(
        f"{name.replace('_', ' ')}: "
        + (", ".join(f"{key} {entry}" for key, entry in value.items()) if isinstance(value, dict) else str(value))
        for name, value in about.items()
    )
    return {"CONVERGENCE": f"{format_table(headings, cells)}\n\n{listed}."}


def build_overhead_section(stored: dict[str, Any]) -> dict[str, str]:
    time, memory = stored["time"], stored["memory"]
    steps = [
        [
            name,
            f"{1e3 * seconds:.1f}",
            f"{time['overhead_percent'][name]:+.1f}%" if name in time["overhead_percent"] else "",
            f"{time['limit_percent'][name]:.0f}%" if name in time["limit_percent"] else "",
        ]
        for name, seconds in time["median_seconds"].items()
    ]
    above = [
        [name, f"{peak_bytes / 1e6:.1f}", f"{memory['two_shards_and_two_buckets_bytes'] / 1e6:.1f}"]
        for name, peak_bytes in memory["above_plain_bytes"].items()
    ]
    return {
        "OVERHEAD": "\n\n".join(
            [
                f"One rank, char_gpt with {time['parameters']:,} parameters, batch {time['batch']}, "
                f"context {time['context']}, {time['torch_threads']} torch thread; "
                f"medians of {time['steps']} interleaved steps.",
                format_table(["loop", "ms per step", "above plain torch", "allowed"], steps),
                f"Peak memory above plain torch, {memory['parameters']:,} parameters, one rank:",
                format_table(["loop", "MB above plain torch", "two shards and two buckets, MB"], above),
            ]
        )
    }


def build_cache_section(stored: dict[str, Any]) -> dict[str, str]:
    return cache.fill_section(stored)


def build_metrics_section(stored: dict[str, Any]) -> dict[str, str]:
    worker, operator, limits = stored["worker"], stored["operator"], stored["limits"]
    step = f"{1e3 * stored['step_seconds']:.0f} ms"
    bookkeeping = f"bookkeeping of a step, {1e6 * stored['step_bookkeeping_seconds']:.0f} µs: share of {step}"
    rows = [
        [bookkeeping, f"{stored['share_of_a_step']:.2%}", ""],
        ["sampled norms: at most, by a constant of the code", f"{stored['norms_at_most_share_of_time']:.2%}", ""],
        [f"sum of both: share of a step of {step}", f"{stored['together_at_most']:.2%}", f"{limits['share']:.1%}"],
        [
            f"a scrape of a worker with {worker['ranks']} ranks",
            f"{1e3 * worker['scrape_seconds']:.0f} ms",
            f"{1e3 * limits['worker_scrape_seconds']:.0f} ms",
        ],
        ["series of this worker", str(worker["series"]), str(limits["worker_series"])],
        [
            f"a scrape of the operator with {operator['jobs']:,} running jobs, {operator['series']:,} series",
            f"{1e3 * operator['scrape_seconds']:.0f} ms",
            f"{1e3 * limits['operator_scrape_seconds']:.0f} ms",
        ],
    ]
    return {"METRICS": format_table(["", "measured", "allowed"], rows)}


def build_checkpoints_section(stored: dict[str, Any]) -> dict[str, str]:
    rows = [
        ["a step of this training", format_number(stored["step_seconds"])],
        [
            "**a save stops training**, median (most)",
            f"**{format_number(stored['stall_seconds'])}** ({format_number(stored['stall_seconds_most'])})",
        ],
        ["the first save, which also creates the buffers", format_number(stored["stall_seconds_first"])],
        ["a save that training waits for (`run.save()`)", format_number(stored["save_and_wait_seconds"])],
        ["the same bytes written and synced, without a checksum", format_number(stored["plain_write_seconds"])],
        ["a resume", format_number(stored["load_seconds"])],
    ]
    world = " + ".join(str(ranks) for ranks in stored["ranks"])
    about = (
        f"A model of {stored['parameters']:,} float32 parameters with momentum, `hitopk`; ranks per node: {world}; "
        f"{stored['processors']} processors, one torch thread; {stored['megabytes']:,.0f} MB per checkpoint. "
        f"The machine did other work at the same time (load {stored['load']}), so this does not show how much slower "
        "steps are while the files are written."
    )
    return {"CHECKPOINTS": f"{about}\n\n{format_table(['', 'seconds'], rows)}"}


SECTIONS: dict[str, Callable[[dict[str, Any]], dict[str, str]]] = {
    "allreduce": allreduce_report.build_section,
    "select": build_select_section,
    "convergence": build_convergence_section,
    "simulated_nodes": simulated_report.build_section,
    "overhead": build_overhead_section,
    "gpu": gpu_report.build_section,
    "cache": build_cache_section,
    "metrics": build_metrics_section,
    "checkpoints": build_checkpoints_section,
    "ranks": ranks_report.build_section,
    "step": step_report.build_section,
    "step_avx2": step_report.build_section_without_avx512,
    "step_links": step_report.build_links_section,
    "timeline": timeline_report.build_section,
    "target_loss": target_loss_report.build_section,
    "prediction": prediction_report.build_section,
    **cluster_report.SECTIONS,
}


def render_page(results: Path = RESULTS) -> str:
    """Return the page. A section of the template without a result is left out. A part marked `without NAME` is left out
    if that result exists."""
    text = Path(__file__).with_name("report.template.md").read_text()
    for name, section in SECTIONS.items():
        stored = load_result(name, results)
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        while start in text:
            before, _, rest = text.partition(start)
            inside, _, after = rest.partition(end)
            if stored is None:
                inside = ""
            else:
                for key, value in section(stored).items():
                    inside = inside.replace("{{" + key + "}}", value)
            text = before + inside + after
        without, end = f"<!-- without {name} -->\n", f"<!-- /without {name} -->\n"
        before, _, rest = text.partition(without)
        inside, _, after = rest.partition(end)
        text = before + (inside if stored is None else "") + after
    return text


def list_pictures(results: Path = RESULTS) -> dict[str, tuple[Callable[..., None], Any]]:
    """Return the file name of each plot, the function that draws it, and the data that it shows."""
    import plots

    plotted: dict[str, tuple[Callable[..., None], Any]] = {}
    stored = load_result("allreduce", results)
    if stored:
        plotted.update(allreduce_report.list_pictures(stored))
    stored = load_result("convergence", results)
    if stored:
        plotted["convergence.png"] = (plots.draw_convergence, stored["runs"])
    stored = load_result("simulated_nodes", results)
    if stored:
        plotted["simulated-nodes.png"] = (simulated_report.draw_picture, stored["compared"])
    stored = load_result("timeline", results)
    if stored:
        plotted["step-timeline.png"] = (timeline_report.draw_picture, stored)
    stored = load_result("target_loss", results)
    if stored:
        plotted["target-loss.png"] = (
            target_loss_report.draw_picture,
            {name: stored[name] for name in ("runs", "times")},
        )
    stored = load_result("cache", results)
    if stored:
        plotted["cache.png"] = (cache.draw_picture, stored)
    return plotted


def list_stale_files(results: Path = RESULTS) -> list[str]:
    """Return the files that differ from the results: the page or plots."""
    import plots

    stale = []
    if not DOCUMENT.exists() or DOCUMENT.read_text() != render_page(results):
        stale.append(str(DOCUMENT.relative_to(ROOT)))
    for name, (_, rows) in list_pictures(results).items():
        path = IMAGES / name
        if not path.exists() or plots.read_digest(path) != plots.digest(rows):
            stale.append(str(path.relative_to(ROOT)))
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only list stale files")
    if parser.parse_args().check:
        stale = list_stale_files()
        print("\n".join(f"{path} is stale; run python benchmarks/report.py" for path in stale))
        return 1 if stale else 0
    IMAGES.mkdir(parents=True, exist_ok=True)
    DOCUMENT.write_text(render_page())
    for name, (draw, rows) in list_pictures().items():
        draw(rows, IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
