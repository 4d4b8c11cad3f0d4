"""Elements split at random: exact shares, the same ones in every epoch, for every reader."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import pytest

from pipes.config import dump_graph, load_graph
from pipes.errors import GraphError, StateError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2

WEIGHTS = {"train": 0.7, "valid": 0.2, "test": 0.1}


def splits(size: int, weights: Any = None, seed: int = 0, **given: Any) -> Any:
    return IterableWrapper(range(size)).random_split(WEIGHTS if weights is None else weights, seed, **given)


def test_each_element_goes_to_one_split_and_the_shares_are_exact() -> None:
    for seed in range(20):
        parts = [list(split) for split in splits(30, seed=seed)]
        assert [len(part) for part in parts] == [21, 6, 3] == [len(split) for split in splits(30)]
        assert sorted(chain(*parts)) == list(range(30))
        assert all(part == sorted(part) for part in parts)
    assert [len(list(split)) for split in splits(10, {"a": 8, "b": 2, "c": 0})] == [8, 2, 0]
    assert [list(split) for split in splits(0)] == [[], [], []]


def test_shares_that_are_no_whole_numbers_are_about_right() -> None:
    parts = splits(10, {"a": 1, "b": 2})
    found = [len(list(part)) for part in parts]
    assert sum(found) == 10
    assert found[0] in (3, 4)
    with pytest.raises(TypeError, match="do not split 10 elements into whole numbers"):
        len(parts[0])


def test_every_place_is_as_likely() -> None:
    firsts = [splits(4, {"a": 1, "b": 3}, seed=seed, target="a") for seed in range(2000)]
    places = [next(iter(split)) for split in firsts]
    # Each is 500 with a standard deviation of 19.
    assert all(425 < places.count(place) < 575 for place in range(4))


def test_the_split_depends_on_its_seed_alone() -> None:
    train, valid, test = splits(50)
    first = list(train)
    assert list(train) == first
    assert list(splits(50, target="train").map(int)) == first
    loader = DataLoader2(splits(50, target="train").sharding_filter(), num_streams=3)
    loader.seed(9)
    assert [sorted(loader) for _ in range(2)] == [first, first]
    with pytest.warns(UserWarning, match="no sharding_filter"):
        assert sorted(DataLoader2(splits(50, target="train"), num_streams=3)) == first
    assert test.override_seed(1) is test
    assert list(train) == list(splits(50, seed=1)[0]) != first
    assert sorted([*train, *valid, *test]) == list(range(50))
    copied = pickle.loads(pickle.dumps(train))
    copied.override_seed(0)
    assert list(copied) == first != list(train)


def test_a_state_of_another_seed_is_refused() -> None:
    state = splits(50, target="train").state_dict()
    with pytest.raises(StateError, match="seed=0"):
        splits(50, seed=1, target="train").load_state_dict(state)


def test_a_source_without_a_length_or_with_another_one() -> None:
    source = IterableWrapper(range(10)).filter(lambda x: x > -1)
    with pytest.raises(TypeError, match=r"RandomSplitter needs total_length: Filter .* has no length"):
        source.random_split({"a": 1, "b": 1}, 0)
    a, b = source.random_split({"a": 1, "b": 1}, 0, 10)
    assert (len(a), len(list(b))) == (5, 5)
    with pytest.raises(ValueError, match="more elements than the 6"):
        list(source.random_split({"a": 1, "b": 1}, 0, 6, "a"))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([0.5, 0.5], TypeError, "weights must be a dict"),
        ({"a": "1"}, TypeError, "the weight of 'a' must be a number, not '1'"),
        ({"a": -1, "b": 3}, ValueError, "must be 0 or more, not -1"),
        ({"a": float("nan")}, ValueError, "must be 0 or more"),
        ({"a": 0, "b": 0}, ValueError, "one, at least, that is above 0"),
        ({}, ValueError, "one, at least"),
    ],
)
def test_weights_that_are_refused(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        splits(10, weights)


def test_what_must_not_stand_in_front() -> None:
    with pytest.raises(GraphError, match=r"ShardingFilter \(built at .* put .sharding_filter\(\) behind the splits"):
        IterableWrapper(range(10)).sharding_filter().random_split(WEIGHTS, 0)
    with pytest.warns(UserWarning, match="shuffle behind the splits") as caught:
        IterableWrapper(range(10)).shuffle().random_split(WEIGHTS, 0)
    assert caught[0].filename == __file__
    with pytest.raises(KeyError, match="target='c' is none of the weights: 'train', 'valid', 'test'"):
        splits(10, target="c")


def test_two_splits_in_one_graph_read_children_of_a_fork() -> None:
    left, right = IterableWrapper(range(10)).fork(2)
    a, b = (pipe.random_split({"a": 1, "b": 1}, 0, target=name) for pipe, name in ((left, "a"), (right, "b")))
    assert sorted(a.concat(b)) == list(range(10))


def test_yaml() -> None:
    text = "version: 1\npipe:\n  - IterableWrapper: !range 10\n  - random_split:\n      weights: {a: 8, b: 2}\n"
    text += "      seed: 3\n      target: a\n"
    pipe = load_graph(text)
    assert len(list(pipe)) == 8
    assert "random_split" in dump_graph(pipe)
    assert list(load_graph(dump_graph(pipe))) == list(pipe)
