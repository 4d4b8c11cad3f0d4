"""Columns read and written by map, filter and flatmap, and what their construction refuses."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipes.iter import IterableWrapper
from pipes.stages.columns import apply_to_columns, check_columns

Point = namedtuple("Point", "x y")


def one(a: Any) -> Any:
    return -a


def two(a: Any, b: Any) -> Any:
    return a + b


@pytest.mark.parametrize(
    ("element", "fn", "input_col", "output_col", "expected"),
    [
        ((1, 2, 3), one, 1, None, (1, -2, 3)),
        ([1, 2, 3], one, -1, None, [1, 2, -3]),
        ((1, 2, 3), two, [0, 2], None, (4, 2)),
        ((1, 2, 3), two, (2, 0), None, (2, 4)),
        ((1, 2, 3), two, [0, -1], None, (4, 2)),
        ((1, 2, 3), two, [0, 1], 2, (1, 2, 3)),
        ((1, 2, 3), two, [0, 1], -1, (1, 2, 3, 3)),
        ((1, 2, 3), two, [0, 1], [0], (3, 2, 3)),
        ({"a": 1, "b": 2}, one, "a", None, {"a": -1, "b": 2}),
        ({"a": 1, "b": 2}, two, ["a", "b"], None, {"a": 3}),
        ({"a": 1, "b": 2}, two, ["b", "a"], None, {"b": 3}),
        ({"a": 1, "b": 2}, two, ["a", "b"], "c", {"a": 1, "b": 2, "c": 3}),
        ({"a": 1, -1: 5}, one, "a", -1, {"a": 1, -1: -1}),
        (Point(1, 2), one, 0, None, Point(-1, 2)),
    ],
)
def test_where_the_result_goes(element: Any, fn: Any, input_col: Any, output_col: Any, expected: Any) -> None:
    [result] = IterableWrapper([element]).map(fn, input_col, output_col)
    assert result == expected
    assert type(result) is type(expected)


def test_lists_and_dicts_are_edited_in_place_but_the_source_is_not() -> None:
    element = [1, 2]
    assert apply_to_columns(one, 0, None)(element) is element
    source = [{"a": 1}]
    assert list(IterableWrapper(source).map(one, "a")) == [{"a": -1}]
    assert source == [{"a": 1}]
    list(IterableWrapper(source, deepcopy=False).map(one, "a"))
    assert source == [{"a": -1}]


@pytest.mark.parametrize(("column", "error"), [(5, IndexError), ("a", TypeError)])
def test_a_missing_column_is_an_error_while_iterating(column: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(IterableWrapper([(1, 2)]).map(one, column))
    with pytest.raises(KeyError):
        list(IterableWrapper([{"b": 1}]).map(one, "a"))


def with_keyword(a: Any, *, scale: int) -> Any:
    return a * scale


def with_default(a: Any, b: int = 2) -> Any:
    return a * b


@pytest.mark.parametrize("fn", [one, with_default, print, max, str, lambda *args: args, functools.partial(two, 1)])
def test_functions_that_can_take_one_column(fn: Callable[..., Any]) -> None:
    check_columns(fn, None)
    check_columns(fn, 0)


@pytest.mark.parametrize(
    ("fn", "input_col", "output_col", "message"),
    [
        (two, None, None, "takes 2 arguments, but input_col gives 1"),
        (two, 0, None, "takes 2 arguments"),
        (one, [0, 1], None, "takes 1 arguments, but input_col gives 2"),
        (with_default, [0, 1, 2], None, "takes 1 to 2 arguments"),
        (with_keyword, 0, None, "needs the keyword 'scale'"),
        (lambda a, *rest: a, [], None, "at least 1"),
        (one, None, 1, "output_col needs input_col"),
        (one, 0, [1, 2], "names one column, not 2"),
    ],
)
def test_what_cannot_work_is_refused_when_the_stage_is_built(
    fn: Any, input_col: Any, output_col: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        IterableWrapper([(1, 2, 3)]).map(fn, input_col, output_col)


@pytest.mark.parametrize("stage", ["map", "filter", "flatmap"])
def test_what_is_no_function_is_a_type_error(stage: str) -> None:
    with pytest.raises(TypeError, match="expected a function, got 3 of type int"):
        getattr(IterableWrapper([1]), stage)(3)


def test_the_generator_must_have_a_parameter() -> None:
    with pytest.raises(ValueError, match="keyword 'rng'"):
        IterableWrapper([1]).map(one, rng=True)
    check_columns(lambda x, **named: x, None, rng=True)
    check_columns(lambda x, *, rng: x, None, rng=True)


@given(st.lists(st.integers(), min_size=1, max_size=6), st.data())
def test_columns_of_lists_agree_with_a_plain_model(row: list[int], data: st.DataObject) -> None:
    columns = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=len(row), unique=True))
    expected = list(row)
    expected[columns[0]] = sum(row[column] for column in columns)
    expected = [value for place, value in enumerate(expected) if place not in columns[1:]]
    assert apply_to_columns(lambda *values: sum(values), columns, None)(list(row)) == expected
