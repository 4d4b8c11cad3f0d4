"""Contexts and runs: random graphs, stops at random places, deep and wide graphs, closing, cost."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_contract import plain, saved, start

from pipes import IterDataPipe
from pipes.context import Context
from pipes.errors import GraphError, StateError
from pipes.iter import IterableWrapper
from pipes.node import describe_automatic_sharding, inputs_of, walk
from pipes.run import pull, stage_names

Pipe = IterDataPipe[Any]

pytestmark = pytest.mark.filterwarnings("ignore:stage .* has no state of its own")


def numbers(size: int, first: int = 0) -> IterableWrapper[int]:
    return IterableWrapper(range(first, first + size))


def in_text(value: Any) -> str:
    return f"<{value}>"


class Replayed(IterDataPipe[Any]):
    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


class Passing(Replayed):
    stateless = True


STAGES: list[tuple[str, Callable[[Pipe, int], Pipe]]] = [
    ("map", lambda p, n: p.map(in_text)),
    ("keyed", lambda p, n: p.map(lambda x, rng: (x, int(rng.integers(1000))), rng=True)),
    ("filter", lambda p, n: p.filter(lambda x: len(str(x)) % (n + 1) != 0)),
    ("flatmap", lambda p, n: p.flatmap(lambda x: [x] * (len(str(x)) % 3))),
    ("batch", lambda p, n: p.batch(n + 1)),
    ("batch_drop", lambda p, n: p.batch(n + 1, drop_last=True)),
    ("unbatch", lambda p, n: p.batch(n + 1).unbatch()),
    ("shuffle", lambda p, n: p.shuffle(2 * n + 1)),
    ("shard", lambda p, n: p.sharding_filter()),
    ("header", lambda p, n: p.header(9 + n)),
    ("skip", lambda p, n: p.skip(n)),
    ("enumerate", lambda p, n: p.enumerate(n)),
    ("cycle", lambda p, n: p.cycle(2)),
    ("concat", lambda p, n: p.concat(numbers(n, 90).shuffle(2))),
    ("concat_after", lambda p, n: numbers(n, 90).concat(p)),
    ("zip", lambda p, n: p.zip(numbers(9 + 3 * n, 200).shuffle(3))),
    ("mux", lambda p, n: p.mux(numbers(9 + 2 * n, 300))),
    ("fork", lambda p, n: (lambda a, b: a.zip(b.shuffle(n + 1)))(*p.fork(2))),
    ("demux", lambda p, n: (lambda a, b: a.concat(b))(*p.demux(2, lambda x: len(str(x)) % 2))),
    ("own", lambda p, n: Passing(p)),
    ("own_replayed", lambda p, n: Replayed(p)),
    ("own_nested", lambda p, n: Passing(p.map(str)).shuffle(n)),
    ("off", lambda p, n: p.shuffle(3).set_shuffle(False)),
]

graphs = st.lists(st.tuples(st.sampled_from(range(len(STAGES))), st.integers(1, 4)), max_size=6).filter(
    lambda chain: sum(STAGES[which][0] == "shard" for which, _ in chain) <= 1
)


def build(chain: list[tuple[int, int]], size: int) -> Pipe:
    pipe: Pipe = numbers(size)
    for which, number in chain:
        pipe = STAGES[which][1](pipe, number)
    return pipe


@settings(max_examples=150)
@given(graphs, st.integers(0, 30), st.sampled_from([(0, 1), (0, 2), (1, 2)]), st.integers(0, 2), st.data())
def test_any_graph_stopped_anywhere_goes_on_exactly(
    chain: list[tuple[int, int]], size: int, stream: tuple[int, int], epoch: int, data: st.DataObject
) -> None:
    where: Any = {"epoch": epoch, "stream": stream[0], "streams": stream[1]}
    whole = [plain(element) for element in start(build(chain, size), **where)]
    got: list[Any] = []
    state = None
    for _ in range(3):
        run = start(build(chain, size), state, **where)
        steps = data.draw(st.integers(0, len(whole) - len(got)))
        got += [plain(element) for element in islice(iter(run), steps)]
        state = saved(run)
        run.context.close()
    got += [plain(element) for element in start(build(chain, size), state, **where)]
    assert got == whole


@settings(max_examples=80)
@given(graphs, st.integers(0, 40), st.integers(1, 4))
def test_what_is_above_the_split_does_not_depend_on_the_number_of_streams(
    chain: list[tuple[int, int]], size: int, streams: int
) -> None:
    above = [each for each in chain if STAGES[each[0]][0] != "shard"]
    whole = [plain(element) for element in start(build(above, size).sharding_filter())]
    for stream in range(streams):
        shard = start(build(above, size).sharding_filter(), stream=stream, streams=streams)
        assert [plain(element) for element in shard] == whole[stream::streams]


@settings(max_examples=60)
@given(graphs, st.integers(0, 30), st.data())
def test_replay_goes_where_iterating_goes(chain: list[tuple[int, int]], size: int, data: st.DataObject) -> None:
    whole = [plain(element) for element in start(build(chain, size))]
    count = data.draw(st.integers(0, len(whole)))
    wanted = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=5))) if count else []
    run = start(build(chain, size))
    assert [plain(element) for element in run.replay(count, wanted)] == [whole[offset] for offset in wanted]
    assert [plain(element) for element in run] == whole[count:]


def test_pull_takes_the_wanted_and_no_more() -> None:
    source = iter(range(10))
    assert pull(source, 5, [0, 3, 4], "x") == [0, 3, 4]
    assert next(source) == 5
    with pytest.raises(StateError, match="stage x has fewer elements than when the state was saved"):
        pull(source, 9, [8], "x")


# Automatic sharding.


def test_a_linear_graph_is_split_after_its_source() -> None:
    pipe = numbers(10).shuffle(10).batch(2)
    shards = [sorted(x for batch in start(pipe, stream=s, streams=2) for x in batch) for s in range(2)]
    assert shards == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    message = describe_automatic_sharding(pipe)
    assert message is not None
    assert "split after stage 0:IterableWrapper (built at " in message
    assert "runs 0:IterableWrapper in full" in message
    assert ".sharding_filter()" in message
    assert 'sharding="replicate"' in message


def test_other_graphs_are_split_after_the_last_join() -> None:
    pipe = numbers(10).zip(numbers(10).map(str)).shuffle(10).batch(2)
    shards = [sorted(x for batch in start(pipe, stream=s, streams=2) for x in batch) for s in range(2)]
    assert shards == [[(i, str(i)) for i in range(s, 10, 2)] for s in range(2)]
    assert "split after stage 3:Zipper" in str(describe_automatic_sharding(pipe))
    left, right = numbers(10).shuffle(5).fork(2)
    pipe = left.zip(right)
    shards = [[x for x, _ in start(pipe, stream=s, streams=2)] for s in range(2)]
    assert sorted(shards[0] + shards[1]) == list(range(10))


def test_graphs_with_a_sharding_filter_are_split_there_alone() -> None:
    pipe = numbers(10).sharding_filter().batch(2)
    assert describe_automatic_sharding(pipe) is None
    assert list(start(pipe, stream=1, streams=2)) == [[1, 3], [5, 7], [9]]


def test_splitting_can_be_left_out() -> None:
    context = Context(numbers(4), seed=1, stream=1, streams=2, shard_automatically=False)
    assert list(context.start()) == [0, 1, 2, 3]


# Graphs.


def test_inputs_are_found_in_attributes_and_containers_each_once() -> None:
    a, b, c = numbers(1), numbers(2), numbers(3)

    class Holder(IterDataPipe[int]):
        def __init__(self) -> None:
            self.deep = {"x": [a, (b,)], c: a}
            self.loop: list[Any] = []
            self.loop.append(self.loop)
            self.data = [a] * 5000

    holder = Holder()
    assert [id(each) for each in inputs_of(holder)] == [id(c), id(a), id(b)]
    assert stage_names(holder) == {
        id(c): "0:IterableWrapper",
        id(a): "1:IterableWrapper",
        id(b): "2:IterableWrapper",
        id(holder): "3:Holder",
    }


def test_walking_costs_nothing_however_large_the_data() -> None:
    class Data(list[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("walked")

        def __getstate__(self) -> Any:
            raise AssertionError("pickled")

    class Holder(IterDataPipe[int]):
        def __init__(self, source: Any) -> None:
            self.source = source
            self.names = Data(["x"] * 2_000_000)

    pipe = Holder(IterableWrapper(Data(["x"] * 2_000_000))).map(str)
    assert len(walk(pipe)) == 3
    repr(pipe)


def test_five_hundred_stages_work() -> None:
    pipe: Any = numbers(4)
    for _ in range(500):
        pipe = pipe.map(abs)
    run = start(pipe)
    first = next(iter(run))
    assert [first, *start(pipe, saved(run))] == [0, 1, 2, 3]
    assert list(pipe) == [0, 1, 2, 3]
    assert repr(pipe).count("\n") == 500


@pytest.mark.parametrize("add", [lambda p: p.map(abs), lambda p: p.shuffle(1), lambda p: p.batch(1).unbatch(), Passing])
def test_a_graph_runs_or_is_refused_whatever_its_depth(add: Any) -> None:
    pipe: Any = numbers(4)
    outcomes = []
    for more in (90, 40, 20, 100, 100, 40, 40, 80, 140, 350):
        for _ in range(more):
            pipe = add(pipe)
        try:
            assert len(list(pipe)) == 4
            outcomes.append("runs")
        except GraphError:
            outcomes.append("refused")
    assert outcomes == sorted(outcomes, reverse=True)
    assert set(outcomes) == {"runs", "refused"}


def test_a_graph_too_deep_says_so_before_it_runs() -> None:
    pipe: Any = numbers(4)
    for _ in range(sys.getrecursionlimit() + 10):
        pipe = pipe.map(abs)
    with pytest.raises(GraphError, match=r"the graph is \d+ calls deep, but Python's recursion limit of"):
        list(pipe)
    with pytest.raises(TypeError, match="too deep to count"):
        len(pipe)


def test_many_joins_in_a_row_work() -> None:
    pipe: Pipe = numbers(1)
    for first in range(1, 300):
        pipe = pipe + numbers(1, first)
    assert list(pipe) == list(range(300))


def test_diamonds_do_not_multiply() -> None:
    pipe: Pipe = numbers(5)
    for _ in range(12):
        left, right = pipe.fork(2)
        pipe = left.zip(right).map(lambda pair: pair[0])
    assert len(walk(pipe)) == 1 + 12 * 5
    assert list(pipe) == list(range(5))
    run = start(pipe)
    next(iter(run))
    state = saved(run)
    assert len(str(state)) < 100_000
    assert list(start(pipe, state)) == [1, 2, 3, 4]


def test_a_map_pipe_in_the_place_of_an_iterable_one_says_what_to_do() -> None:
    from pipes.map import SequenceWrapper

    pipe: Any = numbers(3).zip(SequenceWrapper([1, 2, 3]))  # type: ignore[call-overload]
    with pytest.raises(GraphError, match=r"SequenceWrapper is read by key; .*\.to_iter_datapipe\(\)"):
        list(pipe)


def test_closing_is_complete_and_in_order() -> None:
    closed: list[str] = []

    def stage(name: str) -> Callable[[Any], IterDataPipe[Any]]:
        class Closing(IterDataPipe[Any]):
            stateless = True

            def __init__(self, source: Any) -> None:
                self.source = source

            def __iter__(self) -> Iterator[Any]:
                try:
                    yield from self.source
                finally:
                    closed.append(name)

        return Closing

    pipe = stage("last")(stage("middle")(stage("first")(numbers(5)).map(str)).batch(2).unbatch())
    run = start(pipe)
    next(iter(run))
    run.context.close()
    assert closed == ["last", "middle", "first"]
    assert next(iter(run), "ended") == "ended"


def test_running_allocates_nothing_that_grows_with_the_elements() -> None:
    rows = [None] * 30_000
    pipe = IterableWrapper(rows).shuffle(100).sharding_filter().header(25_000).skip(10).batch(10)
    iterator = iter(start(pipe))
    for _ in range(500):
        next(iterator)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1500):
            next(iterator)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 15,000 elements went by; a block of draws, one batch and one anchor are what may come and go.
    assert after - before < 20_000
    assert peak - before < 40_000


def test_a_note_names_the_stream_when_there_are_several() -> None:
    def broken(x: int) -> int:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as caught:
        list(start(numbers(5).sharding_filter().map(broken), stream=1, streams=3))
    [note] = caught.value.__notes__
    assert note.startswith("in stage 2:Mapper built at ")
    assert note.endswith("on element 1, in stream 1 of 3")


def test_a_close_that_raises_leaves_nothing_open() -> None:
    closed = []

    class Source(IterDataPipe[int]):
        def __init__(self, name: str) -> None:
            self.name = name

        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(3)
            finally:
                closed.append(self.name)
                if self.name == "first":
                    raise OSError("the disk is gone")

    context = Context(Source("first").zip(Source("second"), Source("third")), seed=0)
    next(iter(context.start()))
    with pytest.raises(OSError, match="the disk is gone"):
        context.close()
    assert sorted(closed) == ["first", "second", "third"]
