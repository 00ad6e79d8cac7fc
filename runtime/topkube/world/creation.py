"""The creation of worlds: the communicators and the shared memory that MPI makes for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from topkube.algorithms.cost import list_partners
from topkube.control import Control
from topkube.errors import WorldError
from topkube.links import LinkChoice, open_links
from topkube.mpi_start import agree_on_window, allow_long_messages, explain_mpi_errors, free_handles, share_window
from topkube.topology import find_nodes_of_ranks, group_by_home
from topkube.world.world import World, open_worlds


def create_sub_world(parent: World, ranks: Sequence[int], has_window: bool = True) -> World | None:
    """Return the world of `ranks` of `parent`, in their order, on these ranks, and None on other ranks. All ranks of
    `parent` must call this function; `topkube.new_world` first checks that they agree. A world without a window
    (`has_window`) needs no shared memory; its ranks exchange between nodes only."""
    from mpi4py import MPI

    member = {rank: number for number, rank in enumerate(ranks)}
    with explain_mpi_errors(MPI):
        comm = parent.comm.Split(0 if parent.rank in member else MPI.UNDEFINED, member.get(parent.rank, 0))
    if comm == MPI.COMM_NULL:
        return None
    homes = find_nodes_of_ranks(parent.node_ranks)
    world = create_world(
        MPI,
        comm,
        [homes[rank] for rank in ranks],
        parent.translate_ranks(ranks),
        has_window=has_window,
        is_sub_world=True,
        deadline_seconds=parent.deadline_seconds,
        run_directory=parent.run_directory,
        heartbeat=parent.heartbeat,
        crowding=parent.crowding,
        threads=parent.threads,
        host_rank=parent.host_rank,
        host_size=parent.host_size,
        link_choice=parent.link_choice.select(ranks),
    )
    open_worlds.parts.append(world)
    return world


def create_world(
    MPI: Any,
    comm: Any,
    homes: Sequence[int],
    members: tuple[int, ...],
    crowding: float,
    link_choice: LinkChoice,
    has_window: bool = True,
    is_sub_world: bool = False,
    **more: Any,
) -> World:
    """Return the world of all ranks of `comm`; `homes` has the node of each rank. All ranks must call this function."""
    node_ranks = group_by_home(homes)
    node = find_nodes_of_ranks(node_ranks)[comm.rank]
    shards = min(map(len, node_ranks))
    comm = allow_long_messages(MPI, comm)
    handles, window, links = [comm], np.zeros(0, np.uint8), None
    try:
        with explain_mpi_errors(MPI):
            handles.append(node_comm := allow_long_messages(MPI, comm.Split(node, comm.rank)))
            window_bytes = agree_on_window(MPI, comm, node_comm, is_sub_world) if has_window else 0
            # By node: the rank of a node among the others is its number for all local ranks, in whatever order ranks
            # come.
            cross = comm.Split(node_comm.rank if node_comm.rank < shards else MPI.UNDEFINED, node)
            if cross != MPI.COMM_NULL:
                handles.append(cross := allow_long_messages(MPI, cross))
            control, agreement, calls_comm = duplicates = [comm.Dup() for _ in range(3)]
            handles += duplicates
            if has_window:
                window, handle = share_window(MPI, node_comm, window_bytes)
                handles += [handle] if handle is not None else []
    except WorldError:
        free_handles(handles[::-1])
        raise
    if cross != MPI.COMM_NULL:
        equals = [ranks[node_comm.rank] for ranks in node_ranks]
        links = open_links(cross, equals, link_choice, list_partners(cross.rank, cross.size))
    world = World(
        comm=comm,
        node_comm=node_comm,
        cross_comm=None if cross == MPI.COMM_NULL else cross,
        rank=comm.rank,
        size=comm.size,
        local_rank=node_comm.rank,
        local_size=node_comm.size,
        node=node,
        nodes=len(node_ranks),
        shards=shards,
        node_ranks=node_ranks,
        control=Control(control, crowding),
        agreement=agreement,
        calls_comm=calls_comm,
        window=window,
        handles=handles,
        members=members,
        crowding=crowding,
        link_choice=link_choice,
        links=links,
        **more,
    )
    if links is not None:
        world.at_end.append(links.close)
    return world
