"""The network devices of a rank: the devices next to its GPU, or no choice if the devices are uncertain."""

from __future__ import annotations

from pathlib import Path

import pytest

from topkube.launch.host.network_devices import list_network_variables

GPUS = {  # the address of each GPU, and the PCI bridges above it: two switches on one socket, one switch on another
    "0000:1b:00.0": "pci0000:17/0000:17:01.0/0000:18:00.0",
    "0000:43:00.0": "pci0000:40/0000:40:01.0/0000:41:00.0",
    "0000:9b:00.0": "pci0000:97/0000:97:01.0/0000:98:00.0",
}
NETWORK_DEVICES = {"mlx5_0": "0000:1b:00.0", "mlx5_1": "0000:43:00.0", "mlx5_2": "0000:9b:00.0"}


def _add_device(root: Path, link: Path, bridges: str, address: str, node: int) -> None:
    folder = root / "sys/devices" / bridges / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, (address, bridges) in enumerate(GPUS.items()):
        _add_device(tmp_path, tmp_path / "sys/bus/pci/devices" / address, bridges, address, number // 2)
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
    for number, (name, gpu) in enumerate(NETWORK_DEVICES.items()):
        device = tmp_path / "sys/class/infiniband" / name
        _add_device(tmp_path, device / "device", GPUS[gpu], gpu.replace("b:", "c:").replace("3:", "4:"), number // 2)
        _set_port(tmp_path, name, "4: ACTIVE")
    return tmp_path


def _set_port(root: Path, name: str, state: str) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(f"{state}\n")


def _build_variables(local: int, size: int = 3) -> dict[str, str]:
    return {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}


def test_each_rank_uses_the_device_behind_the_switch_of_its_gpu(root: Path) -> None:
    chosen = [list_network_variables(_build_variables(local), {}, root) for local in range(3)]
    assert chosen == [{"UCX_NET_DEVICES": f"mlx5_{local}:1"} for local in range(3)]


def test_without_a_device_behind_its_switch_a_rank_uses_the_devices_of_its_numa_node(root: Path) -> None:
    _set_port(root, "mlx5_1", "1: DOWN")
    assert list_network_variables(_build_variables(1), {}, root) == {"UCX_NET_DEVICES": "mlx5_0:1"}


@pytest.mark.parametrize(
    ("rank", "environment"),
    [
        (_build_variables(0), {"UCX_NET_DEVICES": "all"}),
        (_build_variables(0), {"CUDA_VISIBLE_DEVICES": "2"}),
        (_build_variables(0, size=2), {}),
        ({}, {}),
    ],
    ids=["the user chose", "other GPUs", "fewer ranks than GPUs", "plain mpiexec"],
)
def test_an_uncertain_device_is_not_chosen(rank: dict[str, str], environment: dict[str, str], root: Path) -> None:
    assert list_network_variables(rank, environment, root) == {}


def test_a_single_device_and_a_machine_without_gpus_need_no_choice(root: Path, tmp_path: Path) -> None:
    for name in ("mlx5_1", "mlx5_2"):
        _set_port(root, name, "1: DOWN")
    assert list_network_variables(_build_variables(0), {}, root) == {}
    assert list_network_variables(_build_variables(0), {}, tmp_path / "nothing") == {}
