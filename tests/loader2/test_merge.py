"""Whose turn it is: round robin over the streams that live."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipes.loader2.merge import RoundRobin


def order(lengths: list[int], given: dict[int, int] | None = None) -> list[int]:
    turns = RoundRobin(given or dict.fromkeys(range(len(lengths)), 0))
    counts = dict(given or dict.fromkeys(range(len(lengths)), 0))
    found = []
    while (stream := turns.turn()) is not None:
        if counts[stream] == lengths[stream]:
            turns.end()
        else:
            counts[stream] += 1
            turns.advance()
            found.append(stream)
    return found


def test_a_stream_that_ended_is_left_out() -> None:
    assert order([3, 1, 2]) == [0, 1, 2, 0, 2, 0]
    assert order([]) == []
    assert order([0, 0]) == []


def test_ended_streams_are_never_asked() -> None:
    turns = RoundRobin({0: 5, 1: 0, 2: 0}, ended=[1])
    assert turns.turn() == 2


@given(st.lists(st.integers(0, 6), max_size=6), st.data())
def test_it_goes_on_from_any_point(lengths: list[int], data: st.DataObject) -> None:
    whole = order(lengths)
    assert sorted(whole) == sorted(stream for stream, length in enumerate(lengths) for _ in range(length))
    at = data.draw(st.integers(0, len(whole)))
    counts = {stream: whole[:at].count(stream) for stream in range(len(lengths))}
    if lengths:
        assert order(lengths, counts) == whole[at:]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 3))
def test_a_worker_s_order_is_a_part_of_the_whole(lengths: list[int], workers: int) -> None:
    whole = order(lengths)
    for worker in range(workers):
        own = list(range(worker, len(lengths), workers))
        part = order([lengths[stream] for stream in own])
        assert [own[stream] for stream in part] == [stream for stream in whole if stream in own]
