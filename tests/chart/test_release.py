"""What `make release` builds besides packages: the chart's archive, versions that agree, checksums. `make release`
itself builds and tests the wheel."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from monitoring.generated import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """The module scripts/release.py."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_charts_archive_is_whole_and_has_the_images_of_the_registry(release: Any, tmp_path: Path) -> None:
    output = tmp_path / "dist"
    output.mkdir()
    tools = Path(sys.executable).parent
    archive = release.pack_chart(tools, "registry.example.com/team", VERSION, tmp_path, output)
    assert archive.name == f"topkube-{VERSION}.tgz"
    release.check_chart(tools, archive, "registry.example.com/team", VERSION)
    with pytest.raises(SystemExit):
        release.check_chart(tools, archive, "another.example.com", VERSION)


def test_all_files_state_the_version_and_the_tag_is_checked(release: Any, capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert release.check_version(project, None) == release.check_version(project, f"v{VERSION}") == VERSION
    with pytest.raises(SystemExit):
        release.check_version(project, "v9.9.9")
    assert f"the tag is v9.9.9, but pyproject.toml has version {VERSION}" in capsys.readouterr().err
    project["project"]["version"] = "9.9.9"
    with pytest.raises(SystemExit):
        release.check_version(project, None)
    assert "does not state the version 9.9.9" in capsys.readouterr().err


def test_checksums_are_those_that_sha256sum_reads(release: Any, tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    release.write_checksums(tmp_path)
    check = ["sha256sum", "--check", "--strict", release.CHECKSUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "a.whl").write_bytes(b"another")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode != 0


def test_the_workflow_builds_a_wheel_for_each_python_that_may_import_topkube() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    built = project["tool"]["cibuildwheel"]["build"].split()
    oldest = int(project["project"]["requires-python"].removeprefix(">=3."))
    assert built == [f"cp3{minor}-manylinux_*" for minor in range(oldest, oldest + len(built))]
    assert "cp312-manylinux_*" in built  # the Python of machines with GPUs
    wheels = workflow["jobs"]["wheels"]
    assert any("cibuildwheel" in step.get("uses", "") for step in wheels["steps"])
    assert wheels["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]


@pytest.mark.parametrize("folder", ["runtime", "gpu"])
def test_the_images_of_the_runtime_have_the_libraries_of_object_stores(folder: str, tmp_path: Path) -> None:
    dockerfile = (ROOT / "images" / folder / "Dockerfile").read_text()
    extras = re.findall(r'^ARG EXTRAS="(.*)"$', dockerfile, re.MULTILINE)[0].split()
    assert "train examples ${EXTRAS} >/tmp/requirements.txt" in dockerfile
    for path in ("pyproject.toml", "images/requirements.py"):
        shutil.copy(ROOT / path, tmp_path)
    command = [sys.executable, tmp_path / "requirements.py", "mpich", "train", "examples", *extras]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    names = {re.split(r"[>=\[]", line)[0] for line in ended.stdout.splitlines()}
    assert names >= {"s3fs", "gcsfs", "adlfs", "huggingface_hub", "pyarrow", "zstandard", "tensorboard", "safetensors"}
    assert "topkube" not in names, "an extra that names others must be written out"


def test_the_workflow_gives_images_the_tag_that_the_chart_and_the_samples_name(tmp_path: Path) -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]["images"]["steps"]
    commands = {step["id"]: step for step in steps if "id" in step}
    repository, _, tag = commands["push"]["with"]["tags"].partition("}}:")
    assert repository == "${{ env.REGISTRY }}/${{ matrix.image "
    assert tag == "${{ steps.version.outputs.number }}${{ matrix.suffix }}"
    output = tmp_path / "output"
    environment = {
        "GITHUB_REF_NAME": f"v{VERSION}",
        "GITHUB_OUTPUT": str(output),
    }  # the tag that check_version asks for
    subprocess.run(["bash", "-c", commands["version"]["run"]], env=environment, check=True)
    assert output.read_text() == f"number={VERSION}\n"
    assert yaml.safe_load((ROOT / "charts/topkube/Chart.yaml").read_text())["appVersion"] == VERSION


def test_the_workflow_builds_as_make_release_does() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert any("make release" in command for command in commands)
    assert any("cosign sign" in command for command in commands)
    assert workflow["env"]["REGISTRY"] == "${{ vars.REGISTRY }}"
    images = workflow["jobs"]["images"]["strategy"]["matrix"]["include"]
    folders = {path.parent.name for path in (ROOT / "images").glob("*/Dockerfile")}
    assert {entry["folder"] for entry in images} == folders  # the image for GPUs has the only wheel with CUDA kernels
    assert len({(entry["image"], entry["suffix"]) for entry in images}) == len(images)
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= workflow["jobs"].keys()


@pytest.mark.parametrize("path", sorted((ROOT / "images").rglob("*Dockerfile")), ids=lambda path: path.parent.name)
def test_each_stage_that_runs_pip_takes_the_index_of_a_mirror(path: Path) -> None:
    stages = re.split(r"^FROM ", path.read_text(), flags=re.MULTILINE)[1:]
    with_pip = [stage for stage in stages if re.search(r"\bpip (install|wheel)\b", stage)]
    assert with_pip
    for stage in with_pip:
        before_pip = re.split(r"\bpip (?:install|wheel)\b", stage)[0]
        declared = set(re.findall(r"^ARG (\w+)", before_pip, re.MULTILINE))
        assert declared >= {"PIP_CERT", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}
