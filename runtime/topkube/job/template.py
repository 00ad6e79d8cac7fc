"""The pod template: kept as written; only the fields that TopKube relies on are checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from topkube.job.base.part import KEEP, QUANTITY, Path, declare_rules
from topkube.job.base.quantity import parse_bytes

GPU = "nvidia.com/gpu"
MOST_CONTAINERS = 100
CONTAINER_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"

# In CEL: `c` is not the container that trains.
_OTHER = "(self.size() > 1 && (!has(c.name) || c.name != 'worker'))"
# The JSON schema of the fields that TopKube relies on; all other fields of a pod template are kept unread. The fields
# of containers are listed so that the rules can read them.
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
                    **declare_rules(
                        (
                            "self.size() == 1 || self.exists(c, has(c.name) && c.name == 'worker')",
                            "no container is called 'worker': give this name to the container that trains",
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


def remove_nulls(value: Any) -> Any:
    """Return a copy without nulls: null means absent, as in Kubernetes."""
    if isinstance(value, dict):
        return {key: remove_nulls(below) for key, below in value.items() if below is not None}
    return [remove_nulls(below) for below in value] if isinstance(value, list) else value


def restore_nulls(value: Any, source: Any) -> Any:
    """Return a copy of `value` with the nulls of `source` at the places that `value` has no entry for. A null in a
    security context means that the cluster chooses the value; a stored status cannot hold nulls."""
    if isinstance(value, dict) and isinstance(source, Mapping):
        nulls = {key: None for key, below in source.items() if below is None and key not in value}
        return {key: restore_nulls(below, source.get(key)) for key, below in value.items()} | nulls
    if isinstance(value, list) and isinstance(source, list) and len(value) == len(source):
        return [restore_nulls(below, other) for below, other in zip(value, source, strict=True)]
    return value


def find_worker_container(template: Mapping[str, Any]) -> Any:
    """Return the container called `worker`, or the only container; None if neither exists."""
    containers = _list_containers(template)
    if len(containers) == 1:
        return containers[0]
    named = (container for container in containers if isinstance(container, dict) and container.get("name") == "worker")
    return next(named, None)


def find_memory_limit(template: Mapping[str, Any]) -> int | None:
    """Return the worker's memory limit in bytes; None if it has none, or if the limit is not a quantity."""
    value: Any = find_worker_container(template)
    for key in ("resources", "limits", "memory"):
        value = value.get(key) if isinstance(value, dict) else None
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    return parse_bytes(text) if re.fullmatch(QUANTITY, text) else None


def _list_containers(template: Mapping[str, Any]) -> list[Any]:
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return containers if isinstance(containers, list) else []


def find_template_problems(template: Mapping[str, Any], slots: int | None) -> list[tuple[Path, str]]:
    """Return everything that would keep the workers' pods from starting, as (path inside the template, text).

    `slots` is spec.slotsPerWorker, or None if that is itself invalid.
    """
    mistakes = find_mapping_problems(template)
    containers = _list_containers(template)
    containers_path: Path = ("spec", "containers")
    if not containers:
        return [
            *mistakes,
            (containers_path, "is required: a list with one container called 'worker' (image and command)"),
        ]
    if len(containers) > MOST_CONTAINERS:
        return [*mistakes, (containers_path, f"{len(containers)} containers are more than {MOST_CONTAINERS}")]
    for index, container in enumerate(containers):
        if isinstance(container, dict):
            mistakes += [((*containers_path, index, *path), text) for path, text in _find_container_problems(container)]
        else:
            mistakes.append(
                ((*containers_path, index), "is not a mapping; allowed: a container (name, image, command, …)")
            )
    names = [item.get("name") for item in containers if isinstance(item, dict)]
    for index, name in enumerate(names):
        if name is not None and name in names[:index]:
            mistakes.append(
                (
                    (*containers_path, index, "name"),
                    f"{name!r} is also the name of another container: give each container its own name",
                )
            )
    worker = find_worker_container(template)
    if worker is None:
        listed_names = ", ".join(str(name or "(no name)") for name in names)
        mistakes.append(
            (containers_path, f"none of {listed_names} is called 'worker': give this name to the container that trains")
        )
    elif isinstance(worker, dict):
        place: Path = (*containers_path, containers.index(worker))
        mistakes += [((*place, *path), text) for path, text in _find_worker_problems(worker, slots)]
    return mistakes


