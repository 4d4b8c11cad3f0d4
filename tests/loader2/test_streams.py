"""One stream of one epoch: units of draws, snapshots, going on from a state."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
from loading import with_draws

import pipes.iter
import pipes.map
from pipes import IterDataPipe, MapDataPipe
from pipes.errors import StateError
from pipes.iter import IterableWrapper
from pipes.loader2.streams import Plan, Stream, StreamState, describe, runs_users_code, unit_size
from pipes.map import SequenceWrapper
from pipes.run import walk

PLAN = Plan(seed=5, epoch=2, streams=2)


def numbers(count: int = 400) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


GRAPHS: dict[str, Callable[[], IterDataPipe[Any]]] = {
    "plain": lambda: numbers().shuffle(9),
    "elements": lambda: numbers().shuffle(9).map(with_draws),
    "batches": lambda: numbers().shuffle(9).map(with_draws).batch(7),
    "after batches": lambda: numbers().batch(5).map(lambda batch: [with_draws(x) for x in batch]).enumerate(),
}


def drain(stream: Stream, count: int | None = None) -> list[Any]:
    found: list[Any] = []
    while count is None or len(found) < count:
        try:
            found.append(stream.next())
        except StopIteration:
            return found
    return found


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("number", [0, 1])
def test_it_goes_on_from_every_snapshot(name: str, number: int) -> None:
    make = GRAPHS[name]
    whole = drain(Stream(make(), PLAN, number))
    stream = Stream(make(), PLAN, number)
    for given in range(len(whole)):
        if given % 13 == 0:
            at, captures = stream.snapshot()
            assert given - at < stream.unit
            table = describe(make(), PLAN, number, captures)
            assert stream.table((at, captures)) == table
            again = Stream(make(), PLAN, number, StreamState(table, at, given))
            assert again.given == given
            assert drain(again) == whole[given:]
            assert again.given == len(whole)
        stream.next()
    assert drain(stream) == []
    with pytest.raises(StopIteration):
        stream.next()


@pytest.mark.parametrize("name", ["plain", "batches"])
def test_it_goes_on_from_the_epoch_s_start(name: str) -> None:
    make = GRAPHS[name]
    whole = drain(Stream(make(), PLAN, 0))
    again = Stream(make(), PLAN, 0, StreamState(None, 0, 11))
    assert again.given == 11
    assert drain(again) == whole[11:]


def test_a_stream_that_ended_stays_so() -> None:
    stream = Stream(numbers(), PLAN, 0, StreamState(given=200, ended=True))
    assert stream.given == 200
    assert drain(stream) == []


@pytest.mark.parametrize("shares", [True, False])
def test_others_draws_do_not_change_those_of_a_stream_that_shares(shares: bool) -> None:
    make = GRAPHS["elements"]
    whole = drain(Stream(make(), PLAN, 0))
    stream = Stream(make(), PLAN, 0, shares=shares)
    found = []
    for _ in whole:
        found.append(stream.next())
        random.random()
    assert (found == whole) == shares


def test_an_error_leaves_the_snapshot_before_its_unit() -> None:
    def fail(element: int) -> int:
        return 1 // (140 - element)

    stream = Stream(numbers().map(fail), PLAN, 0)
    assert len(drain(stream, 70)) == 70
    with pytest.raises(ZeroDivisionError):
        stream.next()
    assert stream.given == 70
    assert stream.snapshot()[0] == 64
    with pytest.raises(StopIteration):
        stream.next()


@pytest.mark.parametrize("user", [True, False])
def test_data_that_shrank_is_an_error(user: bool) -> None:
    make = (lambda count: numbers(count).map(abs)) if user else numbers
    stream = Stream(make(400), PLAN, 0)
    drain(stream, 150)
    at, captures = stream.snapshot()
    table = describe(make(400), PLAN, 0, captures)
    start = StreamState(table, at, 150) if user else StreamState(None, 0, 150)
    with pytest.raises(StateError, match="the data changed"):
        Stream(make(260), PLAN, 0, start)


def test_a_state_that_stands_after_its_end_is_damaged() -> None:
    with pytest.raises(StateError, match="damaged"):
        Stream(numbers(), PLAN, 0, StreamState(None, at=5, given=3))


def test_units() -> None:
    batches = numbers().batch(2)
    for graph in (
        batches,
        batches.map(len),
        batches.collate(),
        batches.filter(bool).enumerate().header(3).skip(1),
        IterableWrapper(range(9)).batch(3).sharding_filter().map(len),
    ):
        assert unit_size(graph) == 1, graph
    for graph in (numbers(), numbers().map(abs), batches.unbatch(), batches.zip(numbers())):
        assert unit_size(graph) == 64, graph


def test_what_runs_users_code() -> None:
    class Source:
        def __iter__(self) -> Any:
            return iter(())

    class Pipe(IterDataPipe[int]):
        def __iter__(self) -> Any:
            return iter(())

    class Keyed(MapDataPipe[int]):
        def __getitem__(self, key: int) -> int:
            return key

    for graph in (
        numbers().map(abs),
        numbers().filter(bool),
        numbers().flatmap(range),
        numbers().batch(2, wrapper_class=tuple),
        numbers().collate(sum),
        numbers().save_to_disk(filepath_fn=str),
        numbers().load_from_tar(select=bool),
        IterableWrapper(Source()),
        Pipe().batch(2),
        Keyed().to_iter_datapipe([1]),
        SequenceWrapper([1]).map(str).to_iter_datapipe(),
    ):
        assert runs_users_code(walk(graph)), graph
    for graph in (
        numbers().shuffle().batch(3).flatmap().batch(2).collate(),
        IterableWrapper([1, 2]).zip(IterableWrapper("ab")).cycle(2),
        SequenceWrapper({"a": 1}).to_iter_datapipe(["a"]),
    ):
        assert not runs_users_code(walk(graph)), graph


def test_every_function_that_a_stage_takes_is_known_as_its_user_s() -> None:
    """What nobody knows of is not seeded: its draws would differ after a resume, and from stream to stream."""
    elsewhere = {"on_device", "pin_memory_fn"}  # called in the main process, on batches that are made
    taken = 0
    for name in (*pipes.iter.__all__, *pipes.map.__all__):
        stage = getattr(pipes.iter, name, None) or getattr(pipes.map, name)
        if isinstance(stage, type) and issubclass(stage, IterDataPipe):
            parameters = inspect.signature(stage.__init__).parameters.values()
            functions = {each.name for each in parameters if "Callable" in str(each.annotation)} - elsewhere
            taken += len(functions)
            assert functions <= {*stage._calls, "on_error"} or "_calls_user" in vars(stage), (name, functions)
    assert taken > 20


def test_draws_above_a_buffer_are_noticed() -> None:
    def later(element: int) -> int:
        return element if element < 20 else random.randrange(5)

    for graph, stage in (
        (numbers().map(with_draws).shuffle(5).batch(2), "3:Shuffler"),
        (numbers().map(with_draws).flatmap(lambda x: [x, x]), "3:FlatMapper"),
        (numbers().map(later).shuffle(50), "3:Shuffler"),
        (numbers().map(lambda x, rng: rng.random(), rng=True).shuffle(5).batch(2), None),
        (numbers().map(abs).shuffle(5).map(with_draws), None),
        (numbers().map(with_draws).batch(2), None),
    ):
        stream = Stream(graph, PLAN, 0)
        assert len(drain(stream, 60)) == 60
        assert stream.drew_above == stage, graph
