"""One pipe a column, of iterable pipes and of map pipes."""

from __future__ import annotations

from typing import Any

import pytest

from pipes.errors import GraphError
from pipes.iter import IterableWrapper
from pipes.map import SequenceWrapper

ROWS = [(1, 2, 3), (4, 5, 6)]


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [(None, [[1, 4], [2, 5], [3, 6]]), ([1], [[1, 4], [3, 6]]), ((-1, 2), [[1, 4], [2, 5]]), ([0, 1], [[3, 6]])],
)
def test_columns(skipped: Any, expected: list[list[int]]) -> None:
    children = IterableWrapper(ROWS).unzip(3, columns_to_skip=skipped)
    assert [list(child) for child in children] == expected
    assert [len(child) for child in children] == [2] * len(expected)
    keyed = SequenceWrapper(ROWS).unzip(3, columns_to_skip=skipped)
    assert [list(child) for child in keyed] == expected
    assert [len(child) for child in keyed] == [2] * len(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [IterableWrapper(ROWS), SequenceWrapper(ROWS)])
def test_what_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="sequence_length must be at least 1, not 0"):
        source.unzip(0)
    with pytest.raises(ValueError, match="columns_to_skip has 3, but rows have 3 columns"):
        source.unzip(3, columns_to_skip=[3])
    with pytest.raises(GraphError, match="leaves none of the 2 columns"):
        source.unzip(2, columns_to_skip=[0, 1])


def test_a_row_that_is_too_short() -> None:
    with pytest.raises(IndexError, match="out of range"):
        list(IterableWrapper(ROWS).unzip(4)[3])
    with pytest.raises(IndexError, match="out of range"):
        SequenceWrapper(ROWS).unzip(4)[3][0]


def test_the_buffer_is_that_of_the_fork() -> None:
    first, second = IterableWrapper(ROWS * 5).unzip(2, buffer_size=1)
    assert len(list(first.zip(second))) == 10
    with pytest.raises(BufferError, match="more than 1 elements"):
        list(first)
    assert list(IterableWrapper(ROWS).unzip(1, buffer_size=0)[0]) == [1, 4]
