"""Describes everything that a function reaches: its code, defaults, closures and globals, and the objects they reach.

Code of the user's project (files that do not belong to an installed library) is described by its content. A library is
described by its name and version. No function of the user is called. Modules that a function imports when it runs are
imported, which runs their top-level code.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import functools
import importlib
import importlib.metadata
import logging
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from topkube.errors import DatasetError

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, range, slice, types.EllipsisType, types.NotImplementedType)
_SCRIPT = ("__main__", "__mp_main__")
"""The module name of the script, also in a spawned process."""
_UNBOUNDED = ("globals", "locals", "vars", "eval", "exec", "__import__", "open", "input")
"""Builtin functions with which code can reach objects that it does not name."""
_LIBRARIES = tuple(
    path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))
)
_ATTRIBUTES_OF_EVERY_CLASS = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__")
)


def describe_value(value: Any) -> list[str]:
    """Return texts that change whenever the behaviour of `value` (a function, class or constant) may change. Raises
    DatasetError with the name of an object that cannot be described."""
    return list(_Walk().describe(value, "decode"))


class _Walk:
    """A walk over everything that an object reaches. It describes every object once."""

    def __init__(self) -> None:
        self._visited: dict[int, tuple[int, Any]] = {}
        """For each id: the number of the visit, and the object. While the object is stored, its id cannot be reused."""

    def describe(self, value: Any, name: str) -> Iterator[str]:
        """Yield the parts of `value`, which the code calls `name`."""
        if value is None or isinstance(value, _PLAIN):
            if isinstance(value, enum.Enum):
                yield from self.describe(type(value), name)
            yield f"{type(value).__name__} {value!r}"
            return
        if id(value) in self._visited:
            yield f"again {self._visited[id(value)][0]}"
            return
        self._visited[id(value)] = (len(self._visited), value)
        yield from self._describe_compound(value, name)

    def _describe_compound(self, value: Any, name: str) -> Iterator[str]:
        is_instance = not isinstance(value, (type, types.ModuleType))
        fingerprint = getattr(value, "fingerprint", None) if is_instance else None
        if isinstance(fingerprint, str):
            yield f"fingerprint {fingerprint}"
        elif isinstance(value, (tuple, list)):
            yield f"{type(value).__name__} {len(value)}"
            for position, element in enumerate(value):
                yield from self.describe(element, f"{name}[{position}]")
        elif isinstance(value, dict):
            yield f"{type(value).__name__} {len(value)}"
            for key, element in value.items():
                yield from self.describe(key, f"a key of {name}")
                yield from self.describe(element, f"{name}[{key!r}]")
        elif isinstance(value, (set, frozenset)):  # sorted: the order must not depend on the hash seed
            yield f"{type(value).__name__} {len(value)}"
            yield from sorted("\1".join(_Walk().describe(element, f"an element of {name}")) for element in value)
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            yield f"array {value.dtype.str} {value.shape} {xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).data)}"
        elif isinstance(value, (np.dtype, re.Pattern, pathlib.PurePath)) or _is_torch_constant(value):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, enum.Enum):
            yield from self.describe(type(value), name)
            yield str(value)
        elif isinstance(value, logging.Logger):
            yield "logger"
        elif isinstance(value, functools.partial):
            yield "partial"
            for part in (value.func, value.args, value.keywords):
                yield from self.describe(part, name)
        elif isinstance(value, types.ModuleType):
            yield from self._describe_module(value, name, ())
        elif isinstance(value, types.FunctionType):
            yield from self._describe_function(value, name)
        elif isinstance(value, type):
            yield from self._describe_class(value, name)
        elif isinstance(inner := getattr(value, "__wrapped__", None), types.FunctionType):  # functools.lru_cache
            yield from self._describe_function(inner, name)
        elif isinstance(value, (types.BuiltinFunctionType, np.ufunc)) or _is_installed(
            getattr(type(value), "__module__", "")
        ):
            yield from self._describe_installed(value, name)
        else:
            raise _build_unknown_error(value, name)

    def _describe_installed(self, value: Any, name: str) -> Iterator[str]:
        """Describe a function of a library that is not written in Python."""
        module = getattr(value, "__module__", None)
        qualified_name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        if isinstance(value, np.ufunc):
            module = "numpy"
        owner = getattr(value, "__self__", None)
        belongs_to_instance = owner is not None and not isinstance(owner, (types.ModuleType, type))
        if not callable(value) or not qualified_name or belongs_to_instance:
            raise _build_unknown_error(value, name)
        if module is None and isinstance(owner, type):
            module = owner.__module__
        if not module or not _is_installed(module):
            raise _build_unknown_error(value, name)
        yield f"{module}.{qualified_name} {_find_version(module)}"

    def _describe_function(self, function: types.FunctionType, name: str) -> Iterator[str]:
        if _is_installed(function.__module__ or ""):
            yield f"{function.__module__}.{function.__qualname__} {_find_version(function.__module__)}"
            return
        yield f"function {_find_qualified_name(function)}"
        yield from self.describe(function.__defaults__, f"the defaults of {name}")
        yield from self.describe(function.__kwdefaults__, f"the defaults of {name}")
        for inner_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                inner = cell.cell_contents
            except ValueError:
                raise _build_unknown_error(None, inner_name) from None
            yield from self.describe(inner, inner_name)
        yield from self._describe_code(function.__code__, function.__globals__)

    def _describe_code(self, code: types.CodeType, names: dict[str, Any]) -> Iterator[str]:
        yield from (code.co_code.hex(), code.co_exceptiontable.hex(), *code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._describe_code(constant, names)
            else:  # a new walk, because the compiler may store equal constants once or several times
                yield from _Walk().describe(constant, "a constant")
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = str(step.argval)
                if name in names:
                    yield from self._describe_global(names[name], name, code)
                elif hasattr(builtins, name):
                    if name in _UNBOUNDED:
                        raise _build_unknown_error(getattr(builtins, name), name)
                    yield f"builtins.{name}"
                elif step.opname == "LOAD_GLOBAL":
                    raise _build_unknown_error(None, name)
            elif step.opname == "IMPORT_NAME":
                yield from self._describe_import(str(step.argval), names, code)

    def _describe_global(self, value: Any, name: str, code: types.CodeType) -> Iterator[str]:
        yield f"global {name}"
        if isinstance(value, types.ModuleType):
            yield from self._describe_module(value, name, code.co_names)
        else:
            yield from self.describe(value, name)

    def _describe_import(self, name: str, names: dict[str, Any], code: types.CodeType) -> Iterator[str]:
        """Describe a module that the function imports when it is called."""
        yield f"import {name}"
        if name.partition(".")[0] in sys.stdlib_module_names:
            return
        package = names.get("__package__") or ""
        for module_name in dict.fromkeys((name, f"{package}.{name}".strip("."))):
            if not module_name:  # of `from . import`
                continue
            try:
                module = importlib.import_module(module_name)
            except ImportError:
                continue
            if not _is_installed(module.__name__):
                _import_submodules(module, code.co_names)
            yield from self._describe_module(module, module_name, code.co_names)
            return
        raise DatasetError(
            f"decode has no automatic fingerprint: it imports {name or '.'!r}, which cannot be imported here",
            cause="the module is not installed, or its import fails",
            next_step="install the module, or pass fingerprint='...' and change that text whenever decode changes",
        )

    def _describe_module(self, module: types.ModuleType, name: str, named: tuple[str, ...]) -> Iterator[str]:
        """Describe a library by its version, and another module by the attributes in `named` that it has."""
        if _is_installed(module.__name__):
            yield f"{module.__name__} {_find_version(module.__name__)}"
            return
        reached = [attribute for attribute in dict.fromkeys(named) if attribute in vars(module)]
        if not reached:
            raise _build_unknown_error(module, name)
        yield f"module {module.__name__}"
        for attribute in reached:
            value = vars(module)[attribute]
            yield f"{name}.{attribute}"
            if isinstance(value, types.ModuleType):
                yield from self._describe_module(value, f"{name}.{attribute}", named)
            else:
                yield from self.describe(value, f"{name}.{attribute}")

    def _describe_class(self, kind: type, name: str) -> Iterator[str]:
        if _is_installed(kind.__module__):
            yield f"{kind.__module__}.{kind.__qualname__} {_find_version(kind.__module__)}"
            return
        yield f"class {_find_qualified_name(kind)}"
        if issubclass(kind, enum.Enum):
            yield from (str((name, member.value)) for name, member in kind.__members__.items())
            return
        for base in kind.__bases__:
            yield from self.describe(base, base.__name__)
        for attribute, value in sorted(vars(kind).items()):
            if attribute in _ATTRIBUTES_OF_EVERY_CLASS or attribute.startswith("_abc_"):
                continue
            yield attribute
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                value = (value.fget, value.fset, value.fdel)
            elif isinstance(value, functools.cached_property):
                value = value.func
            elif isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                continue
            yield from self.describe(value, f"{name}.{attribute}")


def _import_submodules(package: types.ModuleType, names: tuple[str, ...]) -> None:
    """Import the submodules of a package that have one of these names, as `from package import name` does."""
    for name in names if hasattr(package, "__path__") else ():
        if name not in vars(package):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"{package.__name__}.{name}")


@functools.cache
def _is_installed(module: str) -> bool:
    """Return True if the module belongs to Python or to an installed library."""
    top = module.partition(".")[0]
    if top in _SCRIPT:  # the file of this module may belong to a launcher
        return False
    if top in sys.stdlib_module_names or top == "topkube":
        return True
    file = getattr(sys.modules.get(module) or sys.modules.get(top), "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)


@functools.cache
def _find_version(module: str) -> str:
    """Return the version of the library to which the module belongs."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return sys.version
    version = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        pass
    file = getattr(sys.modules.get(module), "__file__", None)
    return xxhash.xxh3_128_hexdigest(pathlib.Path(file).read_bytes()) if file else ""


def _find_qualified_name(value: Any) -> str:
    module = "__main__" if value.__module__ in _SCRIPT else value.__module__
    return f"{module}.{value.__qualname__}"


def _is_torch_constant(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout", "memory_format", "Size")


def _build_unknown_error(value: Any, name: str) -> DatasetError:
    what = "which is not defined yet" if value is None else f"which is a {type(value).__name__}"
    return DatasetError(
        f"decode has no automatic fingerprint: it uses {name!r}, {what}",
        cause="the code of decode does not show the state of this object",
        next_step="pass fingerprint='...' and change that text whenever decode changes",
    )
