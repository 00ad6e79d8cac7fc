"""Read pod templates, which are stored as users wrote them and may contain values of any type. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from topkube.errors import JobError


def ensure_list(parent: dict[str, Any], field: str, path: str) -> list[Any]:
    """Return the list `field` of `parent`; add an empty list if there is none. Raises JobError for another type."""
    value = parent.setdefault(field, [])
    if not isinstance(value, list):
        raise _build_type_error(f"{path}.{field}", "list")
    return value


def ensure_mapping(parent: dict[str, Any], field: str, path: str) -> dict[str, Any]:
    """Return the mapping `field` of `parent`; add an empty mapping if there is none. Raises JobError for another
    type."""
    value = parent.setdefault(field, {})
    if not isinstance(value, dict):
        raise _build_type_error(f"{path}.{field}", "mapping")
    return value


def select_domains(entries: Mapping[str, Any], domains: Collection[str]) -> dict[str, Any]:
    """Return the labels or annotations whose keys begin with one of `domains`, or with a subdomain of it."""

    def is_selected(key: str) -> bool:
        domain = key.partition("/")[0]
        return any(domain == known or domain.endswith("." + known) for known in domains)

    return {key: value for key, value in entries.items() if is_selected(key)}


def escape_variables(text: str) -> str:
    """Return the text of a variable's value in which Kubernetes replaces no $(NAME)."""
    return text.replace("$", "$$")


def _build_type_error(path: str, kind: str) -> JobError:
    problem = f"{path}: is not a {kind}"
    return JobError("the pods of this job cannot be made", [problem], next_step="correct the pod template")
