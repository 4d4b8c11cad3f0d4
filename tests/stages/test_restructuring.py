"""Rows with fewer or flatter columns: torchdata's results, errors in place of its warnings, rows left as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from pipes.formats.webdataset import Sample
from pipes.iter import IterableWrapper


class Point(NamedTuple):
    x: int
    y: int
    z: int


def last(row: Any, stage: str, *args: Any, **given: Any) -> Any:
    source = IterableWrapper([row], deepcopy=False)
    [result] = getattr(source, stage)(*args, **given)
    return result


NAMED = {"a": 1, "b": 2, "c": 3}
NESTED = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}


@pytest.mark.parametrize(
    ("row", "stage", "args", "expected"),
    [
        ((0, 1, 2), "drop", (0,), (1, 2)),
        ([0, 1, 2], "drop", ([2, 0, 0],), [1]),
        ((0, 1, 2), "drop", ((-1, 0),), (1,)),
        (Point(1, 2, 3), "drop", (1,), (1, 3)),
        (NAMED, "drop", (["a", "c", "a"],), {"b": 2}),
        (NAMED, "drop", ([],), NAMED),
        (Sample({"__key__": "k", "jpg": 1, "cls": 2}), "drop", (".jpg",), Sample({"__key__": "k", "cls": 2})),
        ((0, 1, 2, 3), "slice", (1,), (1, 2, 3)),
        ([0, 1, 2, 3], "slice", (-1,), [3]),
        ((0, 1, 2, 3), "slice", (None, 2), (0, 1)),
        ((0, 1, 2, 3), "slice", (1, None, 2), (1, 3)),
        ([0, 1, 2, 3], "slice", (0, -1), [0, 1, 2]),
        ((0, 1, 2, 3), "slice", ([2, 0, 0],), (0, 2)),
        (Point(1, 2, 3), "slice", ([0, -1],), (1, 3)),
        (NAMED, "slice", ("a",), {"a": 1}),
        (NAMED, "slice", (["c", "a"],), {"a": 1, "c": 3}),
        ({0: 1, 1: 2}, "slice", (1,), {1: 2}),
        (Sample({"__key__": "k", "jpg": 1}), "slice", ([".jpg"],), Sample({"jpg": 1})),
        ((0, (1, 2), 3), "flatten", (), (0, 1, 2, 3)),
        ([0, [1, 2], (3, [4])], "flatten", ([],), [0, 1, 2, 3, [4]]),
        ([0, [1, 2], (3,)], "flatten", (1,), [0, 1, 2, (3,)]),
        ([0, [1, 2], (3,)], "flatten", ([0, -1],), [0, [1, 2], 3]),
        (("ab", b"cd", {"a": 1}, ()), "flatten", (), ("ab", b"cd", {"a": 1})),
        (NESTED, "flatten", (), {"a": 1, "c": 2, "d": {"e": 3}}),
        (NESTED, "flatten", ("a",), NESTED),
        ({"a": [1, 2], "b": {}}, "flatten", (["a", "b"],), {"a": [1, 2]}),
        ([{"a": 1}, {"a": 2}], "rows2columnar", (), {"a": [1, 2]}),
        ([{"a": 1, "b": 2}, {"b": 3, "a": 4}], "rows2columnar", (["b"],), {"b": [2, 3]}),
        ([(1, 2), [3, 4], {"b": 6, "a": 5}], "rows2columnar", (["a", "b"],), {"a": [1, 3, 5], "b": [2, 4, 6]}),
        ([], "rows2columnar", (["a"],), {"a": []}),
    ],
)
def test_what_a_row_becomes(row: Any, stage: str, args: Any, expected: Any) -> None:
    before = repr(row)
    result = last(row, stage, *args)
    assert result == expected
    assert type(result) is type(expected)
    assert list(result) == list(expected), "the order differs"
    assert repr(row) == before, "the row of the input was edited"


@pytest.mark.parametrize(
    ("row", "stage", "args", "error", "message"),
    [
        ((0, 1), "drop", (2,), IndexError, "no column 2 in a row of 2"),
        ((0, 1), "drop", ("a",), TypeError, "cannot be interpreted as an integer"),
        (NAMED, "drop", (["a", "z"],), KeyError, "z"),
        ("abc", "drop", (0,), TypeError, "a row is a list, a tuple or a dict, not the str 'abc'"),
        ((0, 1), "slice", ([0, -3],), IndexError, "no column -3"),
        (NAMED, "slice", ("z",), KeyError, "z"),
        (NAMED, "slice", (0,), KeyError, "0"),
        (NAMED, "slice", (0, 2), TypeError, "no places to slice by"),
        (5, "slice", (0,), TypeError, "not the int 5"),
        ((0, 1), "flatten", (9,), IndexError, "no column 9"),
        (NAMED, "flatten", ("z",), KeyError, "z"),
        ({"b": {"a": 2}, "a": 1}, "flatten", (), ValueError, "two columns would have the key 'a'"),
        ("abc", "flatten", (), TypeError, "not the str"),
        ([{"a": 1}, {"a": 2, "b": 3}], "rows2columnar", (), ValueError, r"\['a', 'b'\], where others have \['a'\]"),
        ([{}, {"a": 2}], "rows2columnar", (), ValueError, "where others have"),
        ([{"a": 1}, {"b": 2}], "rows2columnar", (), KeyError, "a"),
        ([(1, 2), (3,)], "rows2columnar", (["a", "b"],), ValueError, "has 1 columns, but column_names names 2"),
        ([(1, 2)], "rows2columnar", (), ValueError, "column_names names 0"),
        (["ab"], "rows2columnar", (["a", "b"],), TypeError, "not the str 'ab'"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_under_on_error(
    row: Any, stage: str, args: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        last(row, stage, *args)
    assert any("in stage 1:" in note for note in caught.value.__notes__)
    assert last(row, stage, *args, on_error=lambda error, row: ("bad", row)) == ("bad", row)


def test_what_is_refused_when_the_stage_is_built() -> None:
    source = IterableWrapper([(1, 2)])
    for given in (([0], 1), ("a", None, 2), ((0, 1), 1)):
        with pytest.raises(ValueError, match="leave out stop and step"):
            source.slice(*given)
    with pytest.raises(ValueError, match="step must not be 0"):
        source.slice(0, None, 0)
    with pytest.raises(TypeError, match="a list of names, not the str 'ab'"):
        source.rows2columnar("ab")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'a' twice"):
        source.rows2columnar(["a", "b", "a"])


def test_lengths() -> None:
    source = IterableWrapper([(1, 2)] * 5).sharding_filter()
    for pipe in (source.drop(0), source.slice(1), source.flatten(), source.batch(1).rows2columnar(["a", "b"])):
        assert len(pipe) == 5
        assert type(pipe)._length(pipe, (1, 2)) == 2
    with pytest.raises(TypeError, match="may skip elements"):
        len(source.drop(0, on_error="skip"))
