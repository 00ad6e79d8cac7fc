"""Pod templates are kept as they are written, so they may hold anything: reading them without being surprised. Pure."""

from __future__ import annotations

from typing import Any

from topkube.errors import JobError


def list_in(parent: dict[str, Any], field: str, where: str) -> list[Any]:
    """The list called `field`, made where there is none. Raises JobError where it is something else."""
    found = parent.setdefault(field, [])
    if not isinstance(found, list):
        raise not_a(f"{where}.{field}", "list")
    return found


def mapping_in(parent: dict[str, Any], field: str, where: str) -> dict[str, Any]:
    """The mapping called `field`, made where there is none. Raises JobError where it is something else."""
    found = parent.setdefault(field, {})
    if not isinstance(found, dict):
        raise not_a(f"{where}.{field}", "mapping")
    return found


def not_a(where: str, kind: str) -> JobError:
    problem = f"{where}: is not a {kind}"
    return JobError("the pods of this job cannot be made", [problem], next_step="correct the pod template")
