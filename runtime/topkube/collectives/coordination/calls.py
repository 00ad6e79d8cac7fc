"""The calls of a script besides training: barriers, metrics over all ranks, objects sent to other ranks, sub-worlds.

All ranks of a world call the same function with arguments that fit together, in the same order. Every call compares a
hash of its name and arguments first, so that ranks which call different things get a MismatchError that shows who
called what. The calls have a communicator and a count of their own: they may be made while the communication thread
exchanges gradients. Objects travel as pickles, among the ranks of one job only.
"""

from __future__ import annotations

import operator
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from topkube.arrays import is_tensor, refuse_masked
from topkube.collectives.coordination.numbers import Reducible
from topkube.collectives.coordination.ordered import fold
from topkube.collectives.mismatch import describe_ranks
from topkube.control import name_ranks
from topkube.errors import ArgumentError, CollectiveError, MismatchError
from topkube.world import WaitSeries, World, create_sub_world, current

CHUNK = 64 << 20
"""Bytes of a message, and of the data of all ranks in a round of `allgather`."""
_TAG = 1
_OPS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}

Bytes = npt.NDArray[np.uint8]


def barrier(*, world: World | None = None) -> None:
    """Return when all ranks have called `barrier`. Raises CollectiveTimeout, which names the ranks that did not call
    it."""
    with _enter_call(world, "barrier()"):
        pass


def reduce(value: Any, op: str = "sum", *, world: World | None = None) -> Any:
    """Return the "sum", "mean", "min" or "max" of `value` over all ranks, to every rank (Horovod's `allreduce`).

    `value` is a number, a NumPy array or a torch tensor (any device), of the same shape and type on all ranks; it is
    not changed. Floating-point values are added in float64, in rank order: the same bits on all ranks. The result has
    `value`'s type, except that sums of integers are int64, and their means float64. Integer sums are exact.
    A NaN anywhere makes the result NaN. Raises ArgumentError for other types, and if a sum exceeds int64.
    """
    if op not in _OPS:
        raise ArgumentError(f"op is {op!r}", next_step=f"choose one of {', '.join(_OPS)}")
    reducible = Reducible(value, op)
    with _enter_call(world, f"reduce(op={op})", reducible.description) as world:
        what = f"reduce(op={op})"
        return reducible.restore(
            fold(world, world.calls_comm, reducible.sent, WaitSeries.CALL, what, _OPS[op]), world.size
        )


def allgather(array: Any, *, world: World | None = None) -> Any:
    """Return the arrays of all ranks joined along their first dimension, in rank order, to every rank (Horovod's
    `allgather`).

    `array` is a number, a NumPy array or a torch tensor; the first dimension may differ from rank to rank, also be 0,
    the type and the other dimensions may not. Numbers and arrays without dimensions give one entry per rank. The result
    is of the same kind as `array`, on the same device.
    """
    tensor = is_tensor(array)
    refuse_masked(array, "array")
    source: Any = array if tensor else np.asarray(array)
    if not tensor and source.dtype.hasobject:
        raise ArgumentError("allgather takes numbers", next_step="use topkube.gather_object for other objects")
    source = source.reshape(1) if source.ndim == 0 else source
    row_shape = tuple(source.shape[1:])
    kind = f"{'tensor' if tensor else 'array'} dtype={source.dtype} shape=(*, {', '.join(map(str, row_shape))})"
    with _enter_call(world, "allgather()", kind) as world:
        host = (
            source.detach().resolve_conj().resolve_neg().contiguous().cpu() if tensor else np.ascontiguousarray(source)
        )
        raw: Bytes = _view_tensor_bytes(host) if tensor else host.reshape(-1).view(np.uint8)
        lengths = _gather_numbers(world, [source.shape[0], raw.size], "allgather()")
        joined = _gather_bytes(world, raw, lengths[:, 1], "allgather()")
        shape = (int(lengths[:, 0].sum()), *row_shape)
        if not tensor:
            return joined.view(source.dtype).reshape(shape)
        import torch

        result = torch.empty(shape, dtype=source.dtype)
        _view_tensor_bytes(result)[:] = joined
        return result.to(source.device)


