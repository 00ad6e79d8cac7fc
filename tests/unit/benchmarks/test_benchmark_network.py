"""The benchmark's nodes: separate machines with links of the stated speed, which end with their owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allreduce import network, probes, scratch
from allreduce.network import Network, NetworkError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
_REASON = network.explain_why_unavailable()
as_root = pytest.mark.skipif(_REASON is not None, reason=f"{_REASON}")


def run_inside(node: network.Node, command: str) -> str:
    done = subprocess.run(node.wrap_command(["sh", "-c", command]), capture_output=True, text=True, check=True)
    return done.stdout.strip()


@as_root
def test_links_have_the_stated_speed_and_count_the_bytes_that_cross_them() -> None:
    size = 1_000_000
    with Network(2, "100mbit") as pair:
        before = pair.read_traffic()
        probes.time_link(pair, [size])
        moved = [late - early for early, late in zip(before, pair.read_traffic(), strict=True)]
        for traffic in moved:  # five exchanges, both directions, headers on top
            assert 5 * size < traffic.sent < 5.5 * size
            assert 5 * size < traffic.received < 5.5 * size
        seconds = measure_fastest(pair, size)
        assert 0.95 * size * 8 / 100e6 < seconds < 4 * size * 8 / 100e6
        pair.shape("1gbit")
        assert measure_fastest(pair, size) < seconds / 2


def measure_fastest(pair: Network, size: int) -> float:
    """Return the shortest time of a few exchanges: other programs may use the processor, and no exchange is faster than
    the link."""
    return min(probes.time_link(pair, [size])["seconds"][0] for _ in range(3))


@as_root
def test_nodes_share_nothing_but_the_link() -> None:
    with Network(2) as pair:
        first, second = pair.nodes
        assert [run_inside(node, "hostname") for node in pair.nodes] == ["node0", "node1"]
        run_inside(first, "touch /dev/shm/window")
        assert run_inside(first, "ls /dev/shm") == "window"
        assert run_inside(second, "ls /dev/shm") == ""
        assert not Path("/dev/shm/window").exists()
        devices = run_inside(first, "cut -d: -f1 /proc/net/dev | tail -n +3").split()
        assert sorted(devices) == ["eth0", "lo"]


@as_root
def test_nothing_outlives_a_killed_owner() -> None:
    script = (
        "import subprocess; from allreduce.network import Network\n"
        "pair = Network(2, '1gbit')\n"
        "subprocess.Popen(pair.nodes[0].wrap_command(['sleep', '600']))\n"
        "print(*(node.pid for node in [*pair.nodes, pair.control]), flush=True)\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
    )  # fmt: skip
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert owner.stdin is not None
    owner.stdin.close()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a node outlived its owner"
        time.sleep(0.01)


def test_a_killed_run_leaves_its_directory_to_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    leftover, strangers = tmp_path / f"topkube-allreduce-{ended.pid}-1234-x", tmp_path / "topkube-allreduce-notes"
    with scratch.create_scratch() as directory:
        running = tmp_path / directory.name
        for path in (leftover, strangers, running):
            path.mkdir()
        assert scratch.remove_leftovers(tmp_path) == [leftover]
    assert sorted(tmp_path.iterdir()) == sorted([strangers, running])
    assert not directory.exists()


def test_without_root_the_error_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="need root"):
        Network(2)


@as_root
def test_the_quick_run_measures_and_checks_every_contender(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "allreduce" / "run.py",
            "--quick",
            "--part",
            "2x2",
            "--json",
            tmp_path / "out.json",
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {"MPICH", "gloo", "TopKube hierarchical", "TopKube hitopk 1%"} <= {row["contender"] for row in rows}
    for row in rows:
        assert row["sent_mb"] >= row["formula_mb"] * 0.95, f"{row['contender']}: its bytes did not cross the link"
