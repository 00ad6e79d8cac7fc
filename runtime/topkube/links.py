"""Messages between nodes over TCP connections of our own (`_kernels.TcpLinks`), in place of MPI's.

MPI over TCP copies every message once more on both sides, and a wait for it has to ask again and again. Here, bytes go
from array to socket and from socket to array, and a wait sleeps in the kernel until they have arrived. Networks with
RDMA, GPU memory, collectives of MPI and messages inside a node stay with MPI.

Two ranks have a connection in each of several lanes. Long messages are cut into parts, one for each lane: one thread
cannot fill a link of more than about 10 Gbit/s, and some clouds limit the rate of a single connection.

`open_links` connects the ranks that exchange shards. It falls back to MPI, on all of them, if one cannot connect.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topkube import _kernels
from topkube.addresses import list_addresses
from topkube.arrays import DTYPE_CODES, Array, as_bytes

TOKEN_BYTES = 16
MOST_TAGS = 1 << 32
ANY_LENGTH_TAG = 32767
"""Messages of this tag may be shorter than the receiver's room. It is the largest tag of every MPI."""
_USUAL_LANES, _THREADS_PER_LANE = 4, 4
"""A rank has so many lanes at most, unless a setting asks for more, and one for so many threads that it may run."""
_TRIAL_SECONDS = 5.0
"""How long two ranks try to reach each other through one address."""
_SILENT = f"no answer within {_TRIAL_SECONDS:g} s"
_OTHER_FILES = 1024
"""Open files of a process beside its connections."""
_connections = 0
"""The most connections that all links of this process may have."""
_LOST_SECONDS = 3.0
"""How long a rank waits for the error of a rank whose connection is lost, before it raises an error of its own."""


@dataclass(frozen=True)
class LinkChoice:
    """Which links the ranks of a world want: `links` is the setting TOPKUBE_LINKS, `hosts` the machine of each rank,
    `pod_ip` the address of this pod, if it is known, and `lanes` the number of connections between two ranks."""

    links: str
    hosts: tuple[int, ...]
    pod_ip: str = ""
    lanes: int = 1

    def select(self, ranks: Sequence[int]) -> LinkChoice:
        """Return the choice of a world of these ranks."""
        return dataclasses.replace(self, hosts=tuple(self.hosts[rank] for rank in ranks))

    def wants_tcp(self, ranks: Sequence[int]) -> bool:
        """Return True if this rank wants connections of our own between `ranks`. On one machine, MPI has shared
        memory; and it can use RDMA."""
        if self.links == "auto":
            return len({self.hosts[rank] for rank in ranks}) == len(ranks) and not has_rdma()
        return self.links == "tcp"


