"""These tests run the code for CUDA tensors with CPU tensors. Inside the node, torch.distributed exchanges the data
with gloo in place of NCCL. The cases of training are in ranks/device.py, those of single all-reduces in
ranks/device_engine.py, and those of error feedback in the weights in ranks/training/onebit_devices.py."""

from __future__ import annotations

import pytest
from worlds import list_parameters

MODULES = "device,device_engine,training.onebit_devices"
LAYOUTS: dict[str, list[tuple[int, ...]]] = {"mpich": [(1,), (2, 2), (2, 1)]}
"""The worlds of each MPI: the number of ranks on each node."""


WEIGHTS = "training.onebit_devices"
EIGHT_NODES: dict[str, list[tuple[int, ...]]] = {"mpich": [(1,) * 8, (2,) + (1,) * 7]}
"""From eight nodes on, onebit exchanges in two stages. With nodes of different sizes, one rank has no shard."""


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(MODULES, LAYOUTS))
def test_device(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(MODULES, mpi, layout, case)), problem


@pytest.mark.parametrize(("mpi", "layout", "case"), list_parameters(WEIGHTS, EIGHT_NODES))
def test_weights_of_eight_nodes(outcome, mpi: str, layout: tuple[int, ...], case: str) -> None:
    assert not (problem := outcome(WEIGHTS, mpi, layout, case)), problem
