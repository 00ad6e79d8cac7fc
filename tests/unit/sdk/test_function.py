"""The script of a function runs on its own. A function that uses names which would not exist in the pods is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import functions
import pytest

from topkube.errors import SourceError
from topkube.sdk.function import build_script

HERE = Path(__file__).parent


def _run_script(script: str, folder: Path) -> str:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_the_script_of_a_function_has_the_result_of_the_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions.stands_alone(3)
    script = build_script(functions.stands_alone, {"epochs": 3})
    assert _run_script(script, tmp_path) == capsys.readouterr().out == '[3, 0.7071067811865476, "b", ["c"], [1.0], 2]\n'
    assert _run_script(build_script(functions.counts_down, {"number": 2}), tmp_path) == "0\n1\n2\n"


def test_numbers_that_repr_cannot_write_arrive_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    functions.uses_numbers()
    printed = _run_script(build_script(functions.uses_numbers, {}), tmp_path)
    assert printed == capsys.readouterr().out == "inf -inf inf -inf nan -0.0 True float\n"


def test_texts_of_an_indented_function_arrive_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    functions.has_a_text_of_lines()
    printed = _run_script(build_script(functions.has_a_text_of_lines, {}), tmp_path)
    assert printed == capsys.readouterr().out


def test_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    def show(values: Any) -> None:
        print(repr(values))

    values = {"text": "it's \"quoted\" \\ $(HOME) ä\n'''", "numbers": [1, 2.5, None, True]}
    assert _run_script(build_script(show, {"values": values}), tmp_path) == f"{values!r}\n"


def test_a_module_of_the_folder_is_imported_from_there(tmp_path: Path) -> None:
    script = build_script(functions.uses_helper, {}, HERE)
    assert "from functions import helper as helper" in script
    (tmp_path / "functions.py").write_text((HERE / "functions.py").read_text())
    assert _run_script(script, tmp_path) == "helped\n"


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (functions.nameless, {}, "a lambda cannot be sent"),
        (print, {}, "cannot be sent to the pods"),
        (functions.build_closure(3), {}, "train uses value of the function around it"),
        (functions.with_decorator, {}, "it has a decorator"),
        (functions.coroutine, {}, "it is a coroutine"),
        (functions.Model.train, {}, "it is a method"),
        (functions.uses_nothing_known, {}, "uses absent_name, which is not defined"),
        (functions.uses_tuple, {}, "uses WORDS, a value of type tuple that the pods cannot import"),
        (functions.uses_dict, {}, "uses LIMITS, a value of type dict that"),
        (functions.uses_complex, {}, "uses PLANE, a value of type complex that"),
        (functions.uses_scalar, {}, "uses SINGLE, a value of type float32 that"),
        (functions.uses_path, {}, "uses FOLDER, a value of type PosixPath that"),
        (functions.uses_array, {}, "uses ARRAY, a value of type ndarray that"),
        (functions.uses_member, {}, "uses STATE, a value of type STATE that"),
        (functions.uses_dtype, {}, r"uses KIND, a value of type \w+ that"),
        (functions.uses_configuration, {}, "uses CONFIGURATION, a value of type Configuration that"),
        (functions.uses_helper, {}, "uses the module functions, which is a file of this machine"),
        (functions.stands_alone, {}, "missing a required argument: 'epochs'"),
        (functions.stands_alone, {"epoch": 3}, "cannot be called with these arguments"),
        (functions.stands_alone, {"epochs": {1, 2}}, "not JSON serializable"),
        (functions.stands_alone, {"epochs": float("nan")}, "not JSON"),
        (functions.stands_alone, {"epochs": (1, 2)}, "change when they are written as JSON"),
    ],
)
def test_a_function_that_uses_names_missing_in_the_pods_is_refused(
    function: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(SourceError, match=words) as raised:
        build_script(function, arguments)
    assert "Next: " in str(raised.value)


def test_names_of_a_notebook_are_refused(tmp_path: Path) -> None:
    """The cells of a notebook are the module __main__."""
    cells = tmp_path / "cells.py"
    cells.write_text(
        "from topkube.sdk.function import build_script\n"
        "class Model: pass\n"
        "def train(): return Model()\n"
        "try: build_script(train, {})\n"
        "except Exception as error: print(error)\n"
    )
    printed = subprocess.run([sys.executable, str(cells)], capture_output=True, text=True, check=True).stdout
    assert "train uses Model, a class that the pods cannot import" in printed
    assert "move it into the function" in printed


def test_a_function_without_source_is_refused() -> None:
    names: dict[str, Any] = {}
    exec("def train(): pass", names)
    with pytest.raises(SourceError, match="the source of train cannot be read"):
        build_script(names["train"], {})
