"""The connections between ranks: strangers, ranks that end, and children of a rank."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import secrets
import signal
import socket
import threading

import numpy as np
import pytest
from linked_ranks import LARGE, advance_until, connect, fill

from topkube import _kernels
from topkube.links import Links, explain_trouble


def test_a_rank_that_ends_is_reported_only_if_something_waits_for_it() -> None:
    ranks = connect(2)
    array = np.zeros(4, np.uint8)
    batch = ranks[1].gather([ranks[1].Irecv(array, 0, 1)])
    last = ranks[0].gather([ranks[0].Isend(fill(4, 0), 1, 1)])
    advance_until(ranks, lambda: last.are_complete)
    ranks[0].close()  # its last message may still be on its way
    advance_until(ranks[1:], lambda: batch.are_complete)
    for _ in range(20):
        ranks[1].wait(0.001)
    assert ranks[1].list_broken() == []
    ranks[1].Irecv(array, 0, 1)
    advance_until(ranks[1:], lambda: bool(ranks[1].list_broken()))
    assert ranks[1].list_broken() == [(0, "closed its connection")]


def test_a_lost_connection_of_any_lane_is_reported() -> None:
    """The other rank ends while a long message is on its way in three lanes."""
    ranks = connect(2, lanes=3)
    array = np.zeros(LARGE, np.uint8)
    batch = ranks[1].gather([ranks[1].Irecv(array, 0, 1)])
    first = ranks[1].gather([ranks[1].Irecv(array[:4].copy(), 0, 2)])
    ranks[0].Isend(fill(4, 0), 1, 2)
    ranks[0].Isend(fill(LARGE, 0), 1, 1)
    advance_until(ranks, lambda: first.are_complete)
    ranks[0].close()
    advance_until(ranks[1:], lambda: bool(ranks[1].list_broken()))
    assert ranks[1].list_broken()[0][0] == 0
    assert not batch.are_complete


def test_programs_that_are_no_ranks_are_refused_and_disturb_nobody() -> None:
    """Strangers that say nothing, too little, the wrong token, or the number of another rank."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=500)
    port, own, answer = listener.getsockname()[1], secrets.token_bytes(16), secrets.token_bytes(16)
    target = Links(_kernels.TcpLinks(2, 3, [listener.detach()], own, answer), 2, 3)
    other = socket.create_server(("127.0.0.1", 0))
    caller = Links(_kernels.TcpLinks(0, 3, [other.detach()], secrets.token_bytes(16), secrets.token_bytes(16)), 0, 3)
    caller.set_peer(2, "127.0.0.1", [port], own, answer)

    def greet(rank: int, token: bytes) -> bytes:
        return b"TKL1" + rank.to_bytes(4, "little") + token

    wrong = [
        greet(0, secrets.token_bytes(16)),
        greet(2, own),  # its own number
        greet(7, own),  # no rank
        greet(2**31, own),
        b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n",
    ]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    for stranger, said in zip(strangers, [*wrong, greet(0, own)[:-1]], strict=False):
        stranger.sendall(said)
    array = np.zeros(1000, np.uint8)
    target.advance()
    batch = target.gather([target.Irecv(array, 0, 3)])
    caller.Isend(fill(1000, 0), 2, 3)
    advance_until([target, caller], lambda: batch.are_complete)
    assert (array == fill(1000, 0)).all()
    for stranger in strangers[: len(wrong)]:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""  # closed, and not a byte of the answer
    late = socket.create_connection(("127.0.0.1", port))
    late.sendall(greet(0, own))  # that rank has its connection
    late.settimeout(0.05)
    advance_until([target], lambda: _is_closed(late))
    for stranger in [*strangers, late]:
        stranger.close()


