"""Accesses that no wait puts in order are found, and those that a wait orders are not."""

import pytest

from tests.virtual_gpu.clocks import HOST, Clocks, RaceError, Span

WHOLE, FIRST, SECOND = Span(1, 0, 8), Span(1, 0, 4), Span(1, 4, 8)


def written_on(lane, span=WHOLE):
    clocks = Clocks()
    clocks.born(1, lane)
    clocks.launch(lane, "write", [], [span])
    return clocks


def test_another_stream_may_read_what_was_written_only_after_it_has_waited():
    clocks = written_on("a")
    with pytest.raises(RaceError, match="read on b reads what write on a uses"):
        clocks.launch("b", "read", [WHOLE], [])
    clocks.wait("b", clocks.snapshot("a"))
    clocks.launch("b", "read", [WHOLE], [])


def test_what_is_read_on_one_stream_may_not_be_written_on_another_that_has_not_waited():
    clocks = written_on("a")
    clocks.wait("b", clocks.snapshot("a"))
    clocks.launch("b", "read", [WHOLE], [])
    with pytest.raises(RaceError, match="write on a writes what read on b uses"):
        clocks.launch("a", "write", [], [WHOLE])


def test_bytes_that_do_not_meet_need_no_order():
    clocks = written_on("a", FIRST)
    clocks.launch("b", "write", [], [SECOND])
    with pytest.raises(RaceError):
        clocks.launch("b", "write", [], [WHOLE])


def test_the_host_reads_only_what_it_has_waited_for():
    clocks = written_on("a")
    with pytest.raises(RaceError):
        clocks.launch(HOST, "read", [WHOLE], [])
    clocks.synchronize()
    clocks.launch(HOST, "read", [WHOLE], [])


def test_memory_that_is_let_go_while_another_stream_uses_it_is_not_taken_again_before_a_wait():
    clocks = written_on("a")
    clocks.wait("b", clocks.snapshot("a"))
    clocks.launch("b", "read", [WHOLE], [])
    clocks.freed(1)
    clocks.born(2, "a")
    with pytest.raises(RaceError, match="is given the memory of what read on b uses"):
        clocks.launch("a", "write", [], [Span(2, 0, 8)])
    clocks.wait("a", clocks.snapshot("b"))
    clocks.born(3, "a")
    clocks.launch("a", "write", [], [Span(3, 0, 8)])
