"""Read pod templates, which are stored as users wrote them and may contain values of any type. Pure."""

from __future__ import annotations

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


def escape_variables(text: str) -> str:
    """Return the text of a variable's value in which Kubernetes replaces no $(NAME)."""
    return text.replace("$", "$$")


def _build_type_error(path: str, kind: str) -> JobError:
    problem = f"{path}: is not a {kind}"
    return JobError("the pods of this job cannot be made", [problem], next_step="correct the pod template")
