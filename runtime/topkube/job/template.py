"""The pod template: preserved as written, except that what we rely on must be there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkube.job.part import Path

GPU = "nvidia.com/gpu"


def worker_container(template: Mapping[str, Any]) -> Any:
    """The container called `worker`, or the only one; None where neither exists."""
    containers = _containers(template)
    if len(containers) == 1:
        return containers[0]
    return next((one for one in containers if isinstance(one, dict) and one.get("name") == "worker"), None)


def _containers(template: Mapping[str, Any]) -> list[Any]:
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return containers if isinstance(containers, list) else []


def template_problems(template: Mapping[str, Any], slots: int | None) -> list[tuple[Path, str]]:
    """Everything that would keep the workers' pods from starting, as (path inside the template, text).

    `slots` is spec.slotsPerWorker, None where that is itself wrong.
    """
    containers = _containers(template)
    if not containers:
        return [(("spec", "containers"), "is required: a list with one container called 'worker' (image and command)")]
    found: list[tuple[Path, str]] = []
    for index, container in enumerate(containers):
        if not isinstance(container, dict):
            found.append(
                (("spec", "containers", index), "is not a mapping; allowed: a container (name, image, command, …)")
            )
    worker = worker_container(template)
    if worker is None:
        names = ", ".join(str(one.get("name", "(no name)")) for one in containers if isinstance(one, dict))
        found.append((("spec", "containers"), f"none of {names} is called 'worker': name the one that trains 'worker'"))
    elif isinstance(worker, dict):
        place: Path = ("spec", "containers", containers.index(worker))
        found += [((*place, *path), text) for path, text in _worker_problems(worker, slots)]
    return found


def _worker_problems(worker: dict[str, Any], slots: int | None) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    if not _is_text(worker.get("image")):
        found.append((("image",), "is required: the image that holds the training script and topkube"))
    if not worker.get("command"):
        found.append((("command",), "is required: what each rank runs, such as [python, train.py]"))
    for field in ("command", "args"):
        found += _words_problems(field, worker.get(field))
    found += _environment_problems(worker.get("env"))
    resources = worker.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    if isinstance(limits, dict) and GPU in limits and slots is not None and str(limits[GPU]) != str(slots):
        text = f"{limits[GPU]} GPUs for {slots} ranks: each rank has one GPU, so give as many as spec.slotsPerWorker"
        found.append((("resources", "limits", GPU), text))
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _words_problems(field: str, words: Any) -> list[tuple[Path, str]]:
    if words is None:
        return []
    if not isinstance(words, list):
        return [((field,), f"is not a list; allowed: a list of texts, such as [{words!r}]")]
    return [
        ((field, index), f'{word!r} is not text: quote it, "{word}"')
        for index, word in enumerate(words)
        if not isinstance(word, str)
    ]


def _environment_problems(entries: Any) -> list[tuple[Path, str]]:
    if entries is None:
        return []
    if not isinstance(entries, list):
        return [(("env",), "is not a list; allowed: a list of {name, value}")]
    found: list[tuple[Path, str]] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not _is_text(entry.get("name")):
            found.append((("env", index), "is not a mapping with a name; allowed: {name, value}"))
        elif entry.get("value") is not None and not isinstance(entry["value"], str):
            value = entry["value"]
            found.append((("env", index, "value"), f'{value!r} is not text: quote it, "{value}"'))
        elif "=" in entry["name"] or "\0" in entry["name"] + (entry.get("value") or ""):
            found.append((("env", index), "holds '=' in its name or a zero byte; neither fits in an environment"))
    return found
