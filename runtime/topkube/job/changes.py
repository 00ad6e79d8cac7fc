"""The changes that are allowed in an existing job, and when.

Changes of runPolicy's suspend, backoffLimit, failurePolicy, deadlines, ttl and cleanPodPolicy take effect at once. The
placement of pods (spread, queue, and in the templates labels, annotations, node selector, affinity, tolerations, gates)
may change while the job is suspended, because no pod has been placed: queues such as Kueue rely on it. Any other change
would make a different run, whose checkpoint does not fit.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from topkube.job.base.part import Path
from topkube.job.base.problems import describe_problem, show_value
from topkube.job.spec import Spec
from topkube.job.template import remove_nulls

FIXED: tuple[tuple[str, ...], ...] = (
    ("workers",),
    ("slotsPerWorker",),
    ("mpiImplementation",),
    ("launcher", "colocate"),
    ("launcher", "resources"),
    ("source",),
    ("setup",),
    ("aggregation",),
    ("dataset",),
    ("checkpoint",),
    ("topology",),
    ("runPolicy", "managedBy"),
)
"""Paths below spec, with YAML's names, that cannot change during the life of the job."""
FREE = (
    "suspend",
    "backoffLimit",
    "failurePolicy",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "cleanPodPolicy",
)
"""The fields of runPolicy whose changes take effect at once."""
WHILE_SUSPENDED: tuple[tuple[str, ...], ...] = (("spread",), ("runPolicy", "schedulingPolicy"))
"""Paths below spec that can change only while the job is suspended."""
TEMPLATES: tuple[tuple[str, ...], ...] = (("template",), ("launcher", "template"))
"""Paths of the pod templates below spec."""
PLACEMENT: tuple[tuple[str, ...], ...] = (
    ("metadata", "labels"),
    ("metadata", "annotations"),
    ("spec", "nodeSelector"),
    ("spec", "affinity"),
    ("spec", "tolerations"),
    ("spec", "schedulingGates"),
)
"""The fields of a pod template that place its pods and do not change what they run."""


_DIGEST, _REST_DIGEST = "topkube.dev/sha256", "topkube.dev/sha256-without-placement"
"""Digests of a template in an outline."""


def find_refused_changes(old: Spec, new: Spec) -> list[str]:
    """Return the changes from `old` to `new` that are not allowed, one line per field, with the next step."""
    before, after = (remove_nulls(spec.model_dump(by_alias=True)) for spec in (old, new))
    is_suspended = old.run_policy.suspend or new.run_policy.suspend
    refused: list[str] = []
    for path in FIXED:
        if _read_path(before, path) != _read_path(after, path):
            refused += _describe_refused_change(path, _read_path(before, path), _read_path(after, path))
    for path in WHILE_SUSPENDED:
        if not is_suspended and _read_path(before, path) != _read_path(after, path):
            refused.append(_describe_placement_field(path))
    for path in TEMPLATES:
        earlier, later = _read_path(before, path) or {}, _read_path(after, path) or {}
        if _remove_placement(earlier) != _remove_placement(later):
            differences = _find_differences(_remove_placement(earlier), _remove_placement(later))
            refused += [_describe_fixed_field((*path, *below)) for below in differences]
        elif earlier != later and not is_suspended:
            moved = [below for below in PLACEMENT if _read_path(earlier, below) != _read_path(later, below)]
            refused += [_describe_placement_field((*path, *below)) for below in moved]
    return refused


def build_outline(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec (plain data) with digests in place of its pod templates: enough to detect changes."""
    fields = copy.copy(dict(spec))
    for *above, name in TEMPLATES:
        part = fields
        for key in above:
            part[key] = copy.copy(part.get(key))
            part = part[key]
            if not isinstance(part, dict):
                break
        else:
            if isinstance(template := part.get(name), dict):
                part[name] = {
                    _DIGEST: _compute_digest(template),
                    _REST_DIGEST: _compute_digest(_remove_placement(template)),
                }
    return fields


def restore_spec(accepted: Mapping[str, Any], requested: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the accepted spec with whole templates, and the refused changes of templates, one line each.

    `accepted` may be an outline, with digests of templates. A template is taken from `requested` if it has not changed,
    or if only its placement has changed and the job is suspended. Any other change of a template is refused.
    """
    spec, problems = copy.deepcopy(dict(accepted)), list[str]()
    is_suspended = any(_read_path(value, ("runPolicy", "suspend")) is True for value in (accepted, requested))
    for path in TEMPLATES:
        accepted_template, template = _read_path(accepted, path), _read_path(requested, path)
        if not isinstance(accepted_template, dict) or _DIGEST not in accepted_template:
            continue
        *above, name = path
        _read_path(spec, tuple(above))[name] = template
        if accepted_template[_DIGEST] == _compute_digest(template):
            continue
        if not isinstance(template, dict) or accepted_template.get(_REST_DIGEST) != _compute_digest(
            _remove_placement(template)
        ):
            problems.append(_describe_fixed_field(path))
        elif not is_suspended:
            text = "where pods go can be changed only while the job is suspended: set spec.runPolicy.suspend first"
            problems.append(describe_problem(("spec", *path), text, {}))
    return spec, problems


def _compute_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def merge_allowed_changes(accepted: Mapping[str, Any], requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec that a job follows if its change from `accepted` to `requested` is refused, all as plain data:
    the accepted spec with the changes that take effect at once."""
    policy = {key: value for key, value in (accepted.get("runPolicy") or {}).items() if key not in FREE}
    changed = {key: value for key, value in (requested.get("runPolicy") or {}).items() if key in FREE}
    other_fields = {key: value for key, value in accepted.items() if key != "runPolicy"}
    return {**other_fields, "runPolicy": policy | changed} if policy or changed else other_fields


def _describe_refused_change(path: Path, before: Any, after: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        return [_describe_fixed_field((*path, *below)) for below in _find_differences(before, after)]
    scalars = not isinstance(before, dict) and not isinstance(after, dict)
    return [_describe_fixed_field(path, f" from {show_value(before)} to {show_value(after)}" if scalars else "")]


def _describe_fixed_field(path: Path, values: str = "") -> str:
    return describe_problem(("spec", *path), f"cannot be changed{values}: delete the job and create it again", {})


def _describe_placement_field(path: Path) -> str:
    text = "can be changed only while the job is suspended: set spec.runPolicy.suspend to true first"
    return describe_problem(("spec", *path), text, {})


def _read_path(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _remove_placement(template: Any) -> Any:
    stripped = copy.deepcopy(template)
    for *above, name in PLACEMENT:
        part = _read_path(stripped, tuple(above))
        if isinstance(part, dict):
            part.pop(name, None)
    if isinstance(stripped, dict) and not stripped.get("metadata"):
        stripped.pop("metadata", None)
    return stripped


def _find_differences(old: Any, new: Any) -> Iterator[Path]:
    """Yield the innermost paths at which two values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if old.get(key) != new.get(key):
                for below in _find_differences(old.get(key), new.get(key)):
                    yield (key, *below)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            if old_item != new_item:
                for below in _find_differences(old_item, new_item):
                    yield (index, *below)
    else:
        yield ()