def broadcast_object(obj: Any, root: int = 0, *, world: World | None = None) -> Any:
    """Return the `obj` of rank `root` on every rank: the object itself on the root, a copy on the other ranks. The
    `obj` of other ranks is ignored. Raises ArgumentError on all ranks if pickle refuses the object."""
    world = world or current()
    _check_root(world, root)
    with _enter_call(world, f"broadcast_object(root={root})") as world:
        what = f"broadcast_object(root={root})"
        payload, problem = _pickle(obj) if world.rank == root else (np.empty(0, np.uint8), "")
        header = np.array([payload.size, bool(problem)], np.int64)
        world.wait([world.calls_comm.Ibcast(header, root=root)], what, series=WaitSeries.CALL)
        if header[1]:
            raise _explain_unsendable(world, [root], problem)
        if world.rank != root:
            payload = np.empty(int(header[0]), np.uint8)
        for start in range(0, payload.size, CHUNK):
            piece = payload[start : start + CHUNK]
            world.wait([world.calls_comm.Ibcast(piece, root=root)], what, series=WaitSeries.CALL)
        return obj if world.rank == root else pickle.loads(payload.data)


def gather_object(obj: Any, root: int = 0, *, world: World | None = None) -> list[Any] | None:
    """Return the objects of all ranks, in rank order, on rank `root`, and None on the other ranks. Objects are anything
    that pickle accepts. Raises ArgumentError on all ranks if pickle refuses an object."""
    world = world or current()
    _check_root(world, root)
    with _enter_call(world, f"gather_object(root={root})") as world:
        what = f"gather_object(root={root})"
        payload, problem = _pickle(obj)
        rows = _gather_numbers(world, [payload.size, bool(problem)], what)
        if rows[:, 1].any():
            raise _explain_unsendable(world, np.flatnonzero(rows[:, 1]).tolist(), problem)
        payloads = _gather_to_root(world, payload, rows[:, 0].tolist(), root, what)
        if world.rank != root:
            return None
        return [obj if rank == root else pickle.loads(pickled.data) for rank, pickled in enumerate(payloads)]


def new_world(ranks: Sequence[int]) -> World | None:
    """Return a world of `ranks`, in their order, to these ranks, and None to others. (torch calls this a new group.)

    All ranks call it, also those that are no members, with the same `ranks`. Pass the world to the functions here and
    to `allreduce_` as `world=`. It has communicators, shared memory and counts of its own, so that disjoint worlds work
    at the same time; errors name ranks by their numbers in the world of all ranks. It lives until its ranks call its
    `close()`, or until `topkube.shutdown()`. Raises ArgumentError for ranks that do not exist or occur twice, and
    WorldError if /dev/shm or MPI has no room for another world.
    """
    parent = current()
    chosen = [operator.index(rank) for rank in ranks]
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) >= parent.size:
        raise ArgumentError(
            f"new_world got the ranks {chosen[:16]}",
            next_step=f"pass each rank once, from 0 to {parent.size - 1}, at least one",
        )
    with _enter_call(parent, "new_world()", f"ranks={chosen}"):
        return create_sub_world(parent, chosen)


# ---- the check of a call


@contextmanager
def _enter_call(world: World | None, name: str, description: str = "") -> Iterator[World]:
    """Yield the world of a call after checking that all ranks made the same call. Raises MismatchError on all ranks if
    they did not."""
    world = world or current()
    lock: threading.Lock = world.cache.setdefault("call's lock", threading.Lock())
    if not lock.acquire(blocking=False):
        raise CollectiveError(
            f"two threads of rank {world.members[world.rank]} are in calls like {name} at the same time",
            next_step="make such calls from one thread: ranks match them by their order",
        )
    try:
        world.enter(WaitSeries.CALL)
        if world.size > 1:
            _check_same_call(world, name, f"{name} {description}".strip())
        yield world
    finally:
        lock.release()


def _check_same_call(world: World, name: str, description: str) -> None:
    from mpi4py import MPI

    call_hash = np.uint64(xxhash.xxh3_64_intdigest(f"{world.counts[WaitSeries.CALL]} {description}".encode()))
    own = np.array([call_hash, ~call_hash])
    largest = np.empty_like(own)
    world.wait([world.calls_comm.Iallreduce(own, largest, MPI.MAX)], name, series=WaitSeries.CALL)
    if largest[0] == ~largest[1]:  # the largest hash is also the smallest, because ~ turns the order round
        return
    groups, listed = describe_ranks(world, world.calls_comm, description, WaitSeries.CALL)
    raise MismatchError(
        f"ranks made different calls. {listed}"
        if groups > 1
        else f"ranks called {listed} after different numbers of calls",
        cause="ranks took different branches, or passed values of different types or shapes",
        next_step="make every rank call the same functions in the same order, with values of one type and shape",
    )


