"""An extension of griffe, which reads the docstrings for the pages in docs/api."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_PARAMETERS = re.compile(r"^(\w+(?:, \w+)*): ")


class PublicNames(griffe.Extension):
    """Adds the names that `topkube` loads on first use, and turns lines that describe parameters into lists."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add each name of the package's `_DEFINING_MODULES` as an alias, because a static reader does not see
        `__getattr__`."""
        if mod.path != "topkube":
            return
        defining_modules: dict[str, str] = ast.literal_eval(str(mod.members["_DEFINING_MODULES"].value))  # type: ignore[union-attr]
        for name, module in defining_modules.items():
            mod.set_member(name, griffe.Alias(name, f"{module}.{name}", parent=mod))

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """List the parameters of a function."""
        _list_parameters(func.docstring, func.parameters)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """List the parameters of a constructor, which the class's docstring describes."""
        constructor = cls.members.get("__init__")
        if isinstance(constructor, griffe.Function):
            _list_parameters(cls.docstring, constructor.parameters)


def _list_parameters(docstring: griffe.Docstring | None, parameters: griffe.Parameters) -> None:
    """Turn the lines "name: text" of a docstring, and the lines that continue them, into a Markdown list."""
    if docstring is None:
        return
    names = {parameter.name.lstrip("*") for parameter in parameters}
    described = [_find_described_parameters(line, names) for line in docstring.value.splitlines()]
    if len([words for words in described if words]) < 2:
        return
    lines: list[str] = []
    in_list = False
    for line, words in zip(docstring.value.splitlines(), described, strict=True):
        if words:
            if not in_list and lines and lines[-1]:
                lines.append("")
            in_list = True
            listed = ", ".join(f"`{word}`" for word in words)
            lines.append(f"- {listed}: {line.partition(': ')[2]}")
        else:
            in_list = in_list and bool(line)
            lines.append(f"  {line}" if in_list else line)
    docstring.value = "\n".join(lines)


def _find_described_parameters(line: str, names: set[str]) -> list[str]:
    """Return the parameters that a line begins to describe, such as `size_limit, memory_limit: bytes per node`."""
    match = _PARAMETERS.match(line)
    words = match[1].split(", ") if match else []
    return words if names.issuperset(words) else []
