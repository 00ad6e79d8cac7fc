"""What may change in a job that exists, and when.

runPolicy's suspend, backoffLimit, deadlines, ttl and cleanPodPolicy take effect at once. Where pods go (spread, queue,
and in the templates labels, annotations, node selector, affinity, tolerations, gates) may change while the job is
suspended, because no pod has been placed: queues such as Kueue rely on it. Everything else would make the run another
one, with a checkpoint that does not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from topkube.job.part import Path
from topkube.job.problems import described, shown
from topkube.job.spec import Spec
from topkube.job.template import without_nulls

# Paths below spec, in YAML's names, that keep their value for the life of the job.
FIXED: tuple[tuple[str, ...], ...] = (
    ("workers",),
    ("slotsPerWorker",),
    ("mpiImplementation",),
    ("launcher", "colocate"),
    ("aggregation",),
    ("dataset",),
    ("checkpoint",),
    ("runPolicy", "managedBy"),
)
# Of runPolicy, what takes effect at once.
FREE = ("suspend", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "cleanPodPolicy")
WHILE_SUSPENDED: tuple[tuple[str, ...], ...] = (("spread",), ("runPolicy", "schedulingPolicy"))
TEMPLATES: tuple[tuple[str, ...], ...] = (("template",), ("launcher", "template"))
# What of a pod template says where its pods go, and nothing about what they do.
PLACEMENT: tuple[tuple[str, ...], ...] = (
    ("metadata", "labels"),
    ("metadata", "annotations"),
    ("spec", "nodeSelector"),
    ("spec", "affinity"),
    ("spec", "tolerations"),
    ("spec", "schedulingGates"),
)


def change_problems(old: Spec, new: Spec) -> list[str]:
    """Everything in `new` that may not follow `old`, one line per field, with what to do."""
    before, after = (without_nulls(spec.model_dump(by_alias=True)) for spec in (old, new))
    free = old.run_policy.suspend or new.run_policy.suspend
    found: list[str] = []
    for path in FIXED:
        if _at(before, path) != _at(after, path):
            found += _fixed(path, _at(before, path), _at(after, path))
    for path in WHILE_SUSPENDED:
        if not free and _at(before, path) != _at(after, path):
            found.append(_only_suspended(path))
    for path in TEMPLATES:
        one, other = _at(before, path) or {}, _at(after, path) or {}
        if _without_placement(one) != _without_placement(other):
            where = _difference(_without_placement(one), _without_placement(other))
            found += [_again((*path, *below)) for below in where]
        elif one != other and not free:
            found += [_only_suspended((*path, *below)) for below in PLACEMENT if _at(one, below) != _at(other, below)]
    return found


def in_force(accepted: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The spec that a job follows whose change from `accepted` to `wanted` is refused, all as plain data: only what
    takes effect at once has changed."""
    kept = {key: value for key, value in (accepted.get("runPolicy") or {}).items() if key not in FREE}
    changed = {key: value for key, value in (wanted.get("runPolicy") or {}).items() if key in FREE}
    rest = {key: value for key, value in accepted.items() if key != "runPolicy"}
    return {**rest, "runPolicy": kept | changed} if kept or changed else rest


def _fixed(path: Path, before: Any, after: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        return [_again((*path, *below)) for below in _difference(before, after)]
    scalars = not isinstance(before, dict) and not isinstance(after, dict)
    return [_again(path, f" from {shown(before)} to {shown(after)}" if scalars else "")]


def _again(path: Path, values: str = "") -> str:
    return described(("spec", *path), f"cannot be changed{values}: delete the job and create it again", {})


def _only_suspended(path: Path) -> str:
    text = "can be changed only while the job is suspended: set spec.runPolicy.suspend to true first"
    return described(("spec", *path), text, {})


def _at(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _without_placement(template: Any) -> Any:
    rest = copy.deepcopy(template)
    for *above, name in PLACEMENT:
        part = _at(rest, tuple(above))
        if isinstance(part, dict):
            part.pop(name, None)
    if isinstance(rest, dict) and not rest.get("metadata"):
        rest.pop("metadata", None)
    return rest


def _difference(one: Any, other: Any) -> Iterator[Path]:
    """The innermost paths at which two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if one.get(key) != other.get(key):
                for below in _difference(one.get(key), other.get(key)):
                    yield (key, *below)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (before, after) in enumerate(zip(one, other, strict=True)):
            if before != after:
                for below in _difference(before, after):
                    yield (index, *below)
    else:
        yield ()