def find_mapping_problems(template: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Return the reasons why a template cannot be read: metadata, labels, annotations and spec must be mappings, and
    spec.initContainers a list of mappings."""
    mistakes: list[tuple[Path, str]] = []
    for path in (("metadata",), ("metadata", "labels"), ("metadata", "annotations"), ("spec",)):
        value: Any = template
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            mistakes.append((path, "is not a mapping"))
        elif len(path) == 2:
            mistakes += [
                ((*path, key), f'{text!r} is not text: quote it, "{text}"')
                for key, text in (value or {}).items()
                if not isinstance(text, str)
            ]
    return mistakes + _find_init_container_problems(template.get("spec"))


def _find_init_container_problems(spec: Any) -> list[tuple[Path, str]]:
    containers = spec.get("initContainers") if isinstance(spec, dict) else None
    path: Path = ("spec", "initContainers")
    if containers is None:
        return []
    if not isinstance(containers, list):
        return [(path, "is not a list; allowed: a list of containers (name, image, command, …)")]
    return [
        ((*path, index), "is not a mapping; allowed: a container (name, image, command, …)")
        for index, container in enumerate(containers)
        if not isinstance(container, dict)
    ]


def _find_container_problems(container: dict[str, Any]) -> list[tuple[Path, str]]:
    """Return the mistakes in a container, of a worker or a sidecar."""
    mistakes: list[tuple[Path, str]] = []
    name = container.get("name")
    if name is not None and not (isinstance(name, str) and len(name) <= 63 and re.fullmatch(CONTAINER_NAME, name)):
        mistakes.append((("name",), f"{name!r} is not lower-case letters, digits and '-', at most 63 characters"))
    image = container.get("image")
    if image is not None and not isinstance(image, str):
        mistakes.append((("image",), f"{image!r} is not text: quote it"))
    for field in ("command", "args"):
        mistakes += _find_words_problems(field, container.get(field))
    return mistakes + _find_environment_problems(container.get("env"))


def _find_worker_problems(worker: dict[str, Any], slots: int | None) -> list[tuple[Path, str]]:
    mistakes: list[tuple[Path, str]] = []
    if worker.get("image") in (None, ""):
        mistakes.append((("image",), "is required: the image that holds the training script and topkube"))
    if worker.get("command") in (None, []):
        mistakes.append((("command",), "is required: what each rank runs, such as [python, train.py]"))
    resources = worker.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    if isinstance(limits, dict) and GPU in limits and slots is not None and str(limits[GPU]) != str(slots):
        text = (
            f"{limits[GPU]} GPUs for {slots} ranks: each rank uses one GPU, so request as many as spec.slotsPerWorker"
        )
        mistakes.append((("resources", "limits", GPU), text))
    return mistakes


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _find_words_problems(field: str, words: Any) -> list[tuple[Path, str]]:
    if words is None:
        return []
    if not isinstance(words, list):
        return [((field,), f"is not a list; allowed: a list of texts, such as [{words!r}]")]
    return [
        ((field, index), f'{word!r} is not text: quote it, "{word}"')
        for index, word in enumerate(words)
        if not isinstance(word, str)
    ]


def _find_environment_problems(entries: Any) -> list[tuple[Path, str]]:
    if entries is None:
        return []
    if not isinstance(entries, list):
        return [(("env",), "is not a list; allowed: a list of {name, value}")]
    mistakes: list[tuple[Path, str]] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not _is_text(entry.get("name")):
            mistakes.append((("env", index), "is not a mapping with a name; allowed: {name, value}"))
        elif entry.get("value") is not None and not isinstance(entry["value"], str):
            value = entry["value"]
            mistakes.append((("env", index, "value"), f'{value!r} is not text: quote it, "{value}"'))
        elif "=" in entry["name"] or "\0" in entry["name"] + (entry.get("value") or ""):
            mistakes.append(
                (("env", index), "contains '=' in its name, or a zero byte: environment variables cannot hold these")
            )
    return mistakes
