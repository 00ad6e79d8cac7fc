"""Ranks of several nodes joined through torch.distributed, for algorithms that NCCL carries between nodes.

They meet through a store of torch.distributed on the group's first rank. The store listens on one address, on a port
that the system chooses. NCCL then opens its own connections between all nodes; neither it nor the store authenticates
or encrypts them, so the network has to keep strangers away (docs/gpu.md).
"""

from __future__ import annotations

import datetime
import socket
from contextlib import suppress
from typing import Any

import numpy as np

from topkube.collectives.device.rank_group import RankGroup, count_distinct_names, refuse_mig
from topkube.errors import DeviceError
from topkube.world import World

_ADDRESS_BYTES = 256
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that no machine has (RFC 5737). The route to it leaves through the interface that other nodes know."""


def find_all_ranks_group(world: World, device: Any) -> SpanningGroup:
    """Return the group of all ranks for `device`, which is made once. All ranks call this together."""
    return _find_shared_group(world, device, "all ranks", world.comm)


def find_cross_group(world: World, device: Any) -> SpanningGroup:
    """Return the group of the ranks with this local rank on all nodes, which is made once. Surplus ranks do not call
    this; all others call it together."""
    return _find_shared_group(world, device, "equal ranks of all nodes", world.cross_comm)


def _find_shared_group(world: World, device: Any, name: str, comm: Any) -> SpanningGroup:
    key = f"group of {name} on {device}"
    if key not in world.cache:
        world.cache[key] = group = SpanningGroup(world, device, comm)
        world.at_end.append(group.close)
    shared: SpanningGroup = world.cache[key]
    return shared


class SpanningGroup(RankGroup):
    """The ranks of the MPI communicator `comm`."""

    def __init__(self, world: World, device: Any, comm: Any) -> None:
        super().__init__(world, device, comm.size, "an exchange between nodes")
        if self.size == 1:
            return
        if device.type == "cuda":
            import torch

            refuse_mig(torch.cuda.get_device_properties(device).name)
        listener = None
        address = np.zeros(_ADDRESS_BYTES, np.uint8)
        if _share_machine(world, comm):
            host = "127.0.0.1"
        else:
            host = find_own_address() if comm.rank == 0 else ""
        port = np.zeros(1, np.int64)
        if comm.rank == 0 and host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            port[0] = listener.getsockname()[1]
            address[: len(host)] = np.frombuffer(host.encode(), np.uint8)
        world.wait([comm.Ibcast(address), comm.Ibcast(port)], "the meeting of the ranks of all nodes")
        host = address.tobytes().rstrip(b"\0").decode()
        if not host:
            raise DeviceError(
                "the group's first rank has no address that other nodes can reach",
                cause="its host name resolves to a loopback address, and it has no route to other networks",
                next_step="give its host name an address of a network of all nodes, or choose the algorithm dense",
            )
        self._join(lambda: self._meet(host, int(port[0]), comm, listener), comm.rank)

    def _meet(self, host: str, port: int, comm: Any, listener: socket.socket | None) -> Any:
        """Return the store. The first rank serves it through its listener, which is open already."""
        deadline = datetime.timedelta(seconds=self._world.deadline_seconds)
        descriptor = listener.detach() if listener is not None else None
        options: dict[str, Any] = {"master_listen_fd": descriptor} if descriptor is not None else {}
        return self._distributed.TCPStore(
            host,
            port,
            comm.size,
            comm.rank == 0,
            deadline,
            wait_for_workers=False,
            **options,
        )


def _share_machine(world: World, comm: Any) -> bool:
    """Return True if all ranks of `comm` run on one machine, which may act as several nodes."""
    return count_distinct_names(world, comm, socket.gethostname(), "the meeting of the ranks of all nodes") == 1


def find_own_address() -> str:
    """Return an address of this machine that others can reach: that of its host name, as pods have it, or that of its
    route to other networks. Return "" if there is none."""
    candidates = []
    with suppress(OSError):  # the name is unknown
        candidates += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # there is no route
        probe.connect(_ELSEWHERE)  # sends nothing: it only chooses a route
        candidates.append(str(probe.getsockname()[0]))
    usable = [address for address in candidates if not address.startswith(("127.", "::1", "fe80"))]
    return usable[0] if usable else ""
