"""The table of the chart's values, from values.yaml: the comment above a value explains it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_HEAD = """# Chart values

```
helm install topkube charts/topkube -n topkube-system --create-namespace
helm upgrade topkube charts/topkube -n topkube-system --set replicas=3
```

Wrong values are refused with their path, by `values.schema.json`. This page is generated: `python -m monitoring`
writes it.

| value | default | meaning |
|---|---|---|
"""


@dataclass(frozen=True)
class Value:
    """A value: its path with dots, its default as YAML, its meaning."""

    path: str
    default: str
    meaning: str


def list_values(text: str) -> Iterator[Value]:
    """Yield all values of a values.yaml that have a comment, in the order of the file."""
    data = yaml.safe_load(text)
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
            continue
        if not stripped:
            comment = []
            continue
        depth = len(line) - len(line.lstrip())
        parents = [(parent_depth, name) for parent_depth, name in parents if parent_depth < depth]
        parents.append((depth, stripped.partition(":")[0]))
        if comment:
            path = [name for _, name in parents]
            yield Value(".".join(path), _format_default(data, path), " ".join(comment))
        comment = []


def _format_default(data: Any, path: list[str]) -> str:
    for name in path:
        data = data[name]
    if data in ("", None):
        return ""
    return yaml.safe_dump(data, default_flow_style=True, width=1000).strip().removesuffix("...").strip()


def build_markdown(path: Path) -> str:
    """Return docs/chart-values.md."""
    rows = [
        f"| `{value.path}` | {f'`{value.default}`' if value.default else ''} | {value.meaning} |\n"
        for value in list_values(path.read_text(encoding="utf-8"))
    ]
    return _HEAD + "".join(rows)
