"""Build docs/algorithms.md from the declarations: `python -m topkube.algorithms.reference > docs/algorithms.md`."""

from __future__ import annotations

from collections.abc import Iterator

from topkube.algorithms.choice import CHOICE_PARAMETERS, CHOICES
from topkube.algorithms.cost import Workload
from topkube.algorithms.declaration import Algorithm, Route, Scope
from topkube.algorithms.own import OWN
from topkube.algorithms.parameters import PARAMETERS

_HEAD = """# All-reduce algorithms

This page lists the names for `spec.aggregation.algorithm` of a [TrainingJob](trainingjob.md) and for `algorithm` of
`topkube.allreduce_`.
[Collectives](collectives.md) describes how the algorithms work. [Add an algorithm](new-algorithm.md) shows how to write
a new algorithm.
This page is generated from the declarations: `python -m topkube.algorithms.reference > docs/algorithms.md`.

`auto` is the default of a TrainingJob. It sends the whole gradient, or uses `int8`, `int4` or `int3` if that makes the
steps of training at least 3% faster; with `nodeWeights: own`, it may also use `onebit`. `dense` always sends the whole
gradient. To send fewer bytes, name an algorithm, such as `hitopk` or `onebit`. [Accuracy](accuracy.md) shows which
algorithm fits each link and model, and the loss of each algorithm.

The default of `topkube.allreduce_` is `hitopk`. In this function, `auto` and `dense` both stand for the dense algorithm
that sends the fewest bytes.
"""
_ELEMENTS, _SLOTS, _NODES = 25_600_000, 8, (2, 8, 16, 64)
"""For the table of bytes: the parameters of the model (as many as ResNet-50 has), ranks per node, numbers of nodes."""
_DEFAULTS = {name: PARAMETERS[name].default for name in ("density", "wire", "dense_wire", "matrix_rank")}
"""For the table of bytes: the defaults of the parameters that change the bytes, without `period`."""
_COPY_HOLDERS = {Scope.SHARD: "node, divided among its ranks", Scope.RANK: "rank"}
"""The words after "one copy per" in the column of states, by the scope of the state."""


def build_markdown() -> str:
    """Return the page."""
    lines = [_HEAD, "| name | what it does |", "|---|---|"]
    lines += [f"| `{name}` | {sentence} |" for name, sentence in CHOICES.items()]
    lines += [f"| `{algorithm.name}` | {algorithm.summary} |" for algorithm in OWN]
    lines += ["", "## What each algorithm sends, keeps and supports", ""]
    lines += [
        "| name | family | sends | between nodes by | keeps on each rank | on a GPU |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_format_row(algorithm) for algorithm in OWN]
    lines += ["", "## Bytes that a node sends", "", *_build_bytes_section()]
    lines += ["", "## Parameters", "", *_build_parameter_table()]
    return "\n".join(lines) + "\n"


def _build_bytes_section() -> list[str]:
    larger_periods = [
        f"{algorithm.least_period} for `{algorithm.name}`" for algorithm in OWN if algorithm.least_period > 1
    ]
    lines = [
        f"The table shows MB per step, by the declared costs, for {_ELEMENTS / 1e6:.1f} million parameters and "
        f"{_SLOTS} ranks per node. Except for `period`, the parameters have their defaults: for example, "
        f"`density` is {_DEFAULTS['density']:g} and `wire` is {_DEFAULTS['wire']}. `period` is the smallest value that "
        f"the algorithm allows: {', '.join(larger_periods)}, and 1 for all others. With a period that is N times as "
        "long, an algorithm that reads `period` sends one N-th of the bytes shown. `topkube plan` computes the bytes "
        "for your cluster.",
        "",
        "| name | " + " | ".join(f"{nodes} nodes" for nodes in _NODES) + " |",
        "|---|" + "---|" * len(_NODES),
    ]
    lines += [f"| `{algorithm.name}` | " + " | ".join(_list_sent_megabytes(algorithm)) + " |" for algorithm in OWN]
    return lines


def _build_parameter_table() -> list[str]:
    lines = [
        "| field | meaning | allowed | default | read by |",
        "|---|---|---|---|---|",
    ]
    for parameter in PARAMETERS.values():
        readers = [f"`{name}`" for name, parameters in CHOICE_PARAMETERS.items() if parameter in parameters]
        readers += [f"`{algorithm.name}`" for algorithm in OWN if parameter in algorithm.parameters]
        default = str(parameter.default).lower() if isinstance(parameter.default, bool) else parameter.default
        cells = [f"`{parameter.field}`", parameter.description, parameter.range, f"`{default}`", ", ".join(readers)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _format_row(algorithm: Algorithm) -> str:
    states = [f"{state.name}, one copy per {_COPY_HOLDERS[state.scope]}: {state.summary}" for state in algorithm.state]
    transport = f" over {algorithm.transport}" if algorithm.needs_gpu else ""
    route = f"{algorithm.route}{transport}"
    if algorithm.two_stage_from and algorithm.route is not Route.SPLIT:
        route += f"; from {algorithm.two_stage_from} nodes on, {Route.SPLIT}"
    cells = [
        f"`{algorithm.name}`",
        algorithm.family,
        algorithm.sends,
        route,
        "; ".join(states) or "nothing",
        _describe_gpu_support(algorithm),
    ]
    return "| " + " | ".join(cells) + " |"


def _describe_gpu_support(algorithm: Algorithm) -> str:
    if algorithm.in_weights:
        return "through host memory"
    if algorithm.needs_gpu:
        return "only"
    return "yes" if algorithm.on_device else "no"


def _list_sent_megabytes(algorithm: Algorithm) -> Iterator[str]:
    for nodes in _NODES:
        workload = Workload(nodes, _SLOTS, _ELEMENTS, period=algorithm.least_period, **_DEFAULTS)
        sent = algorithm.traffic(workload).sent / 1e6
        yield f"{sent:,.0f}" if sent >= 10 else f"{sent:.1f}"


if __name__ == "__main__":
    print(build_markdown(), end="")
