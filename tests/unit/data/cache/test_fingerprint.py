"""Different decode functions never share a fingerprint; a decode function has the same fingerprint in every process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from openers import Opener
from remotes import RemoteServer, write_tars

from topkube.data import ArrayOf
from topkube.data.cache.fingerprint import compute_fingerprint
from topkube.errors import DatasetError


def build_module(source: str, name: str = "script") -> types.ModuleType:
    """Return a module of the user with this source."""
    module_object = types.ModuleType(name)
    exec(textwrap.dedent(source), vars(module_object))
    return module_object


def compute_source_fingerprint(source: str) -> str:
    return compute_fingerprint(build_module(source).decode)


BASE = """
    import numpy as np
    from functools import lru_cache, partial
    SCALE = 2
    TABLE = {"a": [1, 2]}
    WEIGHTS = np.arange(4)
    NAMES = {"x", "y", "z"}
    class Box:
        size = 4
        def area(self): return self.size * SCALE
    def helper(x, by=3): return x + by
    @lru_cache
    def cached(x): return x + 5
    halved = partial(helper, by=7)
    def decode(raw, offset=1):
        import json
        if raw in {"b", "a", "c"}: return TABLE
        return helper(raw) * SCALE + WEIGHTS.sum() + offset + Box().area() + cached(1) + halved(2) + len(NAMES)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2", "SCALE = 3"),
        ("[1, 2]", "[1, 3]"),
        ("arange(4)", "arange(4) + 1"),
        ("arange(4)", "arange(4.0)"),
        ('"z"}', '"w"}'),
        ("size = 4", "size = 5"),
        ("self.size *", "self.size +"),
        ("return x + by", "return x - by"),
        ("by=3", "by=4"),
        ("x + 5", "x + 6"),
        ("by=7", "by=8"),
        ("offset=1", "offset=2"),
        ('"c"}', '"d"}'),
        ("WEIGHTS.sum()", "WEIGHTS.max()"),
        ("helper(raw)", "cached(raw)"),
    ],
)
def test_a_change_of_what_decode_reaches_changes_its_fingerprint(old: str, new: str) -> None:
    assert old in BASE
    assert compute_source_fingerprint(BASE) == compute_source_fingerprint(BASE)
    assert compute_source_fingerprint(BASE) != compute_source_fingerprint(BASE.replace(old, new))


def test_a_helper_in_another_module_of_the_project_counts_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = []
    for scale in (2, 3):
        helpers = build_module(f"SCALE = {scale}\ndef scaled(x): return x * SCALE", "my_helpers")
        monkeypatch.setitem(sys.modules, "my_helpers", helpers)
        for source in (
            "import my_helpers\ndef decode(raw): return my_helpers.scaled(raw)",
            "from my_helpers import scaled\ndef decode(raw): return scaled(raw)",
            "def decode(raw):\n    import my_helpers\n    return my_helpers.scaled(raw)",
            "def decode(raw):\n    from my_helpers import scaled\n    return scaled(raw)",
        ):
            fingerprints.append(compute_source_fingerprint(source))  # noqa: PERF401
    assert len(set(fingerprints)) == 8


@pytest.mark.parametrize("package", ["my_package", "."])
def test_a_submodule_that_decode_imports_counts_by_its_code(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints = set()
    for scale in (2, 3):
        folder = tmp_path / str(scale) / "my_package"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "helpers.py").write_text(f"def scaled(x): return x * {scale}")
        with monkeypatch.context() as changed:
            changed.syspath_prepend(folder.parent)
            for name in ("helpers", "gone"):
                source = f"def decode(raw):\n    from {package} import {name}\n    return {name}.scaled(raw)"
                module = build_module(source)
                module.__package__ = "my_package"
                if name == "helpers":
                    fingerprints.add(compute_fingerprint(module.decode))
                else:
                    with pytest.raises(DatasetError, match="no automatic fingerprint"):
                        compute_fingerprint(module.decode)
        for name in ("my_package", "my_package.helpers"):
            del sys.modules[name]
    assert len(fingerprints) == 2


@pytest.mark.parametrize(
    "source",
    [
        "class State: pass\nstate = State()\ndef decode(raw): return state.value",
        "def decode(raw): return globals()['x']",
        "def decode(raw): return open('/tmp/x').read()",
        "def decode(raw): return not_yet(raw)",
        "import types\nhelpers = types.ModuleType('helpers')\ndef decode(raw): return getattr(helpers, 'x')",
        "class State:\n    def __call__(self, raw): return self.x\ndecode = State()",
        "class State:\n    def read(self, raw): return self.x\ndecode = State().read",
    ],
)
def test_code_that_cannot_be_described_needs_an_explicit_fingerprint(source: str) -> None:
    with pytest.raises(DatasetError, match=r"no automatic fingerprint: it uses '\w+'.*fingerprint="):
        compute_source_fingerprint(source)


def test_functions_that_call_each_other_are_visited_once() -> None:
    source = "def decode(x): return other(x - 1)\ndef other(x): return decode(x) if x else 0"
    assert compute_source_fingerprint(source) != compute_source_fingerprint(source.replace("else 0", "else 1"))


def test_a_decode_has_one_fingerprint_in_all_processes(tmp_path: Path) -> None:
    """Ranks with different fingerprints would not share the memory tier, so sets and addresses must not matter."""
    script = tmp_path / "script.py"
    source = (
        textwrap.dedent(BASE)
        + "\nfrom topkube.data.cache.fingerprint import compute_fingerprint\nprint(compute_fingerprint(decode))\n"
    )
    script.write_text(source)
    outputs = {
        subprocess.run(
            [sys.executable, str(script)], env={"PYTHONHASHSEED": str(seed)}, capture_output=True, check=True
        ).stdout
        for seed in (1, 2)
    }
    assert len(outputs) == 1


def test_the_fingerprint_of_an_object_is_used() -> None:
    assert compute_fingerprint(ArrayOf("uint8", (3,))) != compute_fingerprint(ArrayOf("uint8", (4,)))
    assert compute_fingerprint(None) == ""


def test_a_decode_with_a_changed_global_gets_its_own_samples(remote: RemoteServer, open_dataset: Opener) -> None:
    write_tars(remote.folder, [5])
    for scale in (1, 10):
        decoder: Any = build_module(f"SCALE = {scale}\ndef decode(sample): return int(sample['cls']) * SCALE")
        dataset = open_dataset(remote.uri, decode=decoder.decode, memory_limit=1 << 20)
        assert [dataset[at] for at in range(5)] == [at * scale for at in range(5)]
