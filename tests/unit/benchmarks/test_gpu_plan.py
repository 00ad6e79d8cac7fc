"""The script that measures on a GPU: rows survive, programs that hang are killed, and the machine needs no network."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import torch

import gpu
import topkube
from gpu_plan import checks, machine, timing, tools, training, variants
from gpu_plan.device import Device
from gpu_plan.predictions import PREDICTIONS, Prediction
from gpu_plan.programs import run_group
from gpu_plan.rows import Rows, read_rows
from gpu_plan.training import measure_gaps

SCRIPT = machine.ROOT / "benchmarks" / "gpu.py"


def test_rows_are_written_at_once_and_measured_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "rows.jsonl", []

    def measure(name: str) -> dict[str, object]:
        calls.append(name)
        if calls.count("b") == 1 and name == "b":
            raise RuntimeError("the device is full")
        return {"ms": 1.0}

    first = Rows(path)
    first.measure("a", lambda: measure("a"))
    assert [row["key"] for row in read_rows(path)] == ["a"]
    assert "device is full" in str(first.measure("b", lambda: measure("b")))
    with path.open("a") as file:
        file.write('{"key": "c", "ms"')  # the machine was taken away
    resumed = Rows(path)
    for name in "abc":
        resumed.measure(name, lambda name=name: measure(name))
    assert calls == ["a", "b", "b", "c"]
    assert sorted(row["key"] for row in read_rows(path) if "error" not in row) == ["a", "b", "c"]


def test_results_of_an_earlier_run_are_kept_with_its_sources(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.keep_earlier_rows(path, {}, "GPU") == []
    oldest = {"key": "suite", "ms": 1.0, "sources": "first"}
    rows = [{"key": "run", "sources": "second"}, {"key": "training step", "ms": 2.0}, {"key": "time", "ms": 3.0}]
    stored = {"device": "GPU", "date": "2026-11-01", "all rows": rows}
    path.write_text(json.dumps({**stored, "earlier rows": [oldest, {**rows[2], "sources": "first"}]}))
    assert gpu.keep_earlier_rows(path, {}, "another GPU") == []
    kept = gpu.keep_earlier_rows(path, {"run": {}, "facts": {}}, "GPU")
    assert sorted(kept, key=lambda row: row["key"]) == [
        oldest,
        {"key": "time", "ms": 3.0, "sources": "second", "date": "2026-11-01"},
        {"key": "training step", "ms": 2.0, "sources": "second", "date": "2026-11-01"},
    ]


def test_a_row_that_was_killed_twice_does_not_stop_the_rows_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    script = """
import os, sys
from pathlib import Path
from gpu_plan.rows import Rows
rows = Rows(Path(sys.argv[1]))
rows.measure("first", dict)
rows.measure("hangs", lambda: os._exit(9))
rows.measure("last", dict)
"""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    statuses = [
        subprocess.run([sys.executable, "-c", script, str(path)], check=False, env=environment).returncode
        for _ in range(3)
    ]
    assert statuses == [9, 9, 0]
    rows = {row["key"]: row for row in read_rows(path)}
    assert "started 2 times and did not end" in rows["hangs"]["error"]
    assert "error" not in rows["last"]


def test_rows_of_other_sources_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(out=tmp_path / "gpu.jsonl", dry=False, quick=False)
    gpu.start_rows(args)
    Rows(args.out).measure("facts", lambda: {"device": "first"})
    gpu.start_rows(args)
    assert [row["key"] for row in read_rows(args.out)] == ["run", "facts"]
    monkeypatch.setattr(machine, "digest_sources", lambda: "changed")
    gpu.start_rows(args)
    assert [row["key"] for row in read_rows(args.out)] == ["run"]
    kept = next(path for path in tmp_path.iterdir() if path != args.out)
    assert [row["key"] for row in read_rows(kept)] == ["run", "facts"]


def test_the_plan_fits_45_minutes_and_no_stage_exceeds_a_command() -> None:
    assert sum(gpu.STAGES.values()) <= 45
    assert max(gpu.STAGES.values()) <= 9
    order = list(gpu.STAGES)
    assert order[:2] == ["facts", "checks"]  # figures of wrong results are worth nothing
    assert order.index("sanitisers") > order.index(
        "kernels"
    )  # a device that a sanitiser leaves behind may be slow, or hang


def test_a_build_that_runs_out_of_time_reports_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cmake", "nvcc"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\nexec sleep 600\n")
        program.chmod(0o755)
    monkeypatch.setattr(machine, "find_nanobind", lambda environment: "nowhere")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setenv("PATH", environment["PATH"])
    with pytest.raises(machine.BuildError, match=r"the time is over.*configure.*run the same command again"):
        machine.build(tmp_path / "work", environment, "90", time.monotonic() + 0.2)


def test_gaps_are_the_time_without_a_kernel() -> None:
    assert measure_gaps([(0, 1000), (500, 700), (900, 2000), (5000, 6000)]) == {
        "launches": 4,
        "ms": 6.0,
        "gaps ms": 3.0,
    }
    assert measure_gaps([]) == {"launches": 0, "ms": 0.0, "gaps ms": 0.0}


def test_no_row_starts_after_the_deadline(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", deadline=time.monotonic() - 1)
    assert rows.measure("late", lambda: pytest.fail("it was started")) is None
    assert rows.left_out == ["late"]


def _wait_for_end(process: int) -> None:
    """Wait until the process has ended. Fail the test after two minutes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{process}/stat")
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    pytest.fail("the child of the killed program still runs")


