"""The communication thread: errors between two pieces of work, and the end of a program."""

from __future__ import annotations

import pytest
from linked_ranks import connect

from topkube.training.ranks.communication_thread import CommunicationThread


@pytest.mark.parametrize(("is_awaited", "calls_at_the_end"), [(True, 3), (False, 1)])
def test_the_end_waits_for_messages_that_other_ranks_wait_for(is_awaited: bool, calls_at_the_end: int) -> None:
    thread, pauses = CommunicationThread(), [60.0, 0.0, None]
    calls = 0

    def advance() -> float | None:
        nonlocal calls
        calls += 1
        return pauses[calls - 1]

    thread.submit(lambda: thread.advance_meanwhile(advance, is_awaited)).result()
    thread.close(60)
    assert calls == calls_at_the_end


def test_a_thread_that_has_ended_refuses_no_last_work() -> None:
    """`shutdown` runs again at the end of the program, after the threads."""
    thread, done = CommunicationThread(), []
    thread.finish(lambda: done.append("before"))
    thread.close(60)
    thread.finish(lambda: done.append("after"))
    assert done == ["before"]


def test_an_error_while_messages_travel_is_raised_by_the_next_work() -> None:
    """The thread goes on: if it ended, the next future would never be done."""
    thread = CommunicationThread()

    def advance() -> float | None:
        raise RuntimeError("another rank entered another call")

    thread.submit(lambda: thread.advance_meanwhile(advance)).result()
    with pytest.raises(RuntimeError, match="another rank"):
        thread.submit(lambda: 1).result(60)
    assert thread.submit(lambda: 2).result(60) == 2
    thread.close(60)


def test_a_wait_for_messages_over_closed_links_is_raised_by_the_next_work() -> None:
    """The thread goes on, as after an error of the messages themselves."""
    links = connect(2, 1)
    thread = CommunicationThread()
    thread.submit(lambda: thread.advance_meanwhile(lambda: 60.0, links=links[0])).result()
    links[0].close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(lambda: 1).result(60)
    assert thread.submit(lambda: 2).result(60) == 2
    thread.close(60)