def _check_root(world: World, root: int) -> None:
    if not 0 <= root < world.size:
        raise ArgumentError(f"root is {root}", next_step=f"pass a rank from 0 to {world.size - 1}")


# ---- numbers and bytes


def _view_tensor_bytes(tensor: Any) -> Bytes:
    """Return the bytes of a contiguous CPU tensor, as a view."""
    import torch

    raw: Bytes = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return raw


def _gather_numbers(world: World, own: Sequence[int], what: str) -> npt.NDArray[np.int64]:
    """Return a few int64 of all ranks: shape (ranks, len(own))."""
    own_row = np.array(own, np.int64)
    rows = np.empty((world.size, own_row.size), np.int64)
    if world.size == 1:
        rows[0] = own_row
    else:
        world.wait([world.calls_comm.Iallgather(own_row, rows)], what, series=WaitSeries.CALL)
    return rows


def _gather_bytes(world: World, own: Bytes, lengths: npt.NDArray[np.int64], what: str) -> Bytes:
    """Return the bytes of all ranks side by side, gathered in rounds: no message is longer than MPI can count."""
    from mpi4py import MPI

    if world.size == 1:
        return own.copy()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    joined = np.empty(int(starts[-1]), np.uint8)
    step = max(1, CHUNK // world.size)
    for begin in range(0, int(lengths.max()), step):
        counts = np.clip(lengths - begin, 0, step)
        places = np.concatenate([[0], np.cumsum(counts)[:-1]])
        arrived = np.empty(int(counts.sum()), np.uint8)
        target = [arrived, counts.tolist(), places.tolist(), MPI.BYTE]
        request = world.calls_comm.Iallgatherv([own[begin : begin + step], MPI.BYTE], target)
        world.wait([request], what, series=WaitSeries.CALL)
        for start, place, count in zip(starts, places, counts, strict=False):
            joined[start + begin : start + begin + count] = arrived[place : place + count]
    return joined


def _gather_to_root(world: World, own: Bytes, lengths: list[int], root: int, what: str) -> list[Bytes]:
    """Return the bytes of all ranks, by rank, on the root, gathered along a binomial tree: the root has connections to
    few ranks. Other ranks get the bytes that passed through them."""
    comm, size = world.calls_comm, world.size
    place = (world.rank - root) % size  # 0 at the root; a subtree is a range of places
    subtree_pieces = [own]
    mask = 1
    while mask < size:
        if place & mask:
            parent = (place - mask + root) % size
            for piece in subtree_pieces:
                for start in range(0, piece.size, CHUNK):
                    request = comm.Isend(piece[start : start + CHUNK], parent, _TAG)
                    world.wait([request], what, series=WaitSeries.CALL)
            break
        for other in range(place + mask, min(place + 2 * mask, size)):
            piece = np.empty(lengths[(other + root) % size], np.uint8)
            for start in range(0, piece.size, CHUNK):
                request = comm.Irecv(piece[start : start + CHUNK], (place + mask + root) % size, _TAG)
                world.wait([request], what, series=WaitSeries.CALL)
            subtree_pieces.append(piece)
        mask *= 2
    return [subtree_pieces[(rank - root) % size] for rank in range(size)] if world.rank == root else subtree_pieces


# ---- objects


def _pickle(obj: Any) -> tuple[Bytes, str]:
    """Return the pickle of `obj`, or the reason why there is none."""
    try:
        return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8), ""
    except Exception as error:
        return np.empty(0, np.uint8), f"{type(error).__name__}: {error}"


def _explain_unsendable(world: World, ranks: Sequence[int], problem: str) -> ArgumentError:
    return ArgumentError(
        f"the object of {name_ranks(world.translate_ranks(ranks))} cannot be pickled"
        + (f": {problem}" if problem else ""),
        cause="it holds a lambda, an open file, a generator or a lock",
        next_step="send plain data: numbers, strings, lists, dictionaries, arrays",
    )
