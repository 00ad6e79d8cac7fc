"""The cluster of this machine behaves as the recovery tests expect."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from localkube.apt_sources import read_debian_sources
from localkube.cgroups import Group
from localkube.cluster import LocalCluster, stop_cluster
from localkube.daemons import Daemon, run, wait_until
from localkube.images import RUNTIME
from localkube.layout import Layout
from target import Namespace, wait_for

SCRATCH = Layout(9)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="cgroups and network namespaces need root")


@needs_root
def test_only_the_remains_of_an_interrupted_run_are_removed(tmp_path: Path) -> None:
    """A daemon with children that ignore SIGTERM, a bridge and a state folder are removed. A process outside the cgroup
    with the same command stays."""
    stop_cluster(SCRATCH)
    script = "trap '' TERM; sleep 1000 & sleep 1000"
    daemon = Daemon("left", Group(SCRATCH.name) / "node1/system/left", SCRATCH.state / "left.log", ["sh", "-c", script])
    stranger = subprocess.Popen(["sh", "-c", script])
    try:
        daemon.start()
        wait_until(lambda: len(daemon.group.list_processes()) == 3, "the daemon and its children")
        run("ip", "link", "add", SCRATCH.name, "type", "bridge")
        stop_cluster(SCRATCH)
        assert daemon.group.list_processes() == set()
        assert not daemon.group.directory.exists()
        assert not SCRATCH.state.exists()
        assert SCRATCH.name not in run("ip", "link")
        assert stranger.poll() is None
    finally:
        subprocess.run(["pkill", "-P", str(stranger.pid)], check=False)
        stranger.kill()
        stranger.wait()


@needs_root
def test_killing_a_group_leaves_no_child_behind() -> None:
    """Processes that fork without end are killed too, because they are frozen first."""
    multiply = "while :; do sleep 1000 & sleep 0.01; done"
    layout = Layout(7)  # not SCRATCH: both tests may run at once
    daemon = Daemon("many", Group(layout.name) / "many", layout.state / "many.log", ["sh", "-c", multiply])
    try:
        daemon.start()
        wait_until(lambda: len(daemon.group.list_processes()) > 10, "many processes")
        daemon.kill()
        assert daemon.group.list_processes() == set()
    finally:
        stop_cluster(layout)


def test_debians_sources_are_found_in_either_format(tmp_path: Path) -> None:
    """Other sources in the machine's lists are left out, because they may have no source packages."""
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    stanza = (
        "Types: deb\n# why\nURIs: http://a/debian\nSuites: trixie trixie-updates\nComponents: main\nSigned-By: /k\n"
    )
    (folder / "0.sources").write_text(f"{stanza}\nTypes: deb\nURIs: http://b\nSuites: nodistro\nComponents: main\n")
    (folder / "cloud.list").write_text("deb http://c cloud-trixie main\n")
    (tmp_path / "sources.list").write_text(
        "deb [arch=amd64 signed-by=/s] http://d/security trixie-security main  # x\n"
    )
    sources = read_debian_sources("deb-src", tmp_path, "trixie")
    assert sources.split("\n\n") == [
        "Types: deb-src\nURIs: http://a/debian\nSuites: trixie trixie-updates\nComponents: main\nSigned-By: /k",
        "Types: deb-src\nURIs: http://d/security\nSuites: trixie-security\nComponents: main\nSigned-By: /s\n",
    ]
    with pytest.raises(RuntimeError, match="sid"):
        read_debian_sources("deb", tmp_path, "sid")


def start_two_pods(namespace: Namespace) -> list[str]:
    """Start two pods that serve HTTP, on node1 and node2. Return their addresses."""
    core, command = namespace.target.core, ["python", "-m", "http.server", "8000"]
    for node in ("node1", "node2"):
        container = {"name": "web", "image": RUNTIME.name, "command": command}
        spec = {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]}
        core.create_namespaced_pod(namespace.name, {"metadata": {"name": node}, "spec": spec})

    def list_addresses() -> list[str]:
        pods = core.list_namespaced_pod(namespace.name).items
        ready = [
            pod.status.pod_ip
            for pod in sorted(pods, key=lambda item: item.metadata.name)
            if pod.status.phase == "Running"
        ]
        return ready if len(ready) == 2 else []

    return wait_for(list_addresses, "two pods", 60)


def can_fetch(namespace: Namespace, address: str, seconds: float) -> bool:
    """Return True if the pod on node1 gets an answer from `address`."""
    target = namespace.target
    assert target.local is not None
    code = f"import urllib.request as u; u.urlopen('http://{address}:8000', timeout={seconds}).read()"
    words = ("-n", namespace.name, "exec", "node1", "--", "python", "-c", code)
    line = [str(target.local.kubectl_program), f"--kubeconfig={target.kubeconfig}", *words]
    return subprocess.run(line, capture_output=True).returncode == 0


@pytest.mark.alone
def test_links_can_be_cut_and_mended(namespace: Namespace, breakable_cluster: LocalCluster) -> None:
    _, second = start_two_pods(namespace)
    wait_for(lambda: can_fetch(namespace, second, 5), "the pods to reach each other", 30)
    breakable_cluster.cut("node1", "node2")
    try:
        assert not can_fetch(namespace, second, 2)
    finally:
        breakable_cluster.mend("node1", "node2")
    wait_for(lambda: can_fetch(namespace, second, 5), "the pods to reach each other again", 30)


@pytest.mark.alone
def test_shaped_links_have_the_chosen_rate(namespace: Namespace, breakable_cluster: LocalCluster) -> None:
    """2.5 MB over 20 Mbit/s take a second."""
    _, second = start_two_pods(namespace)
    target = namespace.target
    write_file = "head -c 2500000 /dev/zero >/tmp/zeros"
    line = [str(breakable_cluster.kubectl_program), f"--kubeconfig={target.kubeconfig}", "-n", namespace.name, "exec"]
    subprocess.run([*line, "node2", "--", "sh", "-c", write_file], check=True)
    wait_for(lambda: can_fetch(namespace, second, 5), "the pods to reach each other", 30)
    code = (
        "import time,urllib.request as u; began=time.monotonic();"
        f"u.urlopen('http://{second}:8000/zeros', timeout=60).read(); print(time.monotonic()-began)"
    )
    breakable_cluster.shape("20mbit")
    try:
        done = subprocess.run([*line, "node1", "--", "python", "-c", code], check=True, capture_output=True, text=True)
        assert 0.8 < float(done.stdout) < 30, done.stdout
    finally:
        breakable_cluster.shape("off")
