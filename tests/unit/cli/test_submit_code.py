"""`topkube submit` of a script with the code of this machine: the objects, their order, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_answers import Answer, Answers, build_status

from topkube.cli.entry import run_app
from topkube.job import TrainingJob


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my_code"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(folder)
    return folder


def _read_documents(capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    assert run_app(["submit", "--dry-run", "-o", "yaml", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_a_dry_run_prints_everything_without_a_cluster(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code / "requirements.txt").write_text("# ours\neinops==0.8.0\n\nnumpy  # any\n")
    words = "train.py --workers 2 --slots 3 --sync . -r requirements.txt --algorithm dense -n team -- --epochs 3"
    config_map, job = _read_documents(capsys, *words.split())
    TrainingJob.parse(job)
    spec = job["spec"]
    assert (spec["workers"], spec["slotsPerWorker"], spec["aggregation"]) == (2, 3, {"algorithm": "dense"})
    [container] = spec["template"]["spec"]["containers"]
    assert (container["command"], container["args"]) == (["python", "train.py"], ["--epochs", "3"])
    assert spec["setup"]["requirements"] == ["einops==0.8.0", "numpy"]
    data = base64.b64decode(config_map["binaryData"]["source.tar.gz"])
    assert config_map["immutable"] is True
    assert spec["source"]["configMap"] == {
        "name": config_map["metadata"]["name"],
        "archive": "source.tar.gz",
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert config_map["metadata"]["namespace"] == job["metadata"]["namespace"] == "team"


def test_the_script_is_found_in_the_folder_that_is_sent(
    code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code.parent)
    job = _read_documents(capsys, "my_code/train.py", "--sync", "my_code")[1]
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["python", "train.py"]
    job = _read_documents(capsys, "my_code/train.py", "--sync", ".")[1]
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["python", "my_code/train.py"]
    [job] = _read_documents(capsys, "-m", "topkube.examples.char_gpt")
    assert "source" not in job["spec"]
    [job] = _read_documents(capsys, "my_code/train.py", "--image", "mine:1")
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "send the folder of the code: --sync ."),
        (["train.py", "--sync", "absent"], "absent is not a folder"),
        (["absent.py", "--sync", "."], "'absent.py' does not exist"),
        (["train.py", "--sync", ".", "-r", "absent.txt"], "absent.txt cannot be read"),
        (["job.yaml", "--sync", "."], "the job names its own spec.source"),
        (["train.py", "-o", "yaml"], "add --dry-run"),
    ],
)
def test_code_that_cannot_be_sent_is_refused(
    code: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    container = {"name": "worker", "image": "i:1", "command": ["python", "train.py"]}
    spec = {"source": {"configMap": {"name": "c"}}, "template": {"spec": {"containers": [container]}}}
    head = {"apiVersion": "topkube.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}}
    (code / "job.yaml").write_text(yaml.safe_dump({**head, "spec": spec}))
    assert run_app(["submit", *words]) != 0
    assert message in capsys.readouterr().err


class _SubmitServer:
    """Records requests; `refused` makes it refuse the job."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.stored: set[str] = set()
        self.refused = False

    def __call__(self, method: str, path: str) -> Answer:
        path, _, query = path.partition("?")
        kind, name = path.split("/")[-2:]
        self.requests.append((method, kind))
        if method == "GET" and name not in self.stored:
            return build_status(404, "not found", name=name, kind=kind)
        if method == "PATCH" and kind == "trainingjobs" and self.refused:
            return build_status(422, "bad", causes=[{"field": "spec.workers", "message": "too many"}])
        if method == "PATCH" and "dryRun" not in query:
            self.stored.add(name)
        if method == "DELETE":
            self.stored.discard(name)
        return (
            200,
            json.dumps({"metadata": {"name": name, "uid": "u-1", "resourceVersion": "1"}, "spec": {}}).encode(),
            {},
        )


def test_the_config_map_exists_before_the_job_and_then_belongs_to_it(
    code: Path, start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = _SubmitServer()
    assert run_app(["submit", "train.py", "--sync", ".", "--kubeconfig", str(start_server(cluster))]) == 0
    output = capsys.readouterr()
    assert output.out == "trainingjob.topkube.dev/train created\n"
    assert "1 files of ., " in output.err
    writes = [(method, kind) for method, kind in cluster.requests if method != "GET"]
    assert writes == [("PATCH", "configmaps"), ("PATCH", "trainingjobs"), ("PATCH", "configmaps")]


def test_a_refused_job_leaves_no_config_map(
    code: Path, start_server: Callable[[Answers], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = _SubmitServer()
    cluster.refused = True
    assert run_app(["submit", "train.py", "--sync", ".", "--kubeconfig", str(start_server(cluster))]) == 2
    assert "spec.workers: too many" in capsys.readouterr().err
    assert cluster.stored == set()
    assert ("DELETE", "configmaps") in cluster.requests


def test_a_dry_run_on_the_server_changes_nothing(code: Path, start_server: Callable[[Answers], Path]) -> None:
    cluster = _SubmitServer()
    assert run_app(["submit", "train.py", "--sync", ".", "--dry-run", "--kubeconfig", str(start_server(cluster))]) == 0
    assert cluster.stored == set()
    assert ("DELETE", "configmaps") not in cluster.requests


def test_requirements_are_read_as_pip_reads_them(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "einops ; \\\n  python_version > '3'\nnumpy\t# any\nlocal @ https://host/a.whl#sha256=0\n"
    (code / "requirements.txt").write_text(lines, encoding="utf-8-sig")  # as some editors save it
    *_, job = _read_documents(capsys, *["train.py", "--sync", ".", "-r", "requirements.txt"])
    requirements = [" ".join(line.split()) for line in job["spec"]["setup"]["requirements"]]
    assert requirements == ["einops ; python_version > '3'", "numpy", "local @ https://host/a.whl#sha256=0"]


@pytest.mark.parametrize("line", ["-r base.txt", "--index-url https://host", "einops==1 --hash=sha256:0", "-e ."])
def test_a_line_with_an_option_of_pip_is_named(line: str, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code / "requirements.txt").write_text(f"numpy\n{line}\n")
    assert run_app(["submit", "train.py", "--sync", ".", "-r", "requirements.txt", "--dry-run", "-o", "yaml"]) == 2
    assert f"requirements.txt has the line '{line}'" in capsys.readouterr().err
