"""The network devices next to a rank's GPU. A message from a GPU to a distant device crosses the link between the
sockets.

Only RDMA devices are chosen, and only if a node has several. A pod's Ethernet device has no PCI address, and a wrong
choice would disconnect the rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

UCX_DEVICES = "UCX_NET_DEVICES"
"""The variable by which MPI libraries on UCX, as Open MPI and MPICH can be, are limited to network devices."""


def list_network_variables(
    rank: Mapping[str, str], environment: Mapping[str, str], root: Path = Path("/")
) -> dict[str, str]:
    """Return UCX_NET_DEVICES for a rank with the variables LOCAL_RANK and LOCAL_WORLD_SIZE: the active ports of the
    RDMA devices that are nearest to its GPU, such as {"UCX_NET_DEVICES": "mlx5_2:1"}.

    Return an empty dictionary if the variable is set already, if the node has fewer than two active devices, or if it
    is unknown which GPU the rank takes: ranks and visible GPUs differ in number, or CUDA_VISIBLE_DEVICES is set. `root`
    is the root of /proc and /sys."""
    gpus = find_gpus(root)
    local, size = rank.get("LOCAL_RANK", ""), rank.get("LOCAL_WORLD_SIZE", "")
    if UCX_DEVICES in environment or "CUDA_VISIBLE_DEVICES" in environment or not gpus or size != str(len(gpus)):
        return {}
    ports = _find_active_ports(root)
    if len(ports) < 2:
        return {}
    nearest = find_nearest_devices(gpus[int(local)], list(ports), root)
    return {UCX_DEVICES: ",".join(port for name in nearest for port in ports[name])} if nearest else {}


def find_gpus(root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of the GPUs that this process sees, in ascending order, in which CUDA numbers equal
    GPUs."""
    return sorted(_list_names(root / "proc/driver/nvidia/gpus"))


def find_nearest_devices(gpu: str, devices: list[str], root: Path = Path("/")) -> list[str]:
    """Return the RDMA devices, among `devices`, that share the most PCI bridges with the GPU at the address `gpu`. If
    none shares a bridge, return those of its NUMA node. Return an empty list if all devices are at the same
    distance."""
    gpu_device = root / "sys/bus/pci/devices" / gpu
    if not gpu_device.exists():
        return []
    places = {name: root / "sys/class/infiniband" / name / "device" for name in devices}
    shared = {name: _count_shared_bridges(gpu_device, place) for name, place in places.items()}
    same_node = {name: _find_node(place) == _find_node(gpu_device) for name, place in places.items()}
    closeness = {name: (shared[name], same_node[name]) for name in devices}
    if len(set(closeness.values())) < 2:
        return []
    best = max(closeness.values())
    return sorted(name for name in devices if closeness[name] == best)


def _count_shared_bridges(first: Path, second: Path) -> int:
    """Return the number of PCI bridges above both devices. A root bus ("pci0000:3a") is not a bridge."""
    pairs = zip(os.path.realpath(first).split("/"), os.path.realpath(second).split("/"), strict=False)
    count = 0
    for part, other in pairs:
        if part != other:
            break
        count += part.count(":") == 2
    return count


def _find_node(device: Path) -> str:
    try:
        return (device / "numa_node").read_text().strip()
    except OSError:
        return ""


def _find_active_ports(root: Path) -> dict[str, list[str]]:
    """Return the active ports of each RDMA device that has one: {"mlx5_0": ["mlx5_0:1"]}."""
    devices: dict[str, list[str]] = {}
    for name in _list_names(root / "sys/class/infiniband"):
        ports = root / "sys/class/infiniband" / name / "ports"
        for port in _list_names(ports):
            try:
                is_active = "ACTIVE" in (ports / port / "state").read_text()
            except OSError:
                continue
            if is_active:
                devices.setdefault(name, []).append(f"{name}:{port}")
    return devices


def _list_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
