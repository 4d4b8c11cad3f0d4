from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_contract import check_everywhere, check_stage, saved, start

from pipes import DataChunk
from pipes.errors import StateError, notes_of
from pipes.inspector.report import describe_graph
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2


def third(number: int) -> int:
    return number % 3


def same(number: int) -> int:
    return number


# What torchdata 0.9 gives, but for the keys of keep_key, where it gives those of the elements that filled the buffer.
@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (10, {}, [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        (10, {"group_size": 2}, [[0, 3], [1, 4], [2, 5], [6, 9], [7], [8]]),
        (10, {"buffer_size": 4}, [[0, 3], [1, 4], [2, 5], [6, 9], [7], [8]]),
        (
            10,
            {"buffer_size": 4, "keep_key": True},
            [(0, [0, 3]), (1, [1, 4]), (2, [2, 5]), (0, [6, 9]), (1, [7]), (2, [8])],
        ),
        (5, {"group_size": 3, "buffer_size": 3, "guaranteed_group_size": 1}, [[0], [1], [2], [3], [4]]),
        (4, {"group_size": 2, "buffer_size": None}, [[0, 3], [1], [2]]),
    ],
)
def test_groups(count: int, options: dict[str, Any], expected: list[Any]) -> None:
    assert list(IterableWrapper(range(count)).groupby(third, **options)) == expected


def test_contract() -> None:
    check_stage(
        lambda: IterableWrapper([0, 0, 1, 1, 2, 2, 2, 0, 1]).groupby(same, buffer_size=4),
        [[0, 0], [1, 1], [2, 2, 2], [0], [1]],
    )
    check_stage(lambda: IterableWrapper([]).groupby(same), [])
    check_everywhere(lambda source: source.groupby(lambda n: n % 4, group_size=3, buffer_size=6, keep_key=True,
                                                   guaranteed_group_size=2))  # fmt: skip
    assert type(next(iter(IterableWrapper([1]).groupby(same)))) is DataChunk


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4), st.integers(1, 4), st.integers(0, 8), st.data())
def test_every_resume_of_every_buffer(keys: list[int], size: int, least: int, room: int, data: st.DataObject) -> None:
    def graph() -> Any:
        numbers = IterableWrapper(list(enumerate(keys)))
        return numbers.groupby(
            lambda pair: pair[1],
            group_size=size,
            buffer_size=size + room,
            guaranteed_group_size=min(size, least),
            drop_remaining=True,
        )

    whole = list(graph())
    assert all(len({key for _, key in group}) == 1 for group in whole)
    pairs = Counter(pair for group in whole for pair in group)
    assert max(pairs.values(), default=1) == 1
    k = data.draw(st.integers(0, len(whole)))
    run = start(graph())
    iterator = iter(run)
    for _ in range(k):
        next(iterator)
    again = start(graph(), saved(run))
    assert list(again) == whole[k:]
    assert sum(count for _, count in again.context.tallies.counts()["1:Grouper"].left_out) == len(keys) - len(pairs)


def test_a_full_buffer_without_a_large_group_is_an_error_or_left_out() -> None:
    def graph(**options: Any) -> Any:
        return IterableWrapper(range(10)).groupby(same, group_size=3, buffer_size=4, guaranteed_group_size=2, **options)

    with pytest.raises(RuntimeError, match="Failed to group items: the buffer of stage 1:Grouper is full") as caught:
        list(graph())
    assert any("element 3" in note for note in notes_of(caught.value))
    with DataLoader2(graph(drop_remaining=True)) as loader:
        assert list(loader) == [[7], [8], [9]]
        assert loader.stats()["left_out"] == {"1:Grouper": {"of groups too small": 7}}


def test_a_restore_makes_what_it_held_and_one_rare_element_does_not_grow_the_state() -> None:
    made: list[int] = []

    def graph() -> Any:
        numbers = IterableWrapper(range(20_000)).map(lambda n: made.append(n) or n)
        return numbers.groupby(lambda n: -1 if n == 9 else n // 2, group_size=2)

    run = start(graph())
    iterator = iter(run)
    for _ in range(9_000):
        next(iterator)
    state, rest = saved(run), list(iterator)
    assert state["2:Grouper"]["held"] == [8, 9]
    assert state["2:Grouper"]["anchor"]["taken"] <= 8
    assert len(run.anchors.entries) <= 81  # type: ignore[attr-defined]
    made.clear()
    again = start(graph(), state)
    assert made == [8, 9]
    assert list(again) == rest


def test_the_anchor_follows_the_oldest_held_element() -> None:
    run = start(IterableWrapper(range(20_000)).groupby(lambda n: n // 2, group_size=2))
    for count, _ in enumerate(iter(run), 1):
        if count % 1_000 == 0:
            position = saved(run)["1:Grouper"]
            assert position["taken"] == 2 * count
            assert position["held"] == []
            assert 2 * count - 64 <= position["anchor"]["taken"] <= 2 * count


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"buffer_size": 0}, "at least 1, not 0"),
        ({"group_size": 5, "buffer_size": 4}, "from 1 to the buffer_size of 4, not 5"),
        ({"group_size": 0}, "not 0"),
        ({"guaranteed_group_size": 2}, "from 1 to the group_size of None"),
        ({"group_size": 2, "guaranteed_group_size": 3}, "not 3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        IterableWrapper([1]).groupby(same, **options)


def test_a_key_that_cannot_be_hashed_names_stage_and_element() -> None:
    with pytest.raises(TypeError, match="unhashable") as caught:
        list(IterableWrapper([[7]]).groupby(lambda element: element))
    assert any("1:Grouper" in note and "element [7]" in note for note in notes_of(caught.value))


@pytest.mark.parametrize(
    "change", [{"taken": 1}, {"held": [3, 2]}, {"held": [9]}, {"held": "x"}, {"held": [True]}, {"anchor": None}]
)
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    run = start(IterableWrapper(range(10)).groupby(third, buffer_size=4))
    next(iter(run))
    table = saved(run)
    table[run.stage].update(change)
    with pytest.raises(StateError, match="damaged"):
        start(IterableWrapper(range(10)).groupby(third, buffer_size=4), table)


def test_the_report_and_the_automatic_shard_point() -> None:
    [_, stage] = describe_graph(IterableWrapper(range(9)).groupby(third, buffer_size=5), streams=1).stages
    assert (stage.buffer, stage.state) == (5, "anchor")
    pipe = IterableWrapper(range(9)).groupby(third)
    groups = [list(start(pipe, stream=stream, streams=2)) for stream in range(2)]
    assert groups == [[[0, 3, 6], [2, 5, 8]], [[1, 4, 7]]]
    with pytest.raises(TypeError, match="Grouper"):
        len(pipe)
