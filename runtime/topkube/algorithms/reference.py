"""docs/algorithms.md, from the declarations: `python -m topkube.algorithms.reference > docs/algorithms.md`."""

from __future__ import annotations

from collections.abc import Iterator

from topkube.algorithms.choice import CHOICES
from topkube.algorithms.cost import Workload
from topkube.algorithms.declaration import Algorithm
from topkube.algorithms.own import OWN
from topkube.algorithms.parameters import PARAMETERS

_HEAD = """# All-reduce algorithms

This page lists the names for `spec.aggregation.algorithm` of a [TrainingJob](trainingjob.md) and for `algorithm` of
`topkube.allreduce_`.
[Collectives](collectives.md) describes how they work. [Add an algorithm](new-algorithm.md) shows how to write another.
This page is generated from the declarations: `python -m topkube.algorithms.reference > docs/algorithms.md`.

`auto` is the default. It sends the whole gradient, or uses `int8` if that makes the steps of training at least 10%
faster; with `nodeWeights: own`, it may also use `onebit`. `dense` always sends the whole gradient. To send fewer bytes,
name an algorithm, such as `hitopk` or `onebit`. [Accuracy](accuracy.md) shows which algorithm fits each link and model,
and the loss of each algorithm.
"""
_ELEMENTS, _SLOTS, _NODES = 25_600_000, 8, (2, 8, 16, 64)


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
    lines += [
        "",
        "## Bytes that a node sends",
        "",
        f"The table shows MB per step, by the declared costs, for {_ELEMENTS / 1e6:.1f} million parameters, {_SLOTS} "
        "ranks per node, density "
        f"{PARAMETERS['density'].default:g}, {PARAMETERS['wire'].default} values, and the smallest period (1, or 2 for "
        "`diloco` and `sparseloco`). With a period of N, an algorithm that reads `period` sends "
        "one N-th of the bytes of period 1. `topkube plan` computes the bytes for your cluster.",
        "",
        "| name | " + " | ".join(f"{nodes} nodes" for nodes in _NODES) + " |",
        "|---|" + "---|" * len(_NODES),
    ]
    lines += [f"| `{algorithm.name}` | " + " | ".join(_list_sent_megabytes(algorithm)) + " |" for algorithm in OWN]
    lines += [
        "",
        "## Parameters",
        "",
        "| field | meaning | allowed | default | read by |",
        "|---|---|---|---|---|",
    ]
    for parameter in PARAMETERS.values():
        readers = [f"`{algorithm.name}`" for algorithm in OWN if parameter in algorithm.parameters]
        default = str(parameter.default).lower() if isinstance(parameter.default, bool) else parameter.default
        cells = [f"`{parameter.field}`", parameter.description, parameter.range, f"`{default}`", ", ".join(readers)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _format_row(algorithm: Algorithm) -> str:
    states = [f"{state.name}, one copy per {_COPIES[state.scope]}: {state.summary}" for state in algorithm.state]
    two_stages = (
        f"; from {algorithm.two_stage_from} nodes on, reduce-scatter and all-gather" if algorithm.two_stage_from else ""
    )
    transport = f" over {algorithm.transport}" if algorithm.needs_gpu else ""
    cells = [f"`{algorithm.name}`", algorithm.family, algorithm.sends, f"{algorithm.route}{transport}{two_stages}"]
    return (
        "| "
        + " | ".join(
            [
                *cells,
                "; ".join(states) or "nothing",
                _name_support_of_gpus(algorithm),
            ]
        )
        + " |"
    )


def _name_support_of_gpus(algorithm: Algorithm) -> str:
    if algorithm.in_weights:
        return "through host memory"
    return "only" if algorithm.needs_gpu else "yes" if algorithm.on_device else "no"


_COPIES = {"shard": "node, cut over its ranks", "rank": "rank"}


def _list_sent_megabytes(algorithm: Algorithm) -> Iterator[str]:
    for nodes in _NODES:
        load = Workload(nodes, _SLOTS, _ELEMENTS, period=algorithm.least_period)
        sent = algorithm.traffic(load).sent / 1e6
        yield f"{sent:,.0f}" if sent >= 10 else f"{sent:.1f}"


if __name__ == "__main__":
    print(build_markdown(), end="")
