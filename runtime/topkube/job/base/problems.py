"""The mistakes in a job, one line each: the path, the value, what is allowed, and the nearest valid name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import annotated_types
from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from topkube.job.base.part import Allowed, OneOf, Part, Path

Lines = Mapping[Path, int]
DEEPEST = 100
"""The largest number of levels of a document."""


def format_path(path: Path) -> str:
    """Return ('spec', 'containers', 0, 'nvidia.com/gpu') as spec.containers[0]["nvidia.com/gpu"]"""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif key.replace("_", "").replace("-", "").isalnum():
            text += f".{key}"
        else:
            text += f'["{key}"]'
    return text.removeprefix(".") or "the file"


def describe_problem(path: Path, text: str, lines: Lines) -> str:
    """Return a problem with its path and the line of the value, or of the mapping that lacks the value."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return f"{format_path(path)} (line {lines[path[:length]]}): {text}"
    return f"{format_path(path)}: {text}"


def list_problems(error: ValidationError, model: type[Part], lines: Lines) -> list[str]:
    """Return all problems of a failed validation, in the order of the file."""
    problems: list[tuple[Path, str]] = []
    for entry in error.errors(include_url=False):
        path = tuple(entry["loc"])
        for below, text in entry.get("ctx", {}).get("problems", [((), _explain_error(entry, path, model))]):
            problems.append(((*path, *below), text))
    problems.sort(key=lambda problem: _find_line(problem[0], lines))
    return [describe_problem(path, text, lines) for path, text in problems]


def _find_line(path: Path, lines: Lines) -> int:
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), 0)


def _explain_error(entry: Any, path: Path, model: type[Part]) -> str:
    kind, value = entry["type"], entry["input"]
    if kind == "value_error":
        return str(entry["ctx"]["error"])
    if kind == "extra_forbidden":
        parent = _find_part_at(path[:-1], model)
        names = list_field_names(parent) if parent else []
        guess = _suggest_name(str(path[-1]), names) or _suggest_path(str(path[-1]), model)
        return f"unknown field{guess}; allowed: {', '.join(names)}"
    field = _find_field(path, model)
    if field is None:
        return f"{show_value(value)}: {entry['msg']}"
    if kind == "missing":
        return f"is required: {field.description}"
    guess = _suggest_name(value, list_choices(field)) if isinstance(value, str) else ""
    return f"{show_value(value)} is not {describe_allowed(field)}{guess}"


def _suggest_name(name: str, names: Sequence[str]) -> str:
    lower = {known.lower(): known for known in names}
    squeezed = name.lower().replace("_", "").replace("-", "")
    near = difflib.get_close_matches(squeezed, lower, 1, 0.5) or [known for known in lower if known in squeezed]
    return f"; did you mean {lower[near[0]]}?" if near else ""


def _suggest_path(name: str, model: type[Part]) -> str:
    place = _find_path_of(to_camel(name), model)
    return f"; it belongs to {format_path(place)}" if place else ""


def show_value(value: Any) -> str:
    """Return a value for a message: short, with its type if the type is the mistake."""
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 60 else f"'{value[:57]}…' ({len(value)} characters)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"{value!r}"


def describe_allowed(field: FieldInfo) -> str:
    """Return the allowed values of a field, in words."""
    for metadata in _list_metadata(field):
        if isinstance(metadata, Allowed):
            return metadata.words
    options = list_choices(field)
    if options:
        return "one of " + ", ".join(options)
    kind = strip_annotation(field.annotation)
    if typing.get_origin(kind) is list:
        return "a list"
    if kind is bool:
        return "true or false"
    if kind is str:
        return "text (quote it if it looks like a number)"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _describe_bounds(field)
    return "a mapping"


def _list_metadata(field: FieldInfo) -> list[Any]:
    metadata = list(field.metadata)
    for part in (field.annotation, *typing.get_args(field.annotation)):
        metadata += getattr(part, "__metadata__", ())
    return metadata


def _describe_bounds(field: FieldInfo) -> str:
    low = high = ""
    for metadata in field.metadata:
        match metadata:
            case annotated_types.Ge(ge=least):
                low = f" of at least {least}"
            case annotated_types.Gt(gt=above):
                low = f" above {above}"
            case annotated_types.Le(le=most):
                high = f" at most {most}"
    return low + (" and" if low and high else "") + high


def list_choices(field: FieldInfo) -> list[str]:
    """Return the values of a Literal (optional or not) or of OneOf; an empty list for any other field."""
    for metadata in _list_metadata(field):
        if isinstance(metadata, OneOf):
            return list(metadata.names)
    kind = strip_annotation(field.annotation)
    return [str(value) for value in typing.get_args(kind)] if typing.get_origin(kind) is Literal else []


def strip_annotation(annotation: Any) -> Any:
    """Return the annotation without Annotated and without None."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
            annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
        else:
            return annotation


def list_field_names(model: type[Part]) -> list[str]:
    """Return the names of the fields in YAML."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _find_field(path: Path, model: type[Part]) -> FieldInfo | None:
    """Return the field at `path`, or what the elements of a list of plain values must be."""
    if path and isinstance(path[-1], int):
        field = _find_field(path[:-1], model)
        kind = strip_annotation(field.annotation) if field else None
        return FieldInfo.from_annotation(typing.get_args(kind)[0]) if typing.get_origin(kind) is list else None
    parent = _find_part_at(path[:-1], model) if path else None
    return _find_field_by_name(str(path[-1]), parent) if parent else None


def _find_field_by_name(name: str, model: type[Part]) -> FieldInfo | None:
    return next((field for key, field in model.model_fields.items() if name in (field.alias, key)), None)


def _find_part_at(path: Path, model: type[Part]) -> type[Part] | None:
    """Return the type of the mapping at `path`; None if it is not a `Part`."""
    for key in path:
        if isinstance(key, int):
            continue
        field = _find_field_by_name(key, model)
        below = find_part(field) if field else None
        if below is None:
            return None
        model = below
    return model


def find_part(field: FieldInfo) -> type[Part] | None:
    """Return the `Part` that a field holds, itself or in a list; None if it holds none."""
    kind = strip_annotation(field.annotation)
    if typing.get_origin(kind) is list:
        kind = strip_annotation(typing.get_args(kind)[0])
    return kind if isinstance(kind, type) and issubclass(kind, Part) else None


def _find_path_of(name: str, model: type[Part], path: Path = ()) -> Path | None:
    """Return the path of a field of this name in `model`; None if there is none."""
    for field in model.model_fields.values():
        own_path = (*path, str(field.alias))
        if field.alias == name:
            return own_path
        below = find_part(field)
        path_below = _find_path_of(name, below, own_path) if below and own_path != ("status",) else None
        if path_below:
            return path_below
    return None
