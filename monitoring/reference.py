"""Build docs/metrics.md from the definitions of the metrics."""

from __future__ import annotations

from monitoring.catalog import SOURCES

_HEAD = """# Metrics

Base units (seconds, bytes), ratios from 0 to 1. Every label has few values: the ranks of a job limit its series,
and the series end with the job. `training_job` is the TrainingJob's name. In a cluster Prometheus adds
`namespace` and `pod`.

Job-wide values are the same on all ranks and come from rank 0 alone: no sum is needed. Values marked *sampled* in their
description are taken every five seconds or less often, so that they cost less than 0.4% of a step.

This page is generated: `python -m monitoring` writes it.
"""


def build_markdown() -> str:
    """Return the whole page."""
    lines = [_HEAD]
    for source in SOURCES:
        lines += [
            f"## {source.title}",
            "",
            source.address,
            "",
            "| metric | kind | labels | meaning |",
            "|---|---|---|---|",
        ]
        for metric in source.metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            scope = " Job-wide." if metric.job_wide else ""
            lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{scope} |")
        lines.append("")
    return "\n".join(lines)
