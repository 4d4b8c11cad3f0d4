from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipes.errors import StateError
from pipes.state import Anchors, Ticks, check_table, count_from, table_of


class Stage:
    """A stage that stands where it is told."""

    def __init__(self, stage: str) -> None:
        self.stage, self.at = stage, 0

    def capture(self) -> int:
        return self.at

    def describe(self, captured: Any) -> Any:
        return {"at": captured}


@given(st.integers(0, 2**40), st.integers(0, 200))
def test_ticks_count_what_goes_by(start: int, steps: int) -> None:
    ticks = Ticks(start)
    assert ticks.count == start
    assert list(zip(range(steps), ticks, strict=False)) == list(
        zip(range(steps), range(start, start + steps), strict=True)
    )
    # zip asks the elements first, so the end of them takes no tick
    assert ticks.count == start + steps


def test_a_table_holds_one_position_a_stage() -> None:
    stages = (Stage("0:A"), Stage("1:B"))
    assert table_of(stages, (3, 4)) == {"0:A": {"at": 3}, "1:B": {"at": 4}}
    with pytest.raises(ValueError, match="shorter"):
        table_of(stages, (3,))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 10), st.data())
def test_anchors_keep_the_first_and_the_newest_that_serve(steps: list[int], keep: int, data: st.DataObject) -> None:
    stage = Stage("0:A")
    anchors = Anchors((stage,), keep)
    anchors.note(0)
    taken = 0
    noted = [0]
    for step in steps:
        taken += step
        stage.at = 10 * taken
        anchors.note(taken, (taken + 1,))
        noted.append(taken)
    assert len(anchors.entries) <= keep + 1
    kept = [entry[0] for entry in anchors.entries]
    assert kept[0] == 0
    assert kept[1:] == noted[1:][-keep:]
    oldest = data.draw(st.integers(0, taken))
    found = anchors.describe(anchors.entries, oldest)
    assert found["taken"] == max(each for each in kept if each <= oldest)
    assert found["table"] == {"0:A": {"at": 10 * found["taken"]}}
    assert found.get("extra") == ([found["taken"] + 1] if found["taken"] else None)


def test_entries_do_not_change_under_a_snapshot() -> None:
    anchors = Anchors((Stage("0:A"),), 1)
    anchors.note(0)
    snapshot = anchors.entries
    anchors.note(5)
    anchors.note(9)
    assert snapshot == ((0, (0,), ()),)


@pytest.mark.parametrize("value", [-1, True, 1.0, "3", None, 2**62, [1]])
def test_what_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(StateError, match="'at' of 0:A is"):
        count_from({"at": value}, "at", "0:A")


def test_counts_are_read() -> None:
    assert count_from({"at": 2**62 - 1}, "at", "x") == 2**62 - 1
    for position in (None, [], "x", {}):
        with pytest.raises(StateError):
            count_from(position, "at", "x")


json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_data)
def test_json_data_passes(value: Any) -> None:
    check_table(value)
    check_table(json.loads(json.dumps(value)))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2: 3}]}, r"state\['a'\]\[1\]: a key"),
        ({"a": object()}, r"state\['a'\]: object does not belong"),
        ([b"x"], r"state\[0\]: bytes does not belong"),
        ([float("nan")], "nan does not belong"),
        ([float("inf")], "inf does not belong"),
        (["x" * 2_000_000], "2000000 characters"),
        (deep(600), "too deep"),
        ([1 << 5000], "5001 bits"),
        ([0] * 1_000_001, "too deep or too large"),
    ],
)
def test_anything_else_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        check_table(value)