def test_a_program_that_runs_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait"
    status, _ = run_group(["bash", "-c", script], 3)
    assert status is None
    _wait_for_end(int(child.read_text()))


def test_a_sanitiser_that_hangs_is_killed_with_its_children_and_costs_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {tmp_path}/children\nwait\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    rows = Rows(tmp_path / "rows.jsonl")
    tools.run_sanitisers(rows, dry=False, seconds=3)
    stored_rows = read_rows(rows.path)
    assert [row["key"] for row in stored_rows] == ["sanitiser memcheck", "sanitiser racecheck", "sanitiser synccheck"]
    assert [row["skipped"] for row in stored_rows] == ["it did not end within 3 s"] * 3
    for child in (tmp_path / "children").read_text().split():
        _wait_for_end(int(child))


def _write_wheel(folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any") -> None:
    """Write a wheel of one module that holds its version."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}/__init__.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_wheels_are_installed_without_a_network_and_only_if_they_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index" / "topkube-absent"  # an index with a newer version, which pip must not use
    _write_wheel(index, "topkube_absent", "3.0")
    (index / "index.html").write_text('<a href="topkube_absent-3.0-py3-none-any.whl">topkube_absent-3.0</a>')
    monkeypatch.setenv("PIP_INDEX_URL", index.parent.as_uri())
    for name in ("topkube_absent", "numpy"):
        _write_wheel(tmp_path, name)
    monkeypatch.setattr(machine, "PACKAGES", {"topkube_absent": "topkube-absent", "numpy": "numpy"})
    site = tmp_path / "site"
    wheel = tmp_path / "topkube_absent-1.0-py3-none-any.whl"
    wheel_of_other_python = tmp_path / "topkube_absent-2.0-cp27-cp27mu-manylinux1_x86_64.whl"
    wheel_of_other_python.write_bytes(wheel.read_bytes())
    assert machine.unpack_wheels(tmp_path, site) == ["topkube-absent"]
    module = site / "topkube_absent" / "__init__.py"
    assert module.read_text() == "version = '1.0'\n"
    assert not (site / "numpy").exists()
    installed = module.stat()
    assert machine.unpack_wheels(tmp_path, site) == ["topkube-absent"]
    assert module.stat() == installed  # newer files would compile the extension again


@pytest.mark.parametrize(
    ("python", "processor", "tag"),
    [
        ("3.12", "x86_64", "cp312-cp312-manylinux_2_17_x86_64"),
        ("3.13", "aarch64", "cp313-cp313-manylinux_2_17_aarch64"),
    ],
)
def test_wheels_are_collected_for_the_python_and_the_processor_of_the_other_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, processor: str, tag: str
) -> None:
    package_folder, wheels, constraints = tmp_path / "shop", tmp_path / "wheels", tmp_path / "constraints.txt"
    tags = [f"cp3{minor}-cp3{minor}-manylinux_2_17_{name}" for minor in (11, 12, 13) for name in ("x86_64", "aarch64")]
    for version in ("1.0", "2.0"):  # the constraints ask for the older version
        for wheel_tag in tags:
            _write_wheel(package_folder, "topkube_compiled", version, wheel_tag)
    _write_wheel(package_folder, "topkube_pure")
    _write_wheel(package_folder, "topkube_rare", tag="cp39-cp39-win_amd64")
    constraints.write_text("topkube-compiled==1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package_folder))
    monkeypatch.setattr(
        machine, "PACKAGES", {name: name for name in ("topkube_compiled", "topkube_pure", "topkube_rare")}
    )
    assert machine.prepare(python, processor, wheels, constraints) == ["topkube_rare"]
    assert sorted(wheel.name for wheel in wheels.iterdir()) == [
        f"topkube_compiled-1.0-{tag}.whl",
        "topkube_pure-1.0-py3-none-any.whl",
    ]


def test_libraries_and_programs_of_a_carried_mpi_are_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mpich-5.0-py3-none-manylinux_2_28_x86_64.whl", "w") as wheel:
        for name in ("lib/libmpi.so.12", "lib/pkgconfig/mpich.pc", "bin/mpiexec"):
            wheel.writestr(f"mpich-5.0.data/data/{name}", name)
    machine._unpack_libraries("mpich", tmp_path, tmp_path / "site")
    site = tmp_path / "site"
    assert sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()) == [
        "bin/mpiexec",
        "lib/libmpi.so.12",
    ]
    assert os.access(site / "bin" / "mpiexec", os.X_OK)


def test_stages_can_be_chosen() -> None:
    assert gpu.parse_stages("suite,facts") == ("suite", "facts")
    with pytest.raises(argparse.ArgumentTypeError, match=r"no stage kernel\. .*choose from facts, checks"):
        gpu.parse_stages("facts,kernel")


def test_each_stage_is_a_process_that_imports_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import in the process that has built it would find another package, or none."""
    package, work = tmp_path / "package", tmp_path / "work"
    for folder in (package / "topkube", work / "site" / "lib"):
        folder.mkdir(parents=True)
    (package / "topkube" / "__init__.py").touch()
    (work / "site" / "lib" / "libmpi.so.12").touch()
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], _: float, environment: dict[str, str]) -> tuple[int, str]:
        started.append((command, environment))
        return 0, ""

    monkeypatch.setattr(machine, "build", lambda *_: package)
    monkeypatch.setattr(gpu, "list_missing", lambda _: [])
    monkeypatch.setattr(gpu, "run_group", start)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    args = argparse.Namespace(
        work=work, wheels=tmp_path, out=tmp_path / "rows.jsonl", dry=True, quick=True, minutes=1.0, architecture=None,
        stages=tuple(gpu.STAGES), sizes=None,
    )  # fmt: skip
    assert gpu.run_all(args) == 0
    assert [command[3] for command, _ in started] == list(gpu.STAGES)
    for command, environment in started:
        assert command[:3] == [sys.executable, gpu.__file__, "--stage"]
        assert environment["MPI4PY_LIBMPI"] == str(work / "site" / "lib" / "libmpi.so.12")
    script = [sys.executable, "-S", "-c", "import topkube; print(topkube.__file__)"]  # no editable installation
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(package / "topkube" / "__init__.py")


