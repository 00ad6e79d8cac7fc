"""The line of `topkube doctor` about the cluster, with a kubectl that answers, is refused, or reaches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from topkube.cli.cluster.api import ClusterLocation
from topkube.cli.doctor.cluster import check_cluster


@pytest.mark.parametrize(
    ("script", "state", "words"),
    [
        ('echo \'{"serverVersion": {"gitVersion": "v1.30.1"}}\'', "ok", "Kubernetes v1.30.1"),
        (
            "echo '{}'; echo warning >&2; echo 'error: You must be logged in to the server (Unauthorized)' >&2; exit 1",
            "warn",
            "the cluster cannot be used: error: You must be logged in to the server (Unauthorized)",
        ),
        ("exit 1", "warn", "the cluster cannot be used: kubectl prints no version of a server"),
    ],
)
def test_the_reason_why_a_cluster_cannot_be_used_is_kubectls(
    script: str, state: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl, config = tmp_path / "kubectl", tmp_path / "config"
    kubectl.write_text(f"#!/bin/sh\n{script}\n")
    kubectl.chmod(0o755)
    config.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("KUBECONFIG", str(config))
    [check] = check_cluster(ClusterLocation())
    assert check.state == state
    assert check.message.endswith(words)


def test_the_cluster_of_the_options_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, doctor reported the default cluster as well, whatever the options named."""
    kubectl, config = tmp_path / "kubectl", tmp_path / "mine"
    kubectl.write_text('#!/bin/sh\necho "{\\"serverVersion\\": {\\"gitVersion\\": \\"$*\\"}}"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    [check] = check_cluster(ClusterLocation(config, "other"))
    assert check.state == "ok"
    assert check.message.endswith(f"--kubeconfig={config} --context=other")
