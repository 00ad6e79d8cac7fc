"""Read the size of the model, and the profile of a step, from the options."""

from __future__ import annotations

import dataclasses
from typing import Any

from topkube.cli.plan.options import PlanOptions, parse_count, parse_operations_rate, parse_seconds
from topkube.errors import ArgumentError
from topkube.planning.models import Model, find_model
from topkube.planning.profile import StepProfile, build_uniform_profile
from topkube.planning.traced_profile import add_host_costs, read_traced_profile
from topkube.telemetry.trace_files import read_trace


def count_parameters(options: PlanOptions) -> int:
    """Return the number of parameters that --parameters states, by default 25.6 million (ResNet-50)."""
    return int(parse_count(options.parameters or "25.6M", "--parameters"))


def read_profile(options: PlanOptions) -> tuple[StepProfile | None, Model | None]:
    """Return the profile of a step (None if its time is unknown), and the built-in model (None without --model).

    Raises ArgumentError if several options describe the model, and TraceError if a trace cannot be used.
    """
    sources = [("--model", options.model), ("--trace", options.traces), ("--parameters", options.parameters)]
    used_options = [option for option, value in sources if value]
    if len(used_options) > 1:
        raise ArgumentError(
            f"{used_options[0]} and {used_options[1]} both describe the model",
            next_step=f"pass {used_options[0]} or {used_options[1]}, not both",
        )
    model = find_model(options.model) if options.model else None
    profile: StepProfile | None = None
    if options.traces:
        profiles = [read_traced_profile(read_trace(path), path.name) for path in options.traces]
        profile = add_host_costs(profiles[0], profiles[1:])
    compute = _read_compute_seconds(options, model)
    if compute is not None:
        if profile is not None:
            profile = profile.scale_batch(compute / profile.compute)
        else:
            profile = (
                model.build_profile(compute) if model else build_uniform_profile(count_parameters(options), compute)
            )
    if profile is None:
        return None, model
    changes: dict[str, Any] = {"data": options.data} if options.data else {}
    if options.device is not None:
        changes["on_cpu"] = options.device == "cpu"
    if options.spread is not None:
        changes["spread"] = options.spread
    return dataclasses.replace(profile, **changes), model


def _read_compute_seconds(options: PlanOptions, model: Model | None) -> float | None:
    """Return the seconds of forward and backward that --compute states; None without this option."""
    if options.compute is None:
        return None
    if "flop" not in options.compute.lower():
        return parse_seconds(options.compute, "--compute")
    rate = parse_operations_rate(options.compute, "--compute")
    if model is None or options.batch is None:
        raise ArgumentError(
            f"--compute is {options.compute!r}, a rate", next_step="add --model and --batch, or pass seconds"
        )
    return model.flops * options.batch / rate