def count_lanes(setting: int, threads: int) -> int:
    """Return how many lanes a rank wants that may run `threads` threads. `setting` is TOPKUBE_CONNECTIONS, 0 for a
    choice by the threads."""
    return setting or max(1, min(_USUAL_LANES, threads // _THREADS_PER_LANE))


class Links:
    """The messages between `size` ranks, of which this is `rank`. `Isend` and `Irecv` are those of an MPI communicator,
    for contiguous 1-D arrays of uint8 in host memory, which have the same length on both sides unless their tag is
    ANY_LENGTH_TAG. For one thread at a time, but `wake` may be called anywhere."""

    def __init__(self, tcp: Any, rank: int, size: int, channel: int = 0) -> None:
        self.rank, self.size = rank, size
        self._tcp, self._channel, self._channels = tcp, channel, [channel]
        self.gather, self.advance, self.wait, self.wake = tcp.gather, tcp.advance, tcp.wait, tcp.wake
        self.list_broken, self.set_peer, self.lanes = tcp.list_broken, tcp.set_peer, tcp.lanes
        self.has_sent_all = tcp.has_sent_all
        self.abandon = tcp.abandon
        self.patience = 0.0
        """The seconds for which the script's thread yields before it sleeps in a wait."""
        self.reserved = 0
        """The files that were reserved for the connections."""

    def Isend(self, array: Any, dest: int, tag: int = 0) -> Any:
        """Begin to send `array`, which must not change before the message is complete. Return the message."""
        return self._tcp.send(array, dest, self._channel * MOST_TAGS + tag, _choose_lane(tag))

    def Irecv(self, array: Any, source: int, tag: int = 0) -> Any:
        """Begin to receive a message into `array`. Return the message."""
        return self._tcp.receive(array, source, self._channel * MOST_TAGS + tag, _choose_lane(tag))

    def list_unawaited_tags(self) -> list[int]:
        """Return the tags of messages that other ranks have sent, and that nothing waits for."""
        first = self._channel * MOST_TAGS
        return [key - first for key in self._tcp.list_unawaited() if 0 <= key - first < MOST_TAGS]

    def close(self) -> None:
        """Close all connections. Messages that are not complete stay incomplete."""
        self._tcp.close()
        _return_files(self.reserved)
        self.reserved = 0

    def try_lanes(self, peer: int) -> Any:
        """Send a byte to rank `peer` through every lane, and receive one. Return the messages."""
        key, lanes = self._channel * MOST_TAGS, range(self.lanes)
        messages = [self._tcp.receive(np.empty(1, np.uint8), peer, key, lane) for lane in lanes]
        return self.gather(messages + [self._tcp.send(np.zeros(1, np.uint8), peer, key, lane) for lane in lanes])

    def begin_reduction(self, x: Array, buffer: Array, scale: float, tag: int, is_gathered: bool) -> Any:
        """Begin to replace x by its sum over all ranks times `scale`. Rank r reduces segment r; if `is_gathered` is
        False, x holds only the result of the own segment. `buffer`, of x's type, has room for the segments of all other
        ranks. Return the reduction, whose `is_finite` tells about the own segment when it is complete. x and `buffer`
        must not change before. All ranks call this with the same length and type."""
        key = self._channel * MOST_TAGS + tag
        return self._tcp.reduce(as_bytes(x), as_bytes(buffer), DTYPE_CODES[x.dtype], scale, key, is_gathered)

    def prepare_integers(self, change: Array, total: Array, bounds: Sequence[int], bits: int, tag: int) -> Any:
        """Prepare the sum of `change` over all ranks, of which each sends integers of `bits` bits: pack what the owners
        of the segments get, and subtract it from `change`. Both arrays are float32. Segment r, of rank r, is
        [bounds[r], bounds[r + 1]); the bounds are multiples of the block of the integers, but for the last. Return the
        sum, which `begin_integers` exchanges: when it is complete, `total` has what all owners send of the sum, and the
        own segment of `change` what this rank does not send of it. `is_finite` tells if all that this rank sent was
        finite. The arrays must not change before. All ranks call this with the same bounds and bits."""
        return self._tcp.prepare_integers(
            as_bytes(change), as_bytes(total), bounds, bits, self._channel * MOST_TAGS + tag
        )

    def begin_integers(self, integers: Any) -> Any:
        """Begin the messages of a sum that `prepare_integers` returned. Return the sum."""
        self._tcp.begin_integers(integers)
        return integers

    def greet(self, partners: Sequence[int], signature: int, room: int) -> Any:
        """Begin to send a signature of 8 bytes to `partners`, and to receive theirs, which `room` bytes of values may
        follow. Return the greetings: when they are complete, `differs` is True if other signatures or values have
        arrived, which is known when `all_greeted` is complete."""
        return self._tcp.greet(partners, signature, self._channel * MOST_TAGS + ANY_LENGTH_TAG, room)

    def greet_and_reduce(
        self,
        partners: Sequence[int],
        signature: int,
        room: int,
        x: Array,
        tag: int,
        scale: float,
        is_in_one_round: bool,
    ) -> Any:
        """Begin to greet all other ranks with values of x, and to replace x by its sum over all ranks times `scale`.
        Return the greetings. x, and `is_finite` of the own part, count only if they do not differ. After `abandon`,
        values that arrive with greetings do not touch x; sums that travel already may still arrive in it."""
        first = self._channel * MOST_TAGS
        values, dtype = as_bytes(x), DTYPE_CODES[x.dtype]
        return self._tcp.greet_and_reduce(
            partners, signature, first + ANY_LENGTH_TAG, room, values, dtype, scale, first + tag, is_in_one_round
        )

    def duplicate(self) -> Links:
        """Return links over the same connections, with tags of their own. All ranks call this in the same order."""
        self._channels[0] += 1
        copy = Links(self._tcp, self.rank, self.size, self._channels[0])
        copy._channels, copy.patience = self._channels, self.patience
        return copy


def _choose_lane(tag: int) -> int:
    """Return the lane of messages of a tag; -1 for all lanes."""
    return 0 if tag == ANY_LENGTH_TAG else -1


class LostConnections:
    """The connections of a rank that are lost while messages wait for them."""

    def __init__(self) -> None:
        self._since: float | None = None

    def find(self, links: Links) -> tuple[int, str] | None:
        """Return a rank of `links` and what happened, if its connection has been lost for a while. If that rank has
        failed, its error ends all ranks first."""
        broken = links.list_broken()
        if not broken:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > _LOST_SECONDS:
            peer, trouble = broken[0]
            return int(peer), str(trouble)
        return None


def explain_trouble(rank: int, trouble: str) -> tuple[str, str]:
    """Return the likely cause of `trouble` with the connection to `rank`, and the next step."""
    if trouble.endswith(os.strerror(errno.EMFILE)):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process has {limit} files and connections open, which is its limit",
            "raise the limit (ulimit -n), close files in the script, or use fewer connections: TOPKUBE_CONNECTIONS=1",
        )
    return (
        f"rank {rank} or its machine has ended, or something on the network ended the connection",
        f"read the log of rank {rank}; if it went on, let MPI carry messages: TOPKUBE_LINKS=mpi",
    )


def explain_used_up_files(rank: int) -> str:
    """Return a warning if this process, which is `rank`, can open no more files, so that no rank can connect to it; ""
    if it can."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno == errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"topkube: warning: rank {rank} has {limit} files and connections open, which is its limit: other ranks"
                " may wait in vain to connect to it. Next: close files in the script, or raise the limit (ulimit -n)"
            )
    return ""


def are_links_messages(requests: Any) -> bool:
    """Return True if `requests` is a list of messages of `Links`."""
    return isinstance(requests, list) and bool(requests) and isinstance(requests[0], _kernels.TcpMessage)


def has_rdma(devices: Path = Path("/dev/infiniband")) -> bool:
    """Return True if this process may use an RDMA device."""
    return any(os.access(device, os.R_OK | os.W_OK) for device in devices.glob("uverbs*"))


@dataclass(frozen=True)
class _Contact:
    """How other ranks reach a rank: its addresses, the ports of its lanes, the token that they send, and the one that
    it answers."""

    addresses: list[str]
    ports: list[int]
    own: bytes
    answer: bytes


def open_links(comm: Any, ranks: Sequence[int], choice: LinkChoice, partners: Sequence[int]) -> Links | None:
    """Return the links between the ranks of `comm`, an MPI communicator, whose numbers in the world are `ranks`. None,
    on all of them, if one of them does not want links, or if a rank cannot reach its `partners`, ranks of `comm` of
    which it is a partner too. Then a warning names two of those. Other ranks connect when they need it. All ranks of
    `comm` call this."""
    if comm.size == 1 or not all(comm.allgather(choice.wants_tcp(ranks))):
        return None
    lanes = min(comm.allgather(_limit_lanes(choice.lanes, comm.size)))
    _reserve_files(comm.size * lanes)
    listeners: list[socket.socket] = []
    contact, problem = None, ""
    try:
        addresses = list_addresses(choice.pod_ip)
        if not addresses:
            raise OSError("this machine has no IP address")
        listeners.extend(_listen(addresses) for _ in range(lanes))
        tokens = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
        contact = _Contact(addresses, [listener.getsockname()[1] for listener in listeners], *tokens)
    except OSError as error:
        problem = f"rank {ranks[comm.rank]} cannot listen: {error}"
    contacts, problems = comm.allgather(contact), list(filter(None, comm.allgather(problem)))
    tried, failures = [0] * comm.size, 0
    try:
        while not problems:
            links, reasons = _try_peers(comm, partners, listeners, contacts, tried, failures)
            trials = comm.allgather(reasons)
            failed = {pair: reason for trial in trials for pair, reason in trial.items()}
            if links is not None and not failed:
                links.reserved = comm.size * lanes
                return links
            if links is not None:
                links.close()
            failures += 1
            if failures == 1 and _SILENT in failed.values():
                continue  # a rank was busy, perhaps
            problems += [f"rank {ranks[rank]}: {reason}" for (rank, peer), reason in failed.items() if rank == peer]
            for target in {target for _, target in failed}:
                tried[target] += 1
            for (source, target), reason in failed.items():
                if tried[target] >= len(contacts[target].addresses):
                    where = ", ".join(contacts[target].addresses)
                    problems.append(f"rank {ranks[source]} cannot reach rank {ranks[target]} at {where}: {reason}")
    finally:
        for listener in listeners:
            listener.close()
    _return_files(comm.size * lanes)
    if comm.rank == 0:
        print(
            f"topkube: warning: messages between nodes use MPI, which takes more processor time: {problems[0]}."
            " Likely cause: a firewall or a NetworkPolicy. Next: allow all TCP ports between the ranks, or set"
            " TOPKUBE_LINKS=mpi",
            file=sys.stderr,
            flush=True,
        )
    return None


Reasons = dict[tuple[int, int], str]
"""Why ranks could not exchange a message, by (the rank that connects, the rank that listens). A rank that cannot even
begin is both."""


def _try_peers(
    comm: Any,
    partners: Sequence[int],
    listeners: Sequence[socket.socket],
    contacts: Sequence[_Contact],
    tried: Sequence[int],
    failures: int,
) -> tuple[Links | None, Reasons]:
    """Exchange messages with the partners. `tried` has the number of the address at which each rank is tried. Return
    the links, and what failed."""
    me, size = comm.rank, comm.size
    # A connection of an earlier trial may still arrive: trials have different tokens.
    tokens = [(_vary(contact.own, failures), _vary(contact.answer, failures)) for contact in contacts]
    try:
        owned: list[int] = []
        try:
            owned.extend(os.dup(listener.fileno()) for listener in listeners)
        except OSError:
            for number in owned:
                os.close(number)
            raise
        links = Links(_kernels.TcpLinks(me, size, owned, *tokens[me]), me, size)
    except (OSError, RuntimeError) as error:
        return None, {(me, me): str(error)}
    for peer, contact in enumerate(contacts):
        if peer != me:
            links.set_peer(peer, contact.addresses[tried[peer]], contact.ports, *tokens[peer])
    batches = {peer: links.try_lanes(peer) for peer in partners}
    deadline, waiting = time.monotonic() + _TRIAL_SECONDS, set(batches)
    while waiting and time.monotonic() < deadline:
        links.wait(0.05)
        broken = dict(links.list_broken())
        waiting = {peer for peer in waiting if not batches[peer].are_complete and peer not in broken}
    broken = dict(links.list_broken())
    failed = {peer: broken.get(peer, _SILENT) for peer, batch in batches.items() if not batch.are_complete}
    return links, {(min(me, peer), max(me, peer)): reason for peer, reason in failed.items()}


def _limit_lanes(lanes: int, ranks: int) -> int:
    """Return how many of `lanes` lanes to `ranks` ranks the limit of open files allows, at least 1."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return lanes
    return max(1, min(lanes, (hard - _OTHER_FILES - _connections) // ranks))


def _reserve_files(connections: int) -> None:
    """Let this process open as many files as there may be connections, with these."""
    global _connections
    _connections += connections
    wanted = _connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _return_files(connections: int) -> None:
    """Note that these connections are closed."""
    global _connections
    _connections -= connections


def _vary(token: bytes, trial: int) -> bytes:
    return hashlib.sha256(token + trial.to_bytes(4, "little")).digest()[:TOKEN_BYTES]


def _listen(addresses: Sequence[str]) -> socket.socket:
    """Return a socket that listens at a free port: at the address, or if there are several, at all."""
    family = socket.AF_INET6 if any(":" in address for address in addresses) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((addresses[0] if len(addresses) == 1 else "", 0))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener
