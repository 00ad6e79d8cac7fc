"""Calls of a script besides training: barriers, metrics over all ranks, objects sent to other ranks, sub-worlds.

`calls` has the calls, `numbers` converts the values that they add up, `ordered` adds them up in rank order.
"""

from topkube.collectives.coordination.calls import (
    allgather,
    barrier,
    broadcast_object,
    gather_object,
    new_world,
    reduce,
)

__all__ = ["allgather", "barrier", "broadcast_object", "gather_object", "new_world", "reduce"]
