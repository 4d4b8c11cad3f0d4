from __future__ import annotations

from collections.abc import Iterator

import pytest
from stage_contract import check_everywhere, check_stage, saved, start

from pipes.errors import StateError
from pipes.iter import IterableWrapper


def as_many(x: int) -> range:
    return range(x % 4)


def test_contract() -> None:
    check_stage(lambda: IterableWrapper(range(6)).flatmap(as_many), [0, 0, 1, 0, 1, 2, 0])
    check_stage(lambda: IterableWrapper([[1, 2], [], [3]]).flatmap(), [1, 2, 3])
    check_stage(lambda: IterableWrapper(range(40)).flatmap(as_many))
    check_everywhere(lambda source: source.flatmap(as_many))


def test_columns() -> None:
    rows = [("ab", 2), ("c", 1)]
    assert list(IterableWrapper(rows).flatmap(input_col=0)) == ["a", "b", "c"]
    assert list(IterableWrapper(rows).flatmap(input_col=[1, 0])) == [2, "ab", 1, "c"]
    assert list(IterableWrapper(rows).flatmap(lambda text, n: [text] * n, [0, 1])) == ["ab", "ab", "c"]


def test_generators_are_opened_one_at_a_time() -> None:
    opened: list[int] = []

    def pair(x: int) -> Iterator[int]:
        opened.append(x)
        yield x
        yield -x

    iterator = iter(IterableWrapper(range(1, 5)).flatmap(pair))
    assert [next(iterator) for _ in range(3)] == [1, -1, 2]
    assert opened == [1, 2]


def test_an_error_half_way_names_the_element() -> None:
    def broken(x: int) -> Iterator[int]:
        yield x
        raise RuntimeError("half way")

    iterator = iter(IterableWrapper([5]).flatmap(broken))
    assert next(iterator) == 5
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert "1:FlatMapper" in caught.value.__notes__[0]
    assert "on element 5" in caught.value.__notes__[0]


def test_a_restore_opens_one_input_again() -> None:
    opened: list[int] = []

    def three(x: int) -> range:
        opened.append(x)
        return range(3 * x, 3 * x + 3)

    def graph() -> IterableWrapper[int]:
        return IterableWrapper(range(200)).flatmap(three)  # type: ignore[return-value]

    run = start(graph())
    iterator = iter(run)
    for _ in range(301):
        next(iterator)
    state = saved(run)
    opened.clear()
    assert list(start(graph(), state)) == list(range(301, 600))
    assert opened == list(range(100, 200))


@pytest.mark.parametrize("change", [{"taken": -1}, {"taken": True}, {"given": "x"}, {"taken": 0}])
def test_a_damaged_position_is_refused(change: dict[str, object]) -> None:
    run = start(IterableWrapper(range(50)).flatmap(as_many))
    iterator = iter(run)
    for _ in range(60):
        next(iterator)
    state = saved(run)
    state["1:FlatMapper"].update(change)
    with pytest.raises(StateError, match="1:FlatMapper"):
        list(start(IterableWrapper(range(50)).flatmap(as_many), state))


def test_it_has_no_length() -> None:
    with pytest.raises(TypeError, match="FlatMapper"):
        len(IterableWrapper(range(3)).flatmap(as_many))


def test_repeat_contract() -> None:
    check_stage(lambda: IterableWrapper("ab").repeat(3), ["a", "a", "a", "b", "b", "b"])
    check_stage(lambda: IterableWrapper(range(40)).repeat(2), streams=(1,))
    check_everywhere(lambda source: source.repeat(2), 9)


def test_repeat_gives_the_same_object() -> None:
    first, second, third, fourth = IterableWrapper([[1], [2]]).repeat(2)
    assert first is second
    assert third is fourth
    assert third == [2]


def test_repeat_length_and_times() -> None:
    assert len(IterableWrapper(range(4)).repeat(3)) == 12
    for times in (1, 0, -2):
        with pytest.raises(ValueError, match=f"times must be 2 or more, not {times}"):
            IterableWrapper(range(4)).repeat(times)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ds-{098..101}.tar", ["ds-098.tar", "ds-099.tar", "ds-100.tar", "ds-101.tar"]),
        ("{0..2}{0..1}x", ["00x", "01x", "10x", "11x", "20x", "21x"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{1..03}", ["1", "2", "3"]),
        ("{{0..1}}", ["{0}", "{1}"]),
        *((name, [name]) for name in ("none", "", "a{}b", "{a..b}", "{1,2}", "{-1..2}", "{0...2}", "{1..2")),
    ],
)
def test_names_of_shards(name: str, expected: list[str]) -> None:
    assert list(IterableWrapper([name]).shard_expand()) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{00..1}", "must be shorter"),
        ("{10..9}", "must be shorter"),
        ("{01..100}", "must not start with 0"),
        ("{3..3}", "bad range"),
        ("{0..1}{5..2}", "bad range"),
    ],
)
def test_bad_names_of_shards(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(IterableWrapper([name]).shard_expand())
    good = IterableWrapper(["a", name, "b{0..1}"]).shard_expand(on_error="skip")
    assert list(good) == ["a", "b0", "b1"]
    with pytest.raises(TypeError, match="takes names, not a int"):
        list(IterableWrapper([5]).shard_expand())  # type: ignore[list-item]
