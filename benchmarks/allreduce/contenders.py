"""The contenders as their ranks run them. Each sums a float32 array over all ranks and returns the sum."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Collective = Callable[[Floats], Any]


class _Mpi:
    """mpi4py with the MPI of this environment, initialised with threads as in training."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank = self.comm.rank
        self.barrier: Callable[[], None] = self.comm.Barrier

    def build_collective(self, contender: str, density: float) -> Collective:
        if contender == "dense":
            return self._reduce_dense
        if contender == "topk-allgather":
            return lambda work: self._reduce_topk(work, density)
        raise ValueError(contender)

    def _reduce_dense(self, work: Floats) -> Floats:
        self.comm.Allreduce(self.mpi.IN_PLACE, work)
        return work

    def _reduce_topk(self, work: Floats, density: float) -> Floats:
        """Sum with torch.topk and two all-gathers of equal length: no codec, no hierarchy, 8 bytes per entry."""
        import torch

        torch.set_num_threads(1)
        indices, values = _select_with_torch(torch.from_numpy(work), density)
        all_indices = np.empty(indices.numel() * self.comm.size, np.int32)
        all_values = np.empty(values.numel() * self.comm.size, np.float32)
        self.comm.Allgather(indices.numpy(), all_indices)
        self.comm.Allgather(values.numpy(), all_values)
        return _densify(torch.from_numpy(work), torch.from_numpy(all_indices), torch.from_numpy(all_values))

    def take_phases(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.mpi.Finalize()


class _Mpich(_Mpi):
    """The all-reduce of MPICH, and TopKube's over MPICH."""

    def __init__(self) -> None:
        super().__init__()
        import topkube

        topkube.init()
        self.topkube = topkube

    def build_collective(self, contender: str, density: float) -> Collective:
        algorithm, _, wire = contender.removeprefix("topkube:").partition("/")
        if not contender.startswith("topkube:"):
            return super().build_collective(contender, density)
        return lambda work: self.topkube.allreduce_(
            work, op="sum", algorithm=algorithm, density=density, wire=wire or "fp32"
        )

    def take_phases(self) -> dict[str, float]:
        from topkube.telemetry import phases

        spent = phases.current.take()
        return {**spent.seconds, "intra_bytes": spent.intra_bytes, "inter_bytes": spent.inter_bytes}


class _Gloo:
    """torch.distributed over gloo."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank = dist.get_rank()

    def barrier(self) -> None:
        self.dist.barrier()

    def build_collective(self, contender: str, density: float) -> Collective:
        if contender == "dense":
            return self._reduce_dense
        if contender == "topk-allgather":
            return lambda work: self._reduce_topk(work, density)
        raise ValueError(contender)

    def _reduce_dense(self, work: Floats) -> Floats:
        self.dist.all_reduce(self.torch.from_numpy(work))
        return work

    def _reduce_topk(self, work: Floats, density: float) -> Floats:
        indices, values = _select_with_torch(self.torch.from_numpy(work), density)
        # One message instead of two: the indices are sent as the bits of floats.
        packed = self.torch.cat([indices.view(self.torch.float32), values])
        gathered = self.torch.empty(packed.numel() * self.dist.get_world_size())
        self.dist.all_gather_into_tensor(gathered, packed)
        parts = gathered.view(-1, 2, values.numel())
        return _densify(
            self.torch.from_numpy(work), parts[:, 0].contiguous().view(self.torch.int32), parts[:, 1].contiguous()
        )

    def take_phases(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.dist.destroy_process_group()


def _select_with_torch(work: Any, density: float) -> tuple[Any, Any]:
    import math

    k = max(1, math.ceil(density * work.numel()))
    indices = work.abs().topk(k, sorted=False).indices
    return indices.int(), work[indices]


def _densify(dense: Any, indices: Any, values: Any) -> Floats:
    dense.zero_()
    result: Floats = dense.index_add_(0, indices.reshape(-1), values.reshape(-1)).numpy()
    return result


BACKENDS: dict[str, Callable[[], Any]] = {"mpich": _Mpich, "openmpi": _Mpi, "gloo": _Gloo}
