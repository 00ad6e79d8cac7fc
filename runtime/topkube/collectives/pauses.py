"""The pauses of waits for messages between nodes.

A wait that checks its messages uses processor time, which the computation of gradients may need. While the wait sleeps,
the buffers of a connection hold what arrives. So it sleeps for as long as the link needs to fill them.
"""

from __future__ import annotations

from topkube.world import World

_BUFFERED_BYTES = 256 << 10
"""What the buffers of a connection hold at least."""
_SHORTEST, _LONGEST = 1e-3, 4e-3
"""The bounds of a pause, in seconds, while other work of the step continues."""
_HURRY = 8
"""A wait that delays the step checks this many times more often."""
_RATE = "bytes per second between nodes"


def choose_pause(world: World, delays_step: bool = False) -> float:
    """Return the seconds that a wait for messages between nodes may sleep, given the highest rate that this rank has
    seen. A slow rank cannot lower the rate, because longer sleeps would make it slower. `delays_step` is True if no
    other work of the step continues during the wait."""
    rate = world.cache.get(_RATE)
    pause: float = _SHORTEST if rate is None else max(_SHORTEST, min(_LONGEST, _BUFFERED_BYTES / rate))
    return pause / _HURRY if delays_step else pause


def note_rate(world: World, sent: int, seconds: float) -> None:
    """Note that this rank has sent `sent` bytes to other nodes in `seconds`. Short messages show the latency, not the
    rate: they do not count."""
    if sent >= _BUFFERED_BYTES:
        world.cache[_RATE] = max(sent / max(seconds, 1e-9), world.cache.get(_RATE, 0.0))