def test_another_package_than_the_one_that_was_built_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An editable installation is found before the folders of PYTHONPATH."""
    installed = tmp_path / "installed" / "topkube" / "__init__.py"
    monkeypatch.setattr(machine, "build", lambda *_: tmp_path / "package")
    monkeypatch.setattr(gpu, "list_missing", lambda _: [])
    monkeypatch.setattr(gpu, "run_group", lambda *_: pytest.fail("a stage was started"))
    answer = subprocess.CompletedProcess([], 0, stdout=f"{installed}\n")
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(sys, "path", list(sys.path))
    args = argparse.Namespace(
        work=tmp_path, wheels=tmp_path, out=tmp_path / "rows", dry=False, quick=True, minutes=1.0, architecture="90",
        stages=tuple(gpu.STAGES), sizes=None,
    )  # fmt: skip
    assert gpu.run_all(args) == 2
    assert f"{installed} is imported in place of the package that was built" in capsys.readouterr().err


def test_the_checks_of_streams_and_graphs_end_in_the_dry_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    topkube.init()
    device = Device(dry=True, repeats=1)
    monkeypatch.setattr(device, "limit_elements", lambda elements: min(elements, 4000))
    skipped = training._check_skipped_steps(device)
    assert skipped["wrong"] == [], skipped
    assert (skipped["steps"], skipped["skipped"], skipped["left to the device"]) == (9, 3, 12)
    assert training._check_graphs(device)["wrong"] == []
    assert training._check_two_backwards(device)["wrong"] == []


def test_versions_are_those_of_the_constraints(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# comment\npydantic-core==2.1  # why\nTyping_Extensions==4.0\nloose>=1\n")
    assert machine.read_pinned_versions(constraints) == {"pydantic-core": "2.1", "typing-extensions": "4.0"}


def test_the_dry_mode_checks_and_times_on_the_cpu(tmp_path: Path) -> None:
    device, rows = Device(dry=True, repeats=3), Rows(tmp_path / "rows.jsonl")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        checks.run(device, rows, quick=True)
        timing.run(device, rows, quick=True)
    finally:
        torch.set_num_threads(before)
    stored_rows = read_rows(rows.path)
    assert len(stored_rows) >= 9
    assert all("error" not in row and not row.get("wrong") for row in stored_rows), stored_rows


def _find_requirements(name: str) -> set[str]:
    """Return the names of a package and of all installed packages that it requires."""
    required_packages, open_names = set[str](), [name]
    while open_names:
        package = open_names.pop()
        required_packages.add(package)
        with suppress(metadata.PackageNotFoundError):
            lines = [line for line in metadata.requires(package) or [] if "extra ==" not in line]
            required = {machine.normalize_name(re.split(r"[ ;<>=!~(\[]", line)[0]) for line in lines}
            open_names += required - required_packages
    return required_packages


def test_stages_import_only_packages_of_the_machine_and_carried_packages(tmp_path: Path) -> None:
    """The machine has torch and what torch requires; `--prepare` carries the rest. The kernels are measured without
    most of that too. Training imports some packages only when it runs."""
    code = """
