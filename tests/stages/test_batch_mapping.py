"""A function of several elements at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pipes.config import dump_graph, load_graph
from pipes.iter import IterableWrapper


def doubled(batch: list[int]) -> list[int]:
    return [2 * number for number in batch]


def test_the_items_of_what_the_function_gives() -> None:
    source = IterableWrapper(range(5))
    assert list(source.map_batches(doubled, 2)) == [0, 2, 4, 6, 8]
    assert list(source.map_batches(lambda batch: batch + batch, 4)) == [0, 1, 2, 3, 0, 1, 2, 3, 4, 4]
    assert list(source.map_batches(lambda batch: [type(batch).__name__], 3)) == ["list", "list"]


def test_columns() -> None:
    source = IterableWrapper([(1, 2), (3, 4), (5, 6)])
    assert list(source.map_batches(doubled, 2, 0)) == [2, 6, 10]
    assert list(source.map_batches(lambda batch: [batch], 2, [1, 0])) == [[[2, 1], [4, 3]], [[6, 5]]]
    assert list(IterableWrapper([{"a": 7}]).map_batches(doubled, 2, "a")) == [14]


def test_a_batch_that_fails() -> None:
    def picky(batch: Any) -> Any:
        return None if 2 in batch else batch

    source = IterableWrapper(range(6))
    with pytest.raises(TypeError, match="not iterable") as caught:
        list(source.map_batches(picky, 2))
    assert any("in stage 2:BatchMapper" in note and "[2, 3]" in note for note in caught.value.__notes__)
    assert list(source.map_batches(picky, 2, on_error="skip")) == [0, 1, 4, 5]
    with pytest.raises(AssertionError, match="batch_size must be at least 1"):
        source.map_batches(picky, 0)
    with pytest.raises(TypeError, match="has no length"):
        len(source.map_batches(picky, 2))


def test_yaml_does_not_name_the_stage_that_gathers() -> None:
    text = "version: 1\npipe:\n  - IterableWrapper: [3, 1, 2]\n  - map_batches: {fn: sorted, batch_size: 2}\n"
    pipe = load_graph(text)
    assert list(pipe) == [1, 3, 2]
    assert dump_graph(pipe) == text
