"""The pod template: preserved as written, except that what we rely on must be there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from topkube.job.part import KEEP, QUANTITY, Path, rules
from topkube.job.quantity import in_bytes

GPU = "nvidia.com/gpu"
MOST_CONTAINERS = 100
CONTAINER_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"

# In CEL: `c` is not the container that trains.
_OTHER = "(self.size() > 1 && (!has(c.name) || c.name != 'worker'))"
# The part of a pod template that we rely on, as a JSON schema; everything else in it is kept unread. The fields of
# containers are there for the rules to see.
WORKER_TEMPLATE: dict[str, Any] = {
    "type": "object",
    KEEP: True,
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            KEEP: True,
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MOST_CONTAINERS,
                    "items": {
                        "type": "object",
                        KEEP: True,
                        "properties": {
                            "name": {"type": "string", "maxLength": 63, "pattern": f"^{CONTAINER_NAME}$"},
                            "image": {"type": "string"},
                            "command": {"type": "array", "items": {"type": "string"}},
                        },
                    },
                    **rules(
                        (
                            "self.size() == 1 || self.exists(c, has(c.name) && c.name == 'worker')",
                            "no container is called 'worker': name the one that trains 'worker'",
                        ),
                        (
                            f"self.all(c, {_OTHER} || (has(c.image) && c.image != ''))",
                            "the worker's image is required: the image that holds the training script and topkube",
                        ),
                        (
                            f"self.all(c, {_OTHER} || (has(c.command) && c.command.size() > 0))",
                            "the worker's command is required: what each rank runs, such as [python, train.py]",
                        ),
                    ),
                }
            },
        }
    },
}


def without_nulls(value: Any) -> Any:
    """A copy in which null means absent, as in Kubernetes."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def worker_container(template: Mapping[str, Any]) -> Any:
    """The container called `worker`, or the only one; None where neither exists."""
    containers = _containers(template)
    if len(containers) == 1:
        return containers[0]
    return next((one for one in containers if isinstance(one, dict) and one.get("name") == "worker"), None)


def memory_limit(template: Mapping[str, Any]) -> int | None:
    """Bytes of the worker's memory limit; None where it has none, or one that is no quantity."""
    found: Any = worker_container(template)
    for key in ("resources", "limits", "memory"):
        found = found.get(key) if isinstance(found, dict) else None
    text = str(found) if isinstance(found, str | int) and not isinstance(found, bool) else ""
    return in_bytes(text) if re.fullmatch(QUANTITY, text) else None


def _containers(template: Mapping[str, Any]) -> list[Any]:
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return containers if isinstance(containers, list) else []


def template_problems(template: Mapping[str, Any], slots: int | None) -> list[tuple[Path, str]]:
    """Everything that would keep the workers' pods from starting, as (path inside the template, text).

    `slots` is spec.slotsPerWorker, None where that is itself wrong.
    """
    found = mapping_problems(template)
    containers = _containers(template)
    here: Path = ("spec", "containers")
    if not containers:
        return [*found, (here, "is required: a list with one container called 'worker' (image and command)")]
    if len(containers) > MOST_CONTAINERS:
        found.append((here, f"{len(containers)} containers are more than {MOST_CONTAINERS}"))
    for index, container in enumerate(containers):
        if isinstance(container, dict):
            found += [((*here, index, *path), text) for path, text in _container_problems(container)]
        else:
            found.append(((*here, index), "is not a mapping; allowed: a container (name, image, command, …)"))
    names = [one.get("name") for one in containers if isinstance(one, dict)]
    for index, name in enumerate(names):
        if name is not None and name in names[:index]:
            found.append(((*here, index, "name"), f"{name!r} is the name of another container too: give each its own"))
    worker = worker_container(template)
    if worker is None:
        known = ", ".join(str(name or "(no name)") for name in names)
        found.append((here, f"none of {known} is called 'worker': name the one that trains 'worker'"))
    elif isinstance(worker, dict):
        place: Path = (*here, containers.index(worker))
        found += [((*place, *path), text) for path, text in _worker_problems(worker, slots)]
    return found


def mapping_problems(template: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """What keeps a template from being read at all: metadata, labels, annotations and spec are mappings."""
    found: list[tuple[Path, str]] = []
    for path in (("metadata",), ("metadata", "labels"), ("metadata", "annotations"), ("spec",)):
        value: Any = template
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            found.append((path, "is not a mapping"))
        elif len(path) == 2:
            found += [
                ((*path, key), f'{text!r} is not text: quote it, "{text}"')
                for key, text in (value or {}).items()
                if not isinstance(text, str)
            ]
    return found


def _container_problems(container: dict[str, Any]) -> list[tuple[Path, str]]:
    """What is wrong in any container, a sidecar's too."""
    found: list[tuple[Path, str]] = []
    name = container.get("name")
    if name is not None and not (isinstance(name, str) and len(name) <= 63 and re.fullmatch(CONTAINER_NAME, name)):
        found.append((("name",), f"{name!r} is not lower-case letters, digits and '-', at most 63 characters"))
    image = container.get("image")
    if image is not None and not isinstance(image, str):
        found.append((("image",), f"{image!r} is not text: quote it"))
    for field in ("command", "args"):
        found += _words_problems(field, container.get(field))
    return found + _environment_problems(container.get("env"))


def _worker_problems(worker: dict[str, Any], slots: int | None) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    if worker.get("image") in (None, ""):
        found.append((("image",), "is required: the image that holds the training script and topkube"))
    if worker.get("command") in (None, []):
        found.append((("command",), "is required: what each rank runs, such as [python, train.py]"))
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
