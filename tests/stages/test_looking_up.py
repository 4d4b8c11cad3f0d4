"""Elements joined with what a map pipe has under their key."""

from __future__ import annotations

from typing import Any

import pytest

from pipes import IterDataPipe
from pipes.config import dump_graph, load_graph
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.map import SequenceWrapper

VALUES = SequenceWrapper({"a": 1, "b": 2})


def last(element: str) -> str:
    return element[-1]


def joined(*elements: Any, **given: Any) -> IterDataPipe[Any]:
    return IterableWrapper(elements).zip_with_map(VALUES, **{"key_fn": last, **given})


def test_pairs_keys_and_merged() -> None:
    assert list(joined("xa", "b", "a")) == [("xa", 1), ("b", 2), ("a", 1)]
    assert list(joined("xa", keep_key=True)) == [("a", ("xa", 1))]
    assert list(joined("xa", keep_key=True, merge_fn=lambda element, value: element * value)) == [("a", "xa")]
    assert list(IterableWrapper([-1]).zip_with_map(SequenceWrapper([5, 6]), abs)) == [(-1, 6)]
    assert len(joined("a", "b")) == 2


def test_a_key_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="key_fn gave 'z', which is not a valid key"):
        list(joined("a", "z"))
    with pytest.raises(KeyError, match="key_fn gave 2, which"):
        list(IterableWrapper([2]).zip_with_map(SequenceWrapper([5, 6]), abs))
    assert list(joined("a", "z", "b", on_error="skip")) == [("a", 1), ("b", 2)]


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="map_datapipe must be a MapDataPipe, not a list"):
        IterableWrapper("ab").zip_with_map([1], last)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a function, got 5"):
        joined("a", key_fn=5)
    with pytest.raises(ValueError, match="takes 1 arguments"):
        joined("a", merge_fn=last)


def test_branches_that_both_look_up_still_fit_together() -> None:
    def names() -> IterDataPipe[Any]:
        return IterableWrapper(["xa", "xb", "a"]).sharding_filter().zip_with_map(VALUES, last)

    loader = DataLoader2(names().zip(names()), num_streams=2)
    assert sorted(loader) == [(("a", 1), ("a", 1)), (("xa", 1), ("xa", 1)), (("xb", 2), ("xb", 2))]


def test_yaml() -> None:
    text = """
    version: 1
    pipes:
      values:
        - SequenceWrapper: {sequence: {a: 1, b: 2}}
    pipe:
      - IterableWrapper: [b, a]
      - zip_with_map: {map_datapipe: $values, key_fn: str}
    """
    pipe = load_graph(text)
    assert list(pipe) == [("b", 2), ("a", 1)]
    assert list(load_graph(dump_graph(pipe))) == list(pipe)
