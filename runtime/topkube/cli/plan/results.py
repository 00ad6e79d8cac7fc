"""The results of `topkube plan`: predicted exchanges and steps, and recommendations; all of them as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from topkube.algorithms import OVERLAP, Algorithm
from topkube.cli.plan.comparison import Comparison
from topkube.cli.plan.options import PlanOptions, parse_size
from topkube.cli.plan.progress import PlanProgress
from topkube.planning import guidelines
from topkube.planning.profile import StepProfile
from topkube.planning.situation import Situation
from topkube.planning.step import Prediction, can_decouple, can_delay, predict_step

EFFICIENCY = 0.8
"""The scaling efficiency that the recommendations must reach."""


def _compare_overlaps(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> dict[str, float] | None:
    """Return the seconds of a step by the name of the overlap; None if DeAR has no effect."""
    if not can_decouple(profile, situation, algorithm):
        return None
    steps = (
        predict_step(profile, dataclasses.replace(situation, is_decoupled=dear), algorithm).step
        for dear in (False, True)
    )
    return dict(zip(OVERLAP.choices, steps, strict=True))


def _compare_delays(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> dict[str, float] | None:
    """Return the seconds of a step by the delay; None if a delay has no effect."""
    if not can_delay(situation, algorithm):
        return None
    return {
        str(delay): predict_step(profile, dataclasses.replace(situation, delay=delay), algorithm).step
        for delay in (0, 1)
    }


def predict_exchange(comparison: Comparison, algorithm: Algorithm, chosen: bool) -> dict[str, Any]:
    """Return the row of an algorithm in the table: its exchange, and its step if the time of a step is known."""
    situation = comparison.situation
    exchange = situation.estimate_cost(algorithm, comparison.elements)
    row: dict[str, Any] = {
        "algorithm": algorithm.name,
        "chosen": chosen,
        "sentBytes": round(exchange.sent),
        "betweenSeconds": exchange.between,
        "insideSeconds": exchange.inside,
        "exchangeSeconds": exchange.seconds,
        "stateBytes": algorithm.state_bytes(situation.build_workload(algorithm, comparison.elements)),
    }
    if comparison.profile is not None:
        row |= _describe_step(comparison.predict_step(algorithm)) | {"measured": comparison.is_measured(algorithm)}
    return row


def _describe_step(prediction: Prediction) -> dict[str, float]:
    return {"stepSeconds": prediction.step, "efficiency": prediction.efficiency}


def predict_sweep(comparison: Comparison, progress: PlanProgress) -> list[tuple[int, list[Prediction]]]:
    """Return the predictions of all algorithms for each of NODES; none if the time of a step is unknown."""
    profile = comparison.profile
    if profile is None:
        return []
    return [
        (nodes, guidelines.predict_nodes(profile, comparison.situation, comparison.listed, nodes))
        for nodes in progress.track(guidelines.NODES)
    ]


def recommend(
    comparison: Comparison, options: PlanOptions, chosen: Algorithm, progress: PlanProgress
) -> dict[str, Any]:
    """Return the recommendations by name. A batch is a number of samples per rank with --batch, and a multiple of the
    present batch without it. A measured step is longer than a bound, so the fastest algorithm is that of a step that
    is measured if the step of `chosen` is, and a bound if it is a bound."""
    assert comparison.profile is not None
    profile, situation, dense = comparison.profile, comparison.situation, comparison.find_dense()
    recommended = [algorithm for algorithm in comparison.listed if _is_recommended(algorithm, profile)]
    comparable = [
        algorithm for algorithm in recommended if comparison.is_measured(algorithm) == comparison.is_measured(chosen)
    ]
    fastest = min(comparable, key=lambda algorithm: comparison.predict_step(algorithm).step, default=chosen)
    prediction = comparison.predict_step(chosen)
    factor = guidelines.find_batch_factor(profile, situation, chosen, EFFICIENCY)
    largest_batch = None
    if options.device_memory is not None and comparison.model is not None:
        memory = parse_size(options.device_memory, "--device-memory")
        largest_batch = guidelines.count_most_samples(
            memory, comparison.elements, comparison.model.activations, chosen, situation
        )
    search = guidelines.BreakEvenSearch(profile, situation, dense)
    break_even_links = {
        algorithm: search.find(algorithm) for algorithm in progress.track(recommended) if algorithm.compresses
    }
    return {
        "efficiency": EFFICIENCY,
        "fastest": fastest.name,
        "algorithm": chosen.name,
        "nodes": guidelines.find_most_nodes(profile, situation, chosen, EFFICIENCY),
        "ranksOfThisTotalBatch": guidelines.count_ranks_of_fixed_batch(prediction, situation.ranks, EFFICIENCY),
        "batchFactor": factor,
        "batch": math.ceil(factor * options.batch) if factor is not None and options.batch else None,
        "largestBatchInMemory": largest_batch,
        "overlap": _compare_overlaps(profile, situation, chosen),
        "delay": _compare_delays(profile, situation, chosen),
        "breakEven": {
            algorithm.name: {
                "linkBitsPerSecond": None if row.link is None else row.link * 8,
                "fasterOnAllLinks": row.is_faster,
                "comparable": comparison.is_measured(algorithm) == comparison.is_measured(dense),
            }
            for algorithm, row in break_even_links.items()
        },
    }


def _is_recommended(algorithm: Algorithm, profile: StepProfile) -> bool:
    """Return True if a recommendation may name the algorithm: it trains on this device, and not for comparisons."""
    trains_here = not algorithm.needs_gpu if profile.on_cpu else algorithm.trains_on_gpu
    return trains_here and not algorithm.is_for_comparisons


def name_overlap(situation: Situation) -> str:
    """Return the name of what exchanges overlap with: "backward", "dear" or "none"."""
    if not situation.overlap:
        return "none"
    return "dear" if situation.is_decoupled else OVERLAP.default


def build_json(
    comparison: Comparison, rows: Any, swept: Any, advice: dict[str, Any] | None, chosen: Algorithm | None
) -> dict[str, Any]:
    """Return the whole result as plain data for --json."""
    machines, situation = comparison.machines, comparison.situation
    values: dict[str, Any] = {
        "workers": machines.nodes,
        "slotsPerWorker": machines.slots,
        "parameters": comparison.elements,
        "density": situation.density,
        "wire": situation.wire,
        "denseWire": situation.dense_wire,
        "period": situation.period,
        "overlap": name_overlap(situation),
        "delay": situation.delay,
        "wanted": comparison.wanted,
        "chosen": chosen.name if chosen else None,
        "algorithms": rows,
    }
    if comparison.profile is not None:
        profile = comparison.profile
        values["profile"] = {
            "name": profile.name,
            "forwardSeconds": profile.forward,
            "backwardSeconds": profile.backward,
            "updateSeconds": profile.update,
            "otherSeconds": profile.other,
            "spread": profile.spread,
            "latencySeconds": machines.latency,
        }
        values["nodes"] = [
            {"nodes": nodes, "algorithms": {row.algorithm.name: _describe_step(row) for row in predictions}}
            for nodes, predictions in swept
        ]
        values["advice"] = advice
    return values
