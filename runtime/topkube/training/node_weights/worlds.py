"""The worlds of an exchange of weights beside that of all ranks: the ranks of a node, and delayed exchanges."""

from __future__ import annotations

from functools import partial

from topkube.telemetry.trace import DELAYED_THREAD
from topkube.training.ranks import communication_thread
from topkube.world import World, create_sub_world


def find_node_world(world: World) -> World:
    """Return the world of the ranks of this rank's node. All ranks create it together, on first use."""
    if world.nodes == 1:
        return world
    existing: World | None = world.cache.get("world of the node")
    if existing is None:
        for ranks in world.node_ranks:
            existing = create_sub_world(world, ranks) or existing
        assert existing is not None
        world.cache["world of the node"] = existing
    return existing


def find_delayed_world(world: World) -> World:
    """Return the world of the delayed exchanges among the ranks of `world`. All ranks create it together, on first
    use."""
    existing: World | None = world.cache.get("world of delayed exchanges")
    if existing is None:
        existing = world.cache["world of delayed exchanges"] = create_sub_world(
            world, range(world.size), has_window=False
        )
        assert existing is not None
        existing.at_end.append(partial(communication_thread.finish, DELAYED_THREAD))
    return existing
