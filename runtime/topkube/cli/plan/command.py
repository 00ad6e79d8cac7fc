"""`topkube plan`: compare the algorithms, print the results, and draw the picture."""

from __future__ import annotations

import json

from rich.console import Console

from topkube.cli.output_file import check_output_file
from topkube.cli.plan.comparison import read_comparison
from topkube.cli.plan.options import PlanOptions
from topkube.cli.plan.progress import PlanProgress
from topkube.cli.plan.report import describe_situation, print_recommendations, print_sweep, print_table
from topkube.cli.plan.results import build_json, predict_exchange, predict_sweep, recommend
from topkube.errors import ArgumentError
from topkube.planning import guidelines
from topkube.planning.picture import draw_sweep
from topkube.telemetry.plot import check_ending


def show_plan(options: PlanOptions) -> None:
    """Print tables and recommendations, or JSON; draw the picture. Raises ArgumentError, TraceError and PlotError."""
    comparison = read_comparison(options)
    if options.plot is not None:
        if comparison.profile is None:
            raise ArgumentError("--plot needs the time of a step", next_step="add --compute SECONDS or --trace FILE")
        check_ending(options.plot)
        check_output_file("--plot", options.plot)
    chosen = comparison.find_chosen()
    rows = [predict_exchange(comparison, algorithm, algorithm == chosen) for algorithm in comparison.listed]
    with PlanProgress(Console(stderr=True), len(guidelines.NODES) + len(comparison.listed)) as progress:
        swept = predict_sweep(comparison, progress)
        advice = recommend(comparison, options, chosen, progress) if comparison.profile and chosen else None
    if options.plot is not None and comparison.profile is not None:
        draw_sweep(
            swept,
            options.plot,
            f"{comparison.profile.name}: {describe_situation(comparison, options, with_nodes=False)}",
        )
    if options.json:
        print(json.dumps(build_json(comparison, rows, swept, advice, chosen), indent=1))
        return
    print_table(comparison, rows, options)
    if advice is not None:
        print_sweep(swept)
        print_recommendations(advice, options)