import sys
from pathlib import Path
refused, path = set(sys.argv[1].split()), Path(sys.argv[2])

class Filter:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *arguments):
        return None if name.partition(".")[0] in refused else self.finder.find_spec(name, *arguments)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Filter, sys.meta_path)
training_only = {"pydantic", "mpi4py", "typer", "rich", "aiohttp"} - refused
refused |= training_only
import gpu_plan.checks, gpu_plan.timing, gpu_plan.tools
refused -= training_only
from gpu_plan import training
from gpu_plan.device import Device
from gpu_plan.rows import Rows
training.run(Device(dry=True, repeats=1), Rows(path), quick=True)
"""
    carried = {machine.normalize_name(name) for name in machine.PACKAGES.values()}
    optional = {"setuptools", "tqdm"}  # torch imports them if they are there
    expected = _find_requirements("torch") | carried | optional | {"topkube"}
    refused = [
        module
        for module, packages in metadata.packages_distributions().items()
        if not expected & {machine.normalize_name(package) for package in packages}
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, " ".join(refused), str(tmp_path / "rows.jsonl")]
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    stored_rows = read_rows(tmp_path / "rows.jsonl")
    assert len(stored_rows) == 4
    assert [row["error"] for row in stored_rows if "error" in row] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_script_prints_the_missing_parts(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "rows.jsonl")]
    ended = subprocess.run([*command, "--wheels", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Next: run this on a machine with an NVIDIA GPU" in ended.stdout


def test_a_prediction_names_what_it_did_not_expect() -> None:
    rows = {"a": {"ms": 1.0}, "b": {"ms": 4.0}}
    assert Prediction("a", "ms", 0.2, 0.3, "why", per="b").judge(rows).startswith("as expected")
    assert Prediction("a", "ms", 2, 3, "why").judge(rows).startswith("UNEXPECTED")
    assert Prediction("a", "ms", 2, 3, "why", per="c").judge(rows).startswith("not measured")


def test_predictions_are_about_rows_that_the_plan_measures() -> None:
    sizes = [
        f"time {size} {dtype} {density:g}"
        for size in timing.SIZES
        for dtype in timing.DTYPES
        for density in timing.DENSITIES
    ]
    of_training = {"training step", "steps that the device skips"}
    packings = {f"packing {name}" for name in timing.SIZES}
    keys = {*sizes, *packings, *(f"variant {name}" for name in variants.VARIANTS), *of_training}
    assert {key for p in PREDICTIONS for key in (p.key, p.per) if key} <= keys


def test_every_variant_is_a_choice_that_the_kernels_offer() -> None:
    source = (machine.ROOT / "csrc/cuda/selection/variants.hpp").read_text()
    for defines in variants.VARIANTS.values():
        for option in defines:
            assert f"#ifndef {option.removeprefix('-D').partition('=')[0]}\n" in source
