"""Writes docs/benchmarks.md and its plots from the JSON files in benchmarks/results.

    python benchmarks/report.py            writes them
    python benchmarks/report.py --check    says what is stale, and writes nothing

A result that is not there yet leaves its section out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cluster_report
from datacache import section as cache
from tables import number, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
WHOLE = 25_557_032
LAYOUTS = {"2x2": "2 nodes × 2 ranks", "4x1": "4 nodes × 1 rank"}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "unshaped": "link not shaped"}

Row = dict[str, Any]


def load(name: str, results: Path = RESULTS) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    if not path.exists():
        return None
    stored: dict[str, Any] = json.loads(path.read_text())
    return stored


def size(elements: int) -> str:
    """Of an array of float32."""
    mebibytes = elements * 4 / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes >= 1 else f"{mebibytes * 1024:.0f} KiB"


def _emphasised(row: Row) -> str:
    return f"**{row['contender']}**" if row["kind"].startswith("ours") else str(row["contender"])


def _times(row: Row, column: str) -> str:
    return f"{row[column]:.2f}×" if row.get(column) is not None else "–"


def between_nodes(rows: list[Row]) -> str:
    """One row per contender, fastest first."""
    cells = [
        [
            _emphasised(row),
            number(row["ms"]),
            f"{number(row['ms_min'])}–{number(row['ms_max'])}",
            number(row["bound_ms"]),
            f"{row['of_bound']:.0f}%",
            f"{row['sent_mb']:.2f}",
            f"{row['formula_mb']:.2f}",
            _times(row, "against_dense"),
            _times(row, "against_topk"),
        ]
        for row in sorted(rows, key=lambda row: row["ms"])
    ]
    headings = ["contender", "ms", "min–max", "bound, ms", "of bound", "sent, MB", "formula, MB", "× best dense peer"]
    return table([*headings, "× torch.topk + all-gather"], cells)


def _where(rows: list[Row], part: str, rate: str | None, elements: int) -> list[Row]:
    return [row for row in rows if (row["part"], row["rate"], row["elements"]) == (part, rate, elements)]


def _find(rows: list[Row], contender: str) -> Row | None:
    return next((row for row in rows if row["contender"] == contender), None)


def headline(rows: list[Row]) -> str:
    here = _where(rows, "2x2", "1gbit", WHOLE)
    sparse, dense = _find(here, "TopKube hitopk 1%"), _find(here, "TopKube hierarchical")
    if sparse is None or dense is None:
        return ""
    best = min((row for row in here if row["kind"] == "peer dense"), key=lambda row: row["ms"])
    text = (
        f"![All-reduce over 1 Gbit/s](images/allreduce.png)\n\n"
        f"Between 2 nodes × 2 ranks over 1 Gbit/s, summing {WHOLE:,} float32 (ResNet-50's parameters) takes the best "
        f"dense peer ({best['contender']}) {number(best['ms'])} ms. `hitopk` at a density of 1% takes "
        f"{number(sparse['ms'])} ms: {sparse['against_dense']:.1f}× faster than that, {sparse['against_topk']:.1f}× "
        f"faster than torch.topk and an all-gather, {sparse['of_bound']:.0f}% of its bound. Our dense `hierarchical` "
        f"takes {number(dense['ms'])} ms, {dense['of_bound']:.0f}% of its bound."
    )
    node = _find(_where(rows, "node", None, WHOLE), "TopKube hierarchical")
    if node:
        text += (
            f" Between two ranks of one node it takes {number(node['ms'])} ms, "
            f"{node['against_dense']:.1f}× faster than the best peer."
        )
    return text


def losses(rows: list[Row]) -> str:
    """Every exchange measured where `hitopk` 1% is slower than something dense, or less than twice as fast."""
    cells = []
    for part in LAYOUTS:
        for rate in LINKS:
            for elements in sorted({row["elements"] for row in rows}):
                here = _where(rows, part, rate, elements)
                sparse = _find(here, "TopKube hitopk 1%")
                dense = sorted((row for row in here if row["kind"].endswith("dense")), key=lambda row: row["ms"])
                if sparse is None or not dense:
                    continue
                gain = dense[0]["ms"] / sparse["ms"]
                verdict = "**sparse loses**" if gain < 1 else "hardly worth it" if gain < 2 else "sparse wins"
                cells.append(
                    [
                        f"{LAYOUTS[part]}, {LINKS[rate]}",
                        size(elements),
                        number(sparse["ms"]),
                        f"{number(dense[0]['ms'])} ({dense[0]['contender']})",
                        f"{gain:.2f}×",
                        verdict,
                    ]
                )
    lost = [cell for cell in cells if "loses" in cell[-1]]
    found = (
        f"Sparse loses in {len(lost)} of these {len(cells)} exchanges." if lost else "Sparse loses in none of these."
    )
    return table(["exchange", "array", "hitopk 1%, ms", "best dense, ms", "gain", ""], cells) + f"\n\n{found}"


def crossing(rows: list[Row]) -> str:
    """The link speed from which on dense would be as fast, from the 1 Gbit/s rows of 2 x 2."""
    here = _where(rows, "2x2", "1gbit", WHOLE)
    sparse, dense = _find(here, "TopKube hitopk 1%"), _find(here, "TopKube hierarchical")
    if sparse is None or dense is None:
        return ""
    fixed = sparse["ms"] - sparse["inter_ms"]
    speed = (dense["formula_mb"] - sparse["formula_mb"]) * 8 / fixed
    return (
        f"On this machine, everything in `hitopk` but the wire takes {number(fixed)} ms for the whole array. Dense "
        f"sends {number(dense['formula_mb'])} MB per node, sparse {sparse['formula_mb']:.2f}; the difference passes in "
        f"{number(fixed)} ms from about **{number(speed)} Gbit/s** on, and there dense, which hides its stages inside "
        f"the node behind the wire, is as fast."
    )


def fact_lines(facts: dict[str, Any]) -> str:
    machine = ("processor", "cores", "system", "python")
    lines = [f"- {' · '.join(f'{name}: {facts[name]}' for name in machine if name in facts)}"]
    probed: dict[str, list[str]] = {}
    for name, value in facts.items():
        if name not in machine:
            where, _, what = name.partition(" ")
            probed.setdefault(where, []).append(f"{what} {value}")
    return "\n".join([*lines, *(f"- {where}: {'; '.join(values)}" for where, values in probed.items())])


def generic(report: dict[str, Any]) -> str:
    """A `topkube.bench` report, all of its columns."""
    used = {key for row in report["rows"] for key, value in row.items() if value is not None}
    columns = {key: heading for key, heading in report["columns"].items() if key in used}
    body = [[number(row.get(key)) for key in columns] for row in report["rows"]]
    facts = " · ".join(f"{name}: {number(value)}" for name, value in report.get("facts", {}).items())
    return table(list(columns.values()), body) + (f"\n\n{facts}" if facts else "")


def allreduce_section(stored: dict[str, Any]) -> dict[str, str]:
    rows: list[Row] = stored["rows"]
    tables = []
    for part, layout in LAYOUTS.items():
        for rate, link in LINKS.items():
            here = _where(rows, part, rate, WHOLE)
            if here:
                tables.append(f"#### {layout}, {link}, {WHOLE:,} float32\n\n{between_nodes(here)}")
    small = []
    for part, layout in LAYOUTS.items():
        for rate, link in LINKS.items():
            for elements in sorted({row["elements"] for row in rows if row["elements"] < WHOLE}):
                here = _where(rows, part, rate, elements)
                if here:
                    small.append(f"#### {layout}, {link}, {size(elements)}\n\n{between_nodes(here)}")
    node = [
        [
            _emphasised(row),
            number(row["ms"]),
            f"{number(row['ms_min'])}–{number(row['ms_max'])}",
            number(row["bound_ms"]),
            f"{row['of_bound']:.0f}%",
            _times(row, "against_dense"),
        ]
        for row in sorted(_where(rows, "node", None, WHOLE), key=lambda row: row["ms"])
    ]
    return {
        "HEADLINE": headline(rows),
        "TABLES": "\n\n".join(tables),
        "SMALL": "\n\n".join(small),
        "NODE": table(["contender", "ms", "min–max", "bound, ms", "of bound", "× best peer"], node),
        "LOSSES": losses(rows),
        "CROSSING": crossing(rows),
        "FACTS": fact_lines(stored["facts"]),
        "TUNING": tuning(stored.get("tuning", [])),
    }


def tuning(rows: list[Row]) -> str:
    if not rows:
        return ""
    cells = [
        [row["world"], row["part"], row["settings"] or "as installed", number(row["ms"])]
        for row in sorted(rows, key=lambda row: (row["part"], row["ms"]))
    ]
    return "Every setting that was tried, on the whole array:\n\n" + table(
        ["world", "layout", "settings", "ms at 1 Gbit/s"], cells
    )


def select_section(stored: dict[str, Any]) -> dict[str, str]:
    parts = [stored, stored["mstopk"], stored["adversarial"]]
    return {"SELECT": "\n\n".join(f"**{part['title']}**\n\n{generic(part)}" for part in parts)}


def convergence_section(stored: dict[str, Any]) -> dict[str, str]:
    cells = []
    for row in stored["compared"]:
        low, high = row["interval_percent"]
        within = "yes" if row["within_1_percent"] else "better" if high < 0 else "no"
        cells.append(
            [
                f"{row['model']}, {row['optimizer']}, {row['condition']}",
                number(row["seeds"]),
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
        + (", ".join(f"{of} {each}" for of, each in value.items()) if isinstance(value, dict) else str(value))
        for name, value in about.items()
    )
    return {"CONVERGENCE": f"{table(headings, cells)}\n\n{listed}."}


def overhead_section(stored: dict[str, Any]) -> dict[str, str]:
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
        [name, f"{bytes_ / 1e6:.1f}", f"{memory['two_shards_and_two_buckets_bytes'] / 1e6:.1f}"]
        for name, bytes_ in memory["above_plain_bytes"].items()
    ]
    return {
        "OVERHEAD": "\n\n".join(
            [
                f"One rank, char_gpt with {time['parameters']:,} parameters, batch {time['batch']}, "
                f"context {time['context']}, {time['torch_threads']} torch thread; "
                f"medians of {time['steps']} interleaved steps.",
                table(["loop", "ms per step", "above plain torch", "allowed"], steps),
                f"Peak memory above plain torch, {memory['parameters']:,} parameters, one rank:",
                table(["loop", "MB above plain torch", "two shards and two buckets, MB"], above),
            ]
        )
    }


def gpu_section(stored: dict[str, Any]) -> dict[str, str]:
    columns = ["topk", "compress_", "mstopk"]
    cells = [
        [
            f"{row['size']}, {row['density']:g}",
            number(row["read ms"]),
            number(row["read GB/s"]),
            *(number(row[f"{name} ms"]) for name in columns),
            f"{row['topk % of a read']:.0f}%",
            f"{row['compress_ % of 12 bytes']:.0f}%",
            f"{row['topk × torch.topk']:.1f}×",
            f"{row['mstopk × torch']:.1f}×",
        ]
        for row in stored["rows"]
    ]
    headings = ["elements, density", "read, ms", "GB/s", *(f"{name}, ms" for name in columns)]
    headings += ["topk of a read", "compress_ of 12 bytes", "topk × torch.topk", "mstopk × torch"]
    about = (
        f"{stored['device']}, torch {stored['torch']}, {stored['date']}, `{stored['command']}`; medians of CUDA "
        "events, float32, inputs rotating through more memory than the L2 cache."
    )
    text = f"{about}\n\n{table(headings, cells)}"
    if step := stored.get("step"):
        text += (
            f"\n\nA char_gpt step on one GPU ({step['parameters']:,} parameters, batch {step['batch']}, context "
            f"{step['context']}, bf16 autocast): {number(step['dense ms'])} ms without compression, "
            f"{number(step['hitopk 1% ms'])} ms with `hitopk` forced on at 1%: {step['overhead %']:+.1f}%."
        )
    return {"GPU": text}


def cache_section(stored: dict[str, Any]) -> dict[str, str]:
    return cache.filled(stored)


def metrics_section(stored: dict[str, Any]) -> dict[str, str]:
    worker, operator, limits = stored["worker"], stored["operator"], stored["limits"]
    step = f"{1e3 * stored['step_seconds']:.0f} ms"
    bookkeeping = f"one step's counting and its record, {1e6 * stored['step_bookkeeping_seconds']:.0f} µs: of {step}"
    rows = [
        [bookkeeping, f"{stored['share_of_a_step']:.2%}", ""],
        ["norms, sampled: at most, by a constant of the code", f"{stored['norms_at_most_share_of_time']:.2%}", ""],
        [f"both together, of a step of {step}", f"{stored['together_at_most']:.2%}", f"{limits['share']:.1%}"],
        [
            f"a scrape of a worker with {worker['ranks']} ranks",
            f"{1e3 * worker['scrape_seconds']:.0f} ms",
            f"{1e3 * limits['worker_scrape_seconds']:.0f} ms",
        ],
        ["its series", str(worker["series"]), str(limits["worker_series"])],
        [
            f"a scrape of the operator with {operator['jobs']:,} running jobs, {operator['series']:,} series",
            f"{1e3 * operator['scrape_seconds']:.0f} ms",
            f"{1e3 * limits['operator_scrape_seconds']:.0f} ms",
        ],
    ]
    return {"METRICS": table(["", "measured", "allowed"], rows)}


SECTIONS: dict[str, Callable[[dict[str, Any]], dict[str, str]]] = {
    "allreduce": allreduce_section,
    "select": select_section,
    "convergence": convergence_section,
    "overhead": overhead_section,
    "gpu": gpu_section,
    "cache": cache_section,
    "metrics": metrics_section,
    **cluster_report.SECTIONS,
}


def render(results: Path = RESULTS) -> str:
    """The document. A section of the template whose result is missing is left out as a whole; what is marked
    `without NAME` is left out where that result is there."""
    text = Path(__file__).with_name("report.template.md").read_text()
    for name, section in SECTIONS.items():
        stored = load(name, results)
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


def pictures(results: Path = RESULTS) -> dict[str, tuple[Callable[..., None], Any]]:
    """Each picture's file, the function that draws it and what it is drawn from."""
    import plots

    found: dict[str, tuple[Callable[..., None], Any]] = {}
    stored = load("allreduce", results)
    if stored:
        rows: list[Row] = stored["rows"]
        whole = [row for row in rows if row["elements"] == WHOLE and row["part"] in LAYOUTS]
        found["allreduce.png"] = (plots.headline, _where(rows, "2x2", "1gbit", WHOLE))
        found["allreduce-links.png"] = (plots.links, whole)
        found["allreduce-sizes.png"] = (plots.sizes, [row for row in rows if row["rate"] == "1gbit"])
    stored = load("convergence", results)
    if stored:
        found["convergence.png"] = (plots.convergence, stored["runs"])
    stored = load("cache", results)
    if stored:
        found["cache.png"] = (cache.picture, stored)
    return found


def stale(results: Path = RESULTS) -> list[str]:
    """What differs from the results: the document or a picture."""
    import plots

    wrong = []
    if not DOCUMENT.exists() or DOCUMENT.read_text() != render(results):
        wrong.append(str(DOCUMENT.relative_to(ROOT)))
    for name, (_, rows) in pictures(results).items():
        path = IMAGES / name
        if not path.exists() or plots.drawn_from(path) != plots.digest(rows):
            wrong.append(str(path.relative_to(ROOT)))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    if parser.parse_args().check:
        wrong = stale()
        print("\n".join(f"{path} is stale; run python benchmarks/report.py" for path in wrong))
        return 1 if wrong else 0
    IMAGES.mkdir(parents=True, exist_ok=True)
    DOCUMENT.write_text(render())
    for name, (draw, rows) in pictures().items():
        draw(rows, IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
