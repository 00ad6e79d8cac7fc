"""The script of a function: its source, the imports of the names that it uses, and a call.

The pods have neither the notebook nor the module that defines the function. So the function must stand on its own: it
may use its arguments, what it imports, modules, and names that can be imported. Everything else is refused, by name.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
import json
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from topkube.errors import SourceError

_CONSTANTS = (bool, int, float, str, bytes, type(None))
_MOST_DECIMAL_BITS = 2000
"""The most bits of an integer that is written in decimal. Python can be set to refuse more than 640 digits."""
_ADVICE = "move it into the function, or into a module of the folder that `source` names, and import it there"


def build_script(function: Callable[..., Any], arguments: Mapping[str, Any], source: Path | None = None) -> str:
    """Return a Python script that calls `function` with `arguments`, which must be JSON.

    Modules in the folder `source` may be imported. Raises SourceError for everything that would not exist in the pods:
    lambdas, closures, methods, decorators, names of a notebook, and modules outside `source` that are not installed.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        kind = "a lambda" if isinstance(function, FunctionType) else f"{type(function).__name__} {function!r:.60}"
        raise SourceError(
            f"{kind} cannot be sent to the pods",
            cause="only the source of a function that `def` defines can be sent",
            next_step="write def train(...): ..., and pass train",
        )
    name = function.__name__
    if function.__code__.co_freevars:
        raise SourceError(
            f"{name} uses {', '.join(function.__code__.co_freevars)} of the function around it",
            cause="the pods do not have these variables",
            next_step="pass them as arguments: train(function, arguments={...})",
        )
    definition = _parse_definition(function)
    _check_call(function, arguments)
    imports = [_build_import_line(function, used, source) for used in sorted(_find_used_names(function, definition))]
    parts = [
        f'"""The function {name}, as topkube.TrainingClient sent it."""',
        "from __future__ import annotations",
        "\n".join(line for line in imports if line),
        "\n" + _read_source(function),
        "",
        'if __name__ == "__main__":',
        f"    {name}(**__import__('json').loads({json.dumps(dict(arguments))!r}))",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _read_source(function: FunctionType) -> str:
    """Return the source of the function. If it is indented, it follows `if True:`, because to dedent it would change
    texts of several lines in it."""
    try:
        source = inspect.getsource(function)
        return f"if True:\n{source}" if source[:1].isspace() else source
    except (OSError, TypeError):
        raise SourceError(
            f"the source of {function.__name__} cannot be read",
            cause="the function was defined at an interactive prompt, or by exec",
            next_step="define it in a file or in a cell of a notebook",
        ) from None


def _parse_definition(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of the function. Raises SourceError for methods, decorators and coroutines."""
    name, qualified = function.__name__, function.__qualname__
    problem = ""
    if "." in qualified.rpartition("<locals>.")[2]:
        problem = "it is a method"
    elif inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        problem = "it is a coroutine or a generator: nothing would run it"
    else:
        try:
            tree = ast.parse(_read_source(function)).body
        except SyntaxError:
            tree = []
        if len(tree) == 1 and isinstance(tree[0], ast.If):
            tree = tree[0].body
        definition = tree[0] if len(tree) == 1 else None
        if not isinstance(definition, ast.FunctionDef) or definition.name != name:
            problem = "its source is not a definition of its own"
        elif definition.decorator_list:
            problem = "it has a decorator, which the pods may not have"
        else:
            return definition
    raise SourceError(
        f"{name} cannot be sent to the pods: {problem}", next_step="pass a plain function: def train(...)"
    )


def _check_call(function: FunctionType, arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**arguments)
        survives_json = json.loads(json.dumps(dict(arguments), allow_nan=False)) == {**arguments}
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"{function.__name__} cannot be called with these arguments: {error}",
            cause="a name is misspelt or missing, or a value is not JSON",
            next_step="pass numbers, texts, lists and dicts: arguments={'epochs': 3}",
        ) from None
    if not survives_json:
        raise SourceError(
            f"the arguments of {function.__name__} change when they are written as JSON",
            cause="they contain tuples, sets or keys that are not texts",
            next_step="pass lists, and dicts with texts as keys",
        )


def _find_used_names(function: FunctionType, definition: ast.FunctionDef) -> set[str]:
    """Return the global names that the function reads: in its body, in functions inside it, and in its defaults."""
    defaults = [*definition.args.defaults, *(value for value in definition.args.kw_defaults if value is not None)]
    names = {node.id for value in defaults for node in ast.walk(value) if isinstance(node, ast.Name)}
    names |= set(_list_global_names(function.__code__))
    names.discard(function.__name__)
    return {name for name in names if name in function.__globals__ or not hasattr(builtins, name)}


def _list_global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_global_names(constant)


def _build_import_line(function: FunctionType, name: str, source: Path | None) -> str:
    """Return the line that gives the script the global `name` of the function."""
    if name in ("__name__", "__annotations__"):
        return ""
    if name not in function.__globals__:
        raise SourceError(
            f"{function.__name__} uses {name}, which is not defined", next_step=f"define {name}, or pass it"
        )
    value = function.__globals__[name]
    if isinstance(value, ModuleType):
        _check_module(function, value.__name__, source)
        return f"import {value.__name__} as {name}"
    if type(value) in _CONSTANTS:
        return f"{name} = {_write_literal(value)}"
    module = getattr(value, "__module__", None)
    qualified = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if isinstance(module, str) and isinstance(qualified, str) and _is_importable(module, qualified, value):
        _check_module(function, module, source)
        return f"from {module} import {qualified} as {name}"
    raise SourceError(
        f"{function.__name__} uses {name}, {_describe_kind(value)} that the pods cannot import",
        cause="it exists in this process only",
        next_step=_ADVICE,
    )


def _write_literal(value: bool | float | str | bytes | None) -> str:
    """Return an expression with exactly this value. `repr` writes `inf` and `nan`, which no script defines, and refuses
    large integers."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, int) and value.bit_length() > _MOST_DECIMAL_BITS:
        return hex(value)
    return repr(value)


def _describe_kind(value: Any) -> str:
    if isinstance(value, type):
        return "a class"
    return "a function" if isinstance(value, FunctionType) else f"a value of type {type(value).__name__}"


def _is_importable(module: str, name: str, value: Any) -> bool:
    if module == "__main__" or not name.isidentifier():
        return False
    try:
        return getattr(importlib.import_module(module), name, None) is value
    except ImportError:
        return False


def _check_module(function: FunctionType, module: str, source: Path | None) -> None:
    """Raise SourceError if the pods will not have a module: it is neither installed nor in `source`."""
    top = sys.modules.get(module.partition(".")[0])
    file = getattr(top, "__file__", None)
    if module == "__main__":
        raise SourceError(f"{function.__name__} uses the module __main__", next_step=_ADVICE)
    if file is None or module.partition(".")[0] == "topkube":
        return
    path = Path(file).resolve()
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if any(path.is_relative_to(folder) for folder in installed) or "site-packages" in path.parts:
        return
    if source is None or not path.is_relative_to(source.resolve()):
        raise SourceError(
            f"{function.__name__} uses the module {module}, which is a file of this machine: {path}",
            cause="the pods do not have it",
            next_step=f"send its folder: train(..., source={str(path.parent)!r})",
        )
