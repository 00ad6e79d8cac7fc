"""docs/trainingjob.md, from the types: `python -m topkube.job.reference > docs/trainingjob.md`."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from topkube.job.base.part import Part
from topkube.job.base.problems import describe_allowed, find_part, strip_annotation
from topkube.job.metadata import Metadata
from topkube.job.training_job import TrainingJob

_BY_KUBERNETES = "set by Kubernetes"
_HEAD = """# TrainingJob

This page lists every field of a TrainingJob, `topkube.dev/v1alpha1`. The same file runs on your machine
(`topkube run job.yaml`) and on a cluster (`kubectl apply -f job.yaml`). The smallest job:

```yaml
apiVersion: topkube.dev/v1alpha1
kind: TrainingJob
metadata:
  name: my-training
spec:
  workers: 2
  slotsPerWorker: 2
  template:
    spec:
      containers:
      - name: worker
        image: topkube/runtime:0.1.0
        command: [python, train.py]
```

If a file has mistakes, the error lists all of them: the path, the line, what is allowed, and the nearest valid
name. Unknown fields are mistakes, except in pod templates. `null` means the default, as everywhere in
Kubernetes.

A local run differs: `image`, `source`, `setup`, `resources`, `spread`, `launcher`, `suspend`, retries and the cache's
`medium` have no effect (the cache's limits and `prefetch` have); `python` is the Python that runs `topkube`; ranks
run in your working directory; checkpoints go to the run directory.

This page is generated from `topkube.job`: `python -m topkube.job.reference > docs/trainingjob.md`.
"""


def build_markdown() -> str:
    """Return the whole page."""
    lines = [_HEAD]
    for path, part in _list_parts(TrainingJob, ""):
        heading = path or "The object"
        lines += [f"## {heading}", "", _join_summary(part), ""]
        lines += ["| field | allowed | default | meaning |", "|---|---|---|---|"]
        lines += [_format_row(field) for field in part.model_fields.values() if field.description != _BY_KUBERNETES]
        lines.append("")
        if part is Metadata:
            lines += ["Fields that Kubernetes itself sets (uid, generation and so on) are accepted and kept.", ""]
    return "\n".join(lines)


def _join_summary(part: type[Part]) -> str:
    return " ".join((part.__doc__ or "").split())


def _list_parts(part: type[Part], path: str) -> Iterator[tuple[str, type[Part]]]:
    yield path, part
    for field in part.model_fields.values():
        below = find_part(field)
        if below is not None:
            is_list = typing.get_origin(strip_annotation(field.annotation)) is list
            yield from _list_parts(below, f"{path}.{field.alias}".lstrip(".") + ("[]" if is_list else ""))


def _format_row(field: FieldInfo) -> str:
    is_mapping = (
        typing.get_origin(strip_annotation(field.annotation)) is dict
    )  # `describe_allowed` describes a value of a mapping
    allowed = "a mapping" if is_mapping else describe_allowed(field)
    cells = [f"`{field.alias}`", allowed, _format_default(field), field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _format_default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, Part) or value in ({}, []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(build_markdown(), end="")
