"""Code and packages that are not in the image, on a real Kubernetes. They are sent from a folder, checked, and
installed without a network."""

from __future__ import annotations

import base64
import io
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from jobs import build_job
from localkube.images import RUNTIME
from target import Namespace, wait_for

from topkube import TrainingClient
from topkube.cli.entry import run_app
from topkube.errors import ClusterError, LaunchError

TRAIN = """
import os, sys, numpy as np, topkube
from helpers.words import WORD
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
print(f"rank {topkube.rank()} of {topkube.size()} {WORD} {sys.argv[1:]} in {os.getcwd()}", flush=True)
open("written-beside-the-code", "w").close()
"""
USES_PACKAGE = """
import os, numpy as np, topkube, topkubetest
topkube.init()
topkube.allreduce_(np.ones(64, np.float32), algorithm="flat")
print(f"rank {topkube.rank()} has {topkubetest.version} as user {os.getuid()}", flush=True)
"""


def _read_logs(namespace: Namespace) -> str:
    return "".join(namespace.read_log(pod.metadata.name) for pod in namespace.list_pods("worker"))


def _build_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr("topkubetest.py", "version = '1.2'\n")
        wheel.writestr("topkubetest-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: topkubetest\nVersion: 1.2\n")
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("topkubetest-1.2.dist-info/WHEEL", tag)
        wheel.writestr("topkubetest-1.2.dist-info/RECORD", "")
    return buffer.getvalue()


def _create_config_map(namespace: Namespace, name: str, files: dict[str, bytes]) -> None:
    data = {key: base64.b64encode(value).decode() for key, value in files.items()}
    metadata = kubernetes.client.V1ObjectMeta(name=name)
    body = kubernetes.client.V1ConfigMap(metadata=metadata, binary_data=data)
    namespace.target.core.create_namespaced_config_map(namespace.name, body)


def add_up(value: float) -> None:
    import numpy as np

    import topkube

    topkube.init()
    array = np.full(4, value, np.float32)
    topkube.allreduce_(array, op="sum", algorithm="flat")
    print(f"rank {topkube.rank()} of {topkube.size()} has {array.tolist()}", flush=True)


def fail() -> None:
    raise ValueError("this is why")


def wait_forever() -> None:
    import time

    import topkube

    topkube.init()
    time.sleep(10_000)


def test_a_function_is_trained_followed_stopped_and_removed(namespace: Namespace) -> None:
    client = TrainingClient(namespace=namespace.name, kubeconfig=namespace.target.kubeconfig)
    name = client.train(add_up, arguments={"value": 1.5}, workers=2, image=RUNTIME.name, aggregation="dense")
    followed = list(client.logs(name, follow=True))
    job = client.wait(name, 180, show=False)
    assert job.status is not None
    assert job.status.phase == "Succeeded"
    for rank in range(2):
        line = f"[worker{rank}.rank{rank}] rank {rank} of 2 has [3.0, 3.0, 3.0, 3.0]"
        assert line in followed
        assert line in list(client.logs(name))
    assert [listed.name for listed in client.list()] == [name]
    client.delete(name)
    with pytest.raises(ClusterError, match=f"there is no TrainingJob {name}"):
        client.get(name)
    failed = client.train(fail, image=RUNTIME.name, spec={"runPolicy": {"backoffLimit": 0}})
    with pytest.raises(LaunchError, match="this is why"):
        client.wait(failed, 180, show=False)


def test_a_function_is_suspended_and_resumed(namespace: Namespace) -> None:
    client = TrainingClient(namespace=namespace.name, kubeconfig=namespace.target.kubeconfig)
    name = client.train(wait_forever, image=RUNTIME.name, spec={"launcher": {"colocate": True}})
    namespace.wait_phase(name, "Running", seconds=180)
    client.suspend(name)
    assert not namespace.list_pods(job=name)
    client.resume(name)
    namespace.wait_phase(name, "Running", seconds=180)
    with pytest.raises(TimeoutError, match=f"{name} is still Running after 0.1 s"):
        client.wait(name, 0.1, show=False)
    client.delete(name)


def test_a_folder_is_sent_trained_with_and_removed_with_its_job(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "words.py").write_text("WORD = 'trains'\n")
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    location = ["--namespace", namespace.name, "--kubeconfig", str(namespace.target.kubeconfig)]
    words = ["train.py", "--workers", "2", "--slots", "2", "--sync", ".", "--image", RUNTIME.name, *location]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_app(["submit", "--follow", "--timeout", "180", *words, "--", "--epochs", "3"])
    assert code == 0, out.getvalue() + err.getvalue()
    for rank in range(4):
        assert f"rank {rank} of 4 trains ['--epochs', '3'] in /var/lib/topkube/source" in out.getvalue()
    config_maps = namespace.target.core.list_namespaced_config_map

    def list_own_config_maps() -> list[Any]:
        return [item for item in config_maps(namespace.name).items if item.metadata.name.startswith("train-source-")]

    [stored] = list_own_config_maps()
    assert [owner.name for owner in stored.metadata.owner_references] == ["train"]
    assert run_app(["submit", *words, "--", "--epochs", "3"]) == 0, "the same job again changes nothing"
    assert len(list_own_config_maps()) == 1
    namespace.delete("train")
    wait_for(lambda: not list_own_config_maps(), "the ConfigMap to be removed with its job")


def test_packages_are_installed_without_a_network_for_any_user(namespace: Namespace) -> None:
    _create_config_map(namespace, "code", {"train.py": USES_PACKAGE.encode(), "wheel": _build_wheel()})
    items = [
        {"key": "train.py", "path": "train.py"},
        {"key": "wheel", "path": "wheels/topkubetest-1.2-py3-none-any.whl"},
    ]
    description = build_job(
        "packages",
        ["python", "train.py"],
        workers=2,
        source={"configMap": {"name": "code", "items": items}},
        setup={"requirements": ["topkubetest>=1", "numpy"], "wheels": "wheels"},
    )
    container = description["spec"]["template"]["spec"]["containers"][0]
    container["securityContext"] = {"runAsUser": 123456, "runAsGroup": 123456, "readOnlyRootFilesystem": True}
    namespace.create(description)
    namespace.wait_phase("packages", "Succeeded", seconds=180)
    for rank in range(2):
        assert f"rank {rank} has 1.2 as user 123456" in _read_logs(namespace)


def test_an_archive_with_another_checksum_fails_the_job_and_is_named_in_its_status(namespace: Namespace) -> None:
    _create_config_map(namespace, "code", {"source.tar.gz": b"something else"})
    source = {"configMap": {"name": "code", "archive": "source.tar.gz", "sha256": "0" * 64}}
    namespace.create(build_job("other", ["python", "train.py"], workers=2, source=source))
    status = namespace.wait_phase("other", "Failed", seconds=180)
    assert status["firstFailure"]["reason"] == "SourceInvalid"
    assert "spec.source.configMap.sha256 is 000" in status["firstFailure"]["message"]
    assert status["restarts"] == 0


def test_a_config_map_that_comes_late_is_waited_for(namespace: Namespace) -> None:
    name = namespace.create(
        build_job("late", ["python", "train.py"], workers=1, source={"configMap": {"name": "code"}})
    )
    wait_for(lambda: namespace.list_pods("worker", name), "the worker's pod")
    _create_config_map(namespace, "code", {"train.py": b"print('it came')\n"})
    namespace.wait_phase(name, "Succeeded", seconds=240)
    assert "it came" in _read_logs(namespace)