def test_a_rank_that_loses_its_place_to_strangers_connects_again() -> None:
    """It was too busy to prove that it is a rank before others took all places."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=500)
    port, tokens = listener.getsockname()[1], (secrets.token_bytes(16), secrets.token_bytes(16))
    target = Links(_kernels.TcpLinks(1, 2, [listener.detach()], *tokens), 1, 2)
    caller = Links(_kernels.TcpLinks(0, 2, [socket.create_server(("", 0)).detach()], bytes(16), bytes(16)), 0, 2)
    caller.set_peer(1, "127.0.0.1", [port], *tokens)
    batch = target.gather([target.Irecv(np.zeros(4, np.uint8), 0, 3)])
    caller.Isend(fill(4, 0), 1, 3)  # connects, and proves nothing before it advances
    target.advance()
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    target.advance()
    advance_until([target, caller], lambda: batch.are_complete)
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_can_open_no_more_files_says_so_until_it_can() -> None:
    """Otherwise, both ranks would wait for each other until the deadline."""
    ranks = connect(2)
    batch = ranks[1].gather([ranks[1].Irecv(np.zeros(4, np.uint8), 0, 3)])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))  # one more file: the socket of rank 0
    try:
        ranks[0].Isend(fill(4, 0), 1, 3)
        advance_until(ranks, lambda: bool(ranks[1].list_broken()))
        ((peer, trouble),) = ranks[1].list_broken()
        assert (peer, ranks[0].list_broken()) == (0, [])
        assert trouble == f"cannot connect to this rank: {os.strerror(errno.EMFILE)}"
        cause, next_step = explain_trouble(peer, trouble)
        assert f"{free + 1} files" in cause
        assert "TOPKUBE_CONNECTIONS=1" in next_step
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    advance_until(ranks, lambda: batch.are_complete)
    assert ranks[1].list_broken() == []


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_end_of_a_child_process_closes_nothing(lanes: int) -> None:
    ranks = connect(2, lanes)
    array = np.zeros(1 << 20, np.uint8)
    for number in range(2):
        batch = ranks[1].gather([ranks[1].Irecv(array, 0, 1)])
        ranks[0].Isend(fill(array.size, number), 1, 1)
        advance_until(ranks, lambda batch=batch: batch.are_complete)
        if number == 0:
            child = os.fork()
            if child == 0:
                threads = [threading.Thread(target=sum, args=(range(1000),)) for _ in range(8)]
                for thread in threads:  # which may get the memory of the parent's threads
                    thread.start()
                for one in ranks:
                    one.close()
                for thread in threads:
                    thread.join()
                del ranks, one
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    assert (array == fill(array.size, 1)).all()


def test_idle_connections_are_kept_alive() -> None:
    ranks = connect(2, 1)
    batch = ranks[1].gather([ranks[1].Irecv(np.zeros(4, np.uint8), 0, 1)])
    ranks[0].Isend(fill(4, 0), 1, 1)
    advance_until(ranks, lambda: batch.are_complete)
    idle = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.type == socket.SOCK_STREAM and one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                idle.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
    assert idle == [60, 60], "both ends, after a minute: firewalls may forget a silent connection soon after"


def test_a_child_ends_although_a_thread_of_its_parent_moves_data() -> None:
    """The child has a copy of the lane's lock, which the thread may hold at that moment."""
    ranks, goes_on = connect(2, 1), True

    def move() -> None:
        sent, received = np.zeros(1 << 23, np.uint8), np.zeros(1 << 23, np.uint8)
        while goes_on:
            batch = ranks[1].gather([ranks[1].Irecv(received, 0, 1)])
            ranks[0].Isend(sent, 1, 1)
            advance_until(ranks, lambda batch=batch: batch.are_complete)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        children = []
        for _ in range(20):
            if (child := os.fork()) == 0:
                signal.alarm(20)  # ends the child if it hangs
                for one in ranks:
                    one.close()
                os._exit(0)
            children.append(os.waitpid(child, 0)[1])
    finally:
        goes_on = False
        thread.join()
    assert children == [0] * 20


@pytest.mark.parametrize("lanes", [1, 3])
def test_closed_links_refuse_to_wait(lanes: int) -> None:
    ranks = connect(2, lanes)
    ranks[1].Irecv(np.zeros(4, np.uint8), 0, 1)
    ranks[1].close()
    with pytest.raises(RuntimeError, match="closed"):
        ranks[1].wait(10)
    with pytest.raises(RuntimeError, match="closed"):
        ranks[1].advance()


def _is_closed(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
