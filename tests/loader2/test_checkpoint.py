"""States: what is in one, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from loading import loader_of, take, through_json, with_draws

from pipes import IterDataPipe
from pipes.errors import StateError
from pipes.iter import IterableWrapper
from pipes.loader2.checkpoint import read_state
from pipes.saved import fingerprint, sealed


def graph(batch: int = 3, count: int = 50) -> IterDataPipe[Any]:
    return IterableWrapper(range(count)).shuffle(7).sharding_filter().map(with_draws).batch(batch)


@pytest.fixture
def state() -> Any:
    loader = loader_of(graph(), 0, 2)
    take(iter(loader), 7)
    return through_json(loader.state_dict())


def test_its_form(state: Any) -> None:
    names = {"pipes_state", "graph", "seed", "epoch", "num_streams", "world", "replicate", "streams", "digest"}
    assert state.keys() == names
    assert (state["pipes_state"], state["seed"], state["epoch"], state["num_streams"]) == (1, 3, 0, 2)
    stages = state["graph"]
    assert list(stages) == ["0:IterableWrapper", "1:Shuffler", "2:ShardingFilter", "3:Mapper", "4:Batcher"]
    assert stages["0:IterableWrapper"] == "iterable=range(0:50:1), deepcopy=True"
    assert stages["3:Mapper"] == "fn=loading.with_draws, input_col=None, output_col=None, rng=False"
    assert state["streams"]["0"]["given"] == 4
    assert state["streams"]["1"]["given"] == 3
    assert len(json.dumps(state)) < 5000


Damage = Callable[[Any], Any]


def with_(path: list[str], value: Any) -> Damage:
    def damage(state: Any) -> Any:
        place = state
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return state

    return damage


def without(*path: str) -> Damage:
    def damage(state: Any) -> Any:
        place = state
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        return state

    return damage


BAD: dict[str, tuple[Damage, str]] = {
    "bytes": (lambda state: pickle.dumps(state), "not bytes"),
    "nothing": (lambda state: None, "not NoneType"),
    "a string": (lambda state: json.dumps(state), "not str"),
    "no state": (lambda state: {"model": 1}, "no 'pipes_state'"),
    "an empty list": (lambda state: [], "empty list"),
    "torchdata's": (
        lambda state: {"serialized_datapipe": b"", "reading_service_state": None, "randomness_state": ()},
        "saved by torchdata",
    ),
    "another version": (with_(["pipes_state"], 2), "format version 2.*reads version 1"),
    "no graph": (without("graph"), "no description of its graph"),
    "a graph of numbers": (with_(["graph", "1:Shuffler"], 3), "no description of its graph"),
    "a stage less": (without("graph", "1:Shuffler"), "1:Shuffler is not in the saved one"),
    "a stage more": (with_(["graph", "9:Extra"], "a=1"), "9:Extra is missing here"),
    "another setting": (with_(["graph", "4:Batcher"], "batch_size=4"), "had batch_size=4, and has batch_size=3 here"),
    "no seed": (without("seed"), "seed"),
    "a seed of text": (with_(["seed"], "7"), "seed"),
    "a truth as seed": (with_(["seed"], True), "seed"),
    "a seed of 65 bits": (with_(["seed"], 2**64), "seed"),
    "a negative epoch": (with_(["epoch"], -1), "epoch"),
    "no streams": (without("streams"), "no streams"),
    "streams in a list": (with_(["streams"], []), "no streams"),
    "one stream is missing": (without("streams", "1"), r"lacks streams \[1\]"),
    "no count of streams": (without("num_streams"), "num_streams"),
    "streams without number": (with_(["num_streams"], 0), "no stream of 0"),
    "very many streams": (with_(["num_streams"], 2**61), "num_streams=2305843009213693952, the loader"),
    "a stream that cannot be": (with_(["streams", "2"], {"at": 0, "given": 0}), "'2' is no stream of 2"),
    "a stream of words": (with_(["streams", "one"], {"at": 0, "given": 0}), "'one' is no stream"),
    "a stream of many digits": (with_(["streams", "1" * 5000], {"at": 0, "given": 0}), "no stream"),
    "a stream twice": (with_(["streams", "01"], {"at": 0, "given": 0}), "'01' is no stream"),
    "a stream that is no dict": (with_(["streams", "0"], 3), "'at' of stream 0"),
    "no table at a later place": (with_(["streams", "0", "table"], None), "stream 0 stands at 4"),
    "an end of text": (with_(["streams", "0", "ended"], "no"), "whether it ended"),
    "a share of text": (with_(["replicate"], "no"), "neither true nor false"),
    "a stage less in a table": (without("streams", "0", "table", "1:Shuffler"), "where .*1:Shuffler.* belong"),
    "a stage more in a table": (with_(["streams", "0", "table", "7:X"], {}), "7:X"),
    "a count of text": (with_(["streams", "0", "table", "2:ShardingFilter", "given"], "4"), "'given' of 2:Sharding"),
    "a number too long to print": (with_(["epoch"], 1 << 100_000), "100001 bits"),
    "a table that is no dict": (with_(["streams", "0", "table"], [1]), "stream 0 has no table"),
    "a negative count": (with_(["streams", "0", "given"], -1), "'given' of stream 0"),
    "an infinite count": (with_(["streams", "0", "given"], float("inf")), "inf does not belong"),
    "a fraction": (with_(["streams", "0", "given"], 1.5), "'given' of stream 0"),
    "a truth as count": (with_(["streams", "0", "at"], True), "'at' of stream 0"),
    "a huge count": (with_(["streams", "0", "given"], 2**80), "'given' of stream 0"),
    "more at than given": (with_(["streams", "0", "at"], 5), "stream 0 stands at 5, after 4"),
    "an object": (with_(["seed"], object()), "object does not belong"),
    "a key that is no string": (lambda state: {**state, 3: 4}, "no short string"),
    "another share": (with_(["replicate"], True), "replicate"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_state_is_refused_and_changes_nothing(name: str, state: Any) -> None:
    damage, message = BAD[name]
    bad = damage(through_json(state))
    if isinstance(bad, dict) and "pipes_state" in bad:
        with contextlib.suppress(StateError):
            bad = sealed(bad)
    loader = loader_of(graph(), 0, 2, seed=9)
    iterator = iter(loader)
    before = take(iterator, 3)
    kept = loader.state_dict()
    with pytest.raises(StateError, match=message):
        loader.load_state_dict(bad)
    assert loader.state_dict() == kept
    rest = list(iterator)
    again = loader_of(graph(), 0, 2, seed=9)
    assert list(again) == before + rest


def test_a_gigabyte_is_refused_at_once(state: Any) -> None:
    state["graph"]["1:Shuffler"] = "x" * 2**30
    loader = loader_of(graph(), 0, 2)
    started = time.process_time()
    with pytest.raises(StateError, match="1073741824 characters"):
        loader.load_state_dict(state)
    assert time.process_time() - started < 0.5


def test_depth_and_size_are_bounded(state: Any) -> None:
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    state["streams"]["0"]["table"] = {"x": deep}
    loader = loader_of(graph(), 0, 2)
    with pytest.raises(StateError, match="too deep or too large"):
        loader.load_state_dict(state)
    state["streams"]["0"]["table"] = {"x": [0] * 2_000_000}
    with pytest.raises(StateError, match="too deep or too large"):
        loader.load_state_dict(state)
    while isinstance(deep, list):  # or freeing it would recurse
        deep = deep[0]


def test_another_explicit_count_of_streams_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="num_streams=2, the loader num_streams=3"):
        loader_of(graph(), 0, 3).load_state_dict(state)
    with pytest.raises(StateError, match=r"lacks streams \[2, 3, 4, 5, 6, 7, 8, 9\]"):
        loader_of(graph()).load_state_dict(sealed({**state, "num_streams": 2**61}))
    loader = loader_of(graph(), 3)
    loader.load_state_dict(state)
    assert loader.num_streams == 2


def test_another_graph_is_named(state: Any) -> None:
    with pytest.raises(StateError, match=r"stage 4:Batcher had batch_size=3, and has batch_size=4 here"):
        loader_of(graph(4), 0, 2).load_state_dict(state)
    with pytest.raises(StateError, match=r"other data: stage 0.* had iterable=range\(0:50:1\), and has .*0:51:1"):
        loader_of(graph(count=51), 0, 2).load_state_dict(state)
    with pytest.raises(StateError, match=r"stage 3:Mapper had fn=loading.with_draws, and has fn=builtins.str"):
        loader_of(IterableWrapper(range(50)).shuffle(7).sharding_filter().map(str).batch(3)).load_state_dict(state)


def test_states_of_several_moments_are_refused(state: Any) -> None:
    state = sealed({**state, "world": 2})
    for name, value in (("seed", 4), ("epoch", 1), ("world", 1)):
        with pytest.raises(StateError, match=f"not of one moment: {name}"):
            loader_of(graph(), 0, 2).load_state_dict([state, sealed({**state, name: value})])


def test_a_stream_at_two_places_is_refused(state: Any) -> None:
    state = sealed({**state, "world": 2})
    later = through_json(state)
    later["streams"]["1"]["given"] += 1
    with pytest.raises(StateError, match="two of the states hold stream 1, at different places"):
        loader_of(graph(), 0, 2).load_state_dict([state, sealed(later)])


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_any_seed_of_64_bits_comes_back(seed: int) -> None:
    loader, again = loader_of(graph(), 0, 2, seed=seed), loader_of(graph(), 0, 2, seed=5)
    iterator = iter(loader)
    take(iterator, 3)
    again.load_state_dict(through_json(loader.state_dict()))
    assert list(again) == list(iterator)


def test_more_states_than_ranks_are_refused_before_they_are_read(state: Any) -> None:
    with pytest.raises(StateError, match="1000000 states, of a loader with a world size of 1: pass one state a rank"):
        loader_of(graph(), 0, 2).load_state_dict([state] + [None] * 999_999)


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in numbers_in(item, (*path, key))]
    if isinstance(value, list):
        return [found for key, item in enumerate(value) for found in numbers_in(item, (*path, key))]
    return [path] if isinstance(value, int) and not isinstance(value, bool) else []


GRAPHS: dict[str, Callable[[], IterDataPipe[Any]]] = {
    "shuffle": graph,
    "stages": lambda: (
        IterableWrapper(range(50)).sharding_filter().flatmap(lambda x: [x] * (x % 3)).enumerate().shuffle(5).batch(3)
    ),
    "joined": lambda: IterableWrapper(range(50)).concat(IterableWrapper(range(9))).sharding_filter().batch(3),
    "cycle": lambda: IterableWrapper(range(20)).shuffle(4).cycle(3).sharding_filter().batch(3),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_any_number_of_a_state_may_be_damaged(name: str) -> None:
    """A wrong number is a StateError or another place in the data, at load or while iterating, never another error."""
    loader = loader_of(GRAPHS[name](), 0, 2)
    take(iter(loader), 9)
    state = through_json(loader.state_dict())
    paths = [path for path in numbers_in(state) if path[0] == "streams"]
    assert len(paths) > 6
    for path in paths:
        for value in (-1, 0, 10**6, 2**61, "5", 1.5, None):
            bad = through_json(state)
            functools.reduce(lambda place, key: place[key], path[:-1], bad)[path[-1]] = value
            bad = sealed(bad)
            try:
                loader.load_state_dict(bad)
                for _ in zip(range(100), loader, strict=False):
                    pass
            except StateError:
                continue


def test_fingerprint_of_functions_and_data() -> None:
    class Data:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            return iter(range(3))

    pipe = IterableWrapper(Data()).map(functools.partial(int, base=10)).filter(lambda x: True).slice([0, 2])
    assert list(fingerprint(pipe).values()) == [
        f"iterable={Data.__qualname__}[3], deepcopy=True",
        "fn=partial(builtins.int), input_col=None, output_col=None, rng=False",
        f"filter_fn={__name__}.test_fingerprint_of_functions_and_data.<locals>.<lambda>, input_col=None",
        "index=[0, 2], stop=None, step=None",
    ]


def test_read_state_takes_tuples_and_leaves_the_state_alone(state: Any) -> None:
    before = json.dumps(state)
    checkpoint = read_state((state,), loader_of(graph(), 0, 2)._graph)
    assert checkpoint.streams.keys() == {0, 1}
    assert json.dumps(state) == before
