"""Read a YAML document into plain data, with the line of every value and all mistakes.

The document is read as kubectl reads it: duplicate keys are mistakes, dates stay text, 1e-2 is a number. Aliases cannot
expand without limit or contain themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from topkube.errors import JobError
from topkube.job.base.part import Path
from topkube.job.base.problems import DEEPEST, describe_problem

MOST_VALUES = 100_000
"""The largest number of values in a job. A job of 1.5 MiB, the limit of etcd, has a few thousand."""


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


_PREFIX = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")
for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(_PREFIX + "float", _EXPONENT, list("-+0123456789"))
_SHOWN_LEVELS = 2
"""The levels of a path that a message about deep nesting shows."""


@dataclass
class Document:
    """Plain data, the line (from 1) of each value by path, and the violations of YAML's rules, one line each."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)


def check_extent(data: Any, name: str, path: Path = ()) -> None:
    """Check the size of plain data, which are at `path` of the job; messages use `name` for the job.

    Raises JobError if the data hold more than MOST_VALUES values, which take seconds to check, or more than DEEPEST
    levels, because functions that call themselves for each level would fail."""
    waiting, count = [(data, path, 0)], 0
    while waiting:
        value, place, level = waiting.pop()
        if isinstance(value, Mapping):
            count += len(value)
            below: Iterable[tuple[Any, Any]] = value.items()
        elif isinstance(value, list):
            count += len(value)
            below = enumerate(value)
        else:
            continue
        if level > DEEPEST:
            text = f"is nested too deeply: use fewer than {DEEPEST} levels"
            raise JobError(f"{name} has a mistake", [describe_problem(place, text, {})])
        if count > MOST_VALUES:
            raise JobError(
                f"{name} holds more than {MOST_VALUES:,} values",
                cause="it contains data that belongs into a file or a ConfigMap",
                next_step="mount the data, and name its path in the job",
            )
        waiting += [
            (value, (*place, key) if len(place) < _SHOWN_LEVELS else place, level + 1)
            for key, value in below
            if isinstance(value, Mapping | list)
        ]


def read_document(text: str | bytes, name: str) -> Document:
    """Return the only document of `text`; messages use `name` for it.

    Raises JobError if it is not YAML, is empty, or holds more than one document.
    """
    try:
        loader = _Loader(text)
        try:
            nodes: list[yaml.Node] = []
            while loader.check_node():
                node = loader.get_node()
                assert node is not None
                nodes.append(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise JobError(
            f"{name} is not YAML: {place}{error.problem or error.context}",
            cause="an indentation, a quote or a colon is wrong",
            next_step="correct that line; indent with spaces, not tabs",
        ) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise JobError(
            f"{name} is not readable as YAML: {' '.join(str(error).split())}",
            cause="it is not a text file in UTF-8",
            next_step="save it as plain UTF-8 text",
        ) from None
    except RecursionError:
        raise JobError(f"{name} is nested too deeply", next_step=f"use fewer than {DEEPEST} levels") from None
    nodes = [node for node in nodes if node.tag != _PREFIX + "null"]
    if not nodes:
        raise JobError(f"{name} is empty", next_step="start from an example: manifests/samples/char-gpt.yaml")
    if len(nodes) > 1:
        raise JobError(
            f"{name} holds {len(nodes)} documents; the second starts at line {nodes[1].start_mark.line + 1}",
            cause="documents separated by ---",
            next_step="keep one TrainingJob per file",
        )
    builder = _Builder(loader)
    data = builder.read_value(nodes[0], ())
    return Document(data, builder.lines, builder.mistakes)


def format_yaml(data: Any) -> str:
    """Return plain data as YAML that `read_document` returns unchanged: the text '1e3' is quoted, which PyYAML
    alone would not do."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Builder:
    """Converts nodes to data."""

    def __init__(self, loader: _Loader) -> None:
        self.loader, self.lines, self.mistakes = loader, dict[Path, int](), list[str]()
        self._values = 0

    def read_value(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._values += 1
        if self._values > MOST_VALUES:
            raise JobError(
                f"the YAML stands for more than {MOST_VALUES} values",
                cause="aliases (*name) repeat each other",
                next_step="write the values out",
            )
        if len(path) > DEEPEST:
            raise JobError(
                f"the YAML is more than {DEEPEST} levels deep",
                cause="an alias (*name) is inside its own anchor (&name)",
                next_step="use fewer levels",
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            return [self.read_value(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, path)
        return self._add_mistake(path, f"the tag {_shorten(node.tag)} is not allowed: remove it")

    def _add_mistake(self, path: Path, text: str) -> None:
        self.mistakes.append(describe_problem(path, text, self.lines))

    def _read_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _PREFIX + "merge":
                self._merge(value_node, path, merged)
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _PREFIX + "str":
                quoted = f': quote it, "{key_node.value}"' if isinstance(key_node, yaml.ScalarNode) else ""
                self._add_mistake((*path, f"line {line}"), f"this key is not text{quoted}")
                continue
            key = key_node.value
            if key in first_lines:
                self._add_mistake((*path, key), f"occurs twice, at lines {first_lines[key]} and {line}: keep one")
                continue
            first_lines[key] = line
            self.lines[*path, key] = line
            result[key] = self.read_value(value_node, (*path, key))
        return {**merged, **result}

    def _merge(self, node: yaml.Node, path: Path, merged: dict[str, Any]) -> None:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            value = self.read_value(source, path)
            if not isinstance(value, dict):
                self._add_mistake(path, "<< must name a mapping")
                continue
            for key, below in value.items():
                merged.setdefault(key, below)

    def _read_scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        kind = node.tag.removeprefix(_PREFIX)
        if kind in ("str", "timestamp", "value"):
            return node.value
        if kind in ("null", "bool", "int", "float"):
            try:
                value = self.loader.construct_object(node)
            except (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError):
                return self._add_mistake(path, f"{_shorten(node.value)} is not a valid {kind}: quote it if it is text")
            if isinstance(value, float) and not math.isfinite(value):
                return self._add_mistake(path, f"{_shorten(node.value)} is not a finite number")
            if isinstance(value, int) and abs(value) >= 2**63:
                return self._add_mistake(
                    path, f"{_shorten(node.value)} does not fit in 64 bits: quote it if it is text"
                )
            return value
        return self._add_mistake(path, f"the tag {_shorten(node.tag)} is not allowed: remove it")


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"
