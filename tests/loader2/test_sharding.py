"""How a loader splits its graph: what it refuses, what it warns of, two levels, and graphs that nobody thought of."""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import loader_of, plain, take, through_json

from pipes import IterDataPipe
from pipes.errors import GraphError, StateError
from pipes.graph import apply_sharding
from pipes.iter import FileOpener, IterableWrapper
from pipes.loader2.sharding import warnings_of_sharding
from pipes.map import SequenceWrapper
from pipes.saved import sealed
from pipes.stages.sharding import SHARDING_PRIORITIES

RANK, WORKER = SHARDING_PRIORITIES.DISTRIBUTED, SHARDING_PRIORITIES.MULTIPROCESSING


def numbers(size: int = 40) -> IterDataPipe[int]:
    return IterableWrapper(range(size))


class TestRefused:
    def test_when_the_loader_is_built(self) -> None:
        with pytest.raises(GraphError, match=r"2:ShardingFilter .* splits what 1:ShardingFilter has split"):
            loader_of(numbers().sharding_filter().sharding_filter())
        with pytest.raises(GraphError, match="pairs elements that 1:ShardingFilter and 4:ShardingFilter split apart"):
            loader_of(numbers().sharding_filter().filter(bool).zip(numbers().sharding_filter()))
        with pytest.raises(GraphError, match="split by rank only"):
            loader_of(numbers().sharding_filter(RANK), 0, 2)

    def test_when_a_state_brings_more_streams(self) -> None:
        graph = numbers().sharding_filter(RANK)
        loader = loader_of(graph)
        state = {**loader.state_dict(), "num_streams": 2}
        state["streams"]["1"] = state["streams"]["0"]
        with pytest.raises(GraphError, match="split by rank only"):
            loader.load_state_dict(sealed(state))
        assert list(loader) == list(range(40))


class TestWarnings:
    def test_work_that_every_stream_repeats(self) -> None:
        class Doubled(IterDataPipe[int]):
            def __init__(self, datapipe: Any) -> None:
                self.datapipe = datapipe

            def __iter__(self) -> Any:
                yield from self.datapipe

        names = IterableWrapper(["a", "b", "c"])
        for graph, stages in (
            (names.map(str).sharding_filter(), "1:Mapper stands above 2:ShardingFilter .built at .* runs it for"),
            (FileOpener(names).sharding_filter(), "1:FileOpener stands above 2:ShardingFilter"),
            (names.then(Doubled).flatmap(str).sharding_filter(), "1:Doubled, 2:FlatMapper stand above .* runs them"),
            (
                SequenceWrapper("abc").map(str).to_iter_datapipe().shuffle().sharding_filter(),
                "1:MapMapper stands above 4:ShardingFilter",
            ),
        ):
            (found,) = warnings_of_sharding(graph, 3)
            assert re.search(stages, found), found
            assert "each of the 3 streams" in found

    def test_what_belongs_above_is_no_reason(self) -> None:
        names = IterableWrapper(["a", "b", "c"])
        for graph in (
            names.filter(bool).shuffle().batch(1).sharding_filter().map(str),
            names.flatmap().sharding_filter(),
            IterableWrapper(map(str, range(3))).sharding_filter(),
            SequenceWrapper("abc").map(str).to_iter_datapipe().sharding_filter(),
            SequenceWrapper("abc").map(str).shuffle(),
        ):
            assert warnings_of_sharding(graph, 3) == []

    def test_fewer_shards_than_streams(self) -> None:
        (found,) = warnings_of_sharding(numbers(3).shuffle().sharding_filter(), 4)
        assert "stage 1:Shuffler gives 3 elements to share among 4 streams, so 1 streams get none" in found
        automatic = warnings_of_sharding(numbers(3).map(str), 4)
        assert len(automatic) == 2
        assert "stage 0:IterableWrapper gives 3 elements to share among 4 streams" in automatic[1]
        assert warnings_of_sharding(numbers(3).filter(bool).sharding_filter(), 4) == []

    def test_a_branch_that_is_not_split(self) -> None:
        for graph in (numbers().sharding_filter().concat(numbers()), numbers().zip(numbers().sharding_filter())):
            (found,) = warnings_of_sharding(graph, 3)
            assert "is not, so each of the 3 streams gets all elements of the latter" in found
            assert ":IterableWrapper" in found

    def test_they_are_said_once_and_never_for_one_stream(self) -> None:
        graph = numbers(3).map(str).sharding_filter()
        list(loader_of(graph))
        loader = loader_of(graph, 0, 4)
        with pytest.warns(UserWarning, match="elements to share among|stands above") as caught:
            iter(loader)
        assert len(caught) == 2
        assert {warning.filename for warning in caught} == {__file__}
        assert list(loader) == list(map(str, range(3)))


class TestTwoLevels:
    """By rank, then by worker: legal, with fixed numbers of both."""

    @staticmethod
    def run(graph: IterDataPipe[Any], world: int, patch: pytest.MonkeyPatch, streams: int = 4) -> list[list[Any]]:
        parts = []
        for rank in range(world):
            patch.setattr("pipes.loader2.loader.rank_and_world", lambda rank=rank: (rank, world))
            with loader_of(graph, 0, streams) as loader:
                parts.append(list(loader))
        return parts

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_it_is_one_split_when_nothing_stands_between(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        once = self.run(numbers().sharding_filter().batch(3), world, monkeypatch)
        assert self.run(numbers().sharding_filter(RANK).sharding_filter(WORKER).batch(3), world, monkeypatch) == once

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_nothing_is_lost_or_doubled(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        graph = numbers().shuffle().sharding_filter(RANK).filter(lambda x: x % 3 > 0).shuffle(5).sharding_filter(WORKER)
        parts = self.run(graph.batch(2), world, monkeypatch)
        assert sorted(x for part in parts for batch in part for x in batch) == [x for x in range(40) if x % 3]

    def test_workers_do_not_matter_but_ranks_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph = numbers().sharding_filter(RANK).shuffle(5).sharding_filter(WORKER).batch(2)
        monkeypatch.setattr("pipes.loader2.loader.rank_and_world", lambda: (1, 2))
        with loader_of(graph, 0, 4) as loader:
            expected = list(loader)
            loader.seed(3)
            take(iter(loader), 4)
            state = through_json(loader.state_dict())
        with loader_of(graph, 2) as loader:
            loader.load_state_dict(state)
            assert list(loader) == expected[4:]
        monkeypatch.setattr("pipes.loader2.loader.rank_and_world", lambda: (0, 1))
        other = {**state, "streams": {str(number): state["streams"]["1"] for number in range(4)}}
        with pytest.raises(StateError, match=r"split by rank and by worker apart.*saved by 2 ranks, not 1"):
            loader_of(graph).load_state_dict(sealed(other))


class TestGlobalBatches:
    """Batches of exactly B consecutive elements for any number of workers, from batches of names."""

    @pytest.mark.parametrize("workers", [0, 1, 2, 3])
    def test_they_are_those_of_one_process(self, workers: int) -> None:
        graph = numbers(50).shuffle().batch(8).sharding_filter().map(lambda names: [name * 10 for name in names])
        with loader_of(graph, 0, 1) as loader:
            expected = list(loader)
        assert [len(batch) for batch in expected] == [8] * 6 + [2]
        with loader_of(graph, workers, 3) as loader:
            assert len(loader) == 7
            assert list(loader) == expected


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_tails(streams: int, drop: bool) -> None:
    """Behind the shard point each stream has a last batch of its own: at most one short one a stream."""
    for size in (0, 1, 7, 24, 25, 31):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*elements to share among")
            loader = loader_of(numbers(size).sharding_filter().batch(4, drop_last=drop), 0, streams)
            batches = list(loader)
        shares = [len(range(stream, size, streams)) for stream in range(streams)]
        assert len(loader) == len(batches)
        assert sum(len(batch) == 4 for batch in batches) == sum(share // 4 for share in shares)
        short = sorted(len(batch) for batch in batches if len(batch) < 4)
        assert short == ([] if drop else sorted(share % 4 for share in shares if share % 4))


def apply_random_stage(draw: Any, pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    """One stage that keeps the multiset of its elements predictable."""
    stage = draw(st.sampled_from(["map", "filter", "shuffle", "flatmap", "rebatch", "header"]))
    if stage == "map":
        return pipe.map(lambda x: ("m", x))
    if stage == "filter":
        modulus = draw(st.integers(2, 4))
        return pipe.filter(lambda x: len(repr(x)) % modulus > 0)
    if stage == "shuffle":
        return pipe.shuffle(draw(st.integers(1, 9)))
    if stage == "flatmap":
        return pipe.flatmap(lambda x: [x, ("f", x)])
    return (
        pipe.batch(draw(st.integers(1, 4))).unbatch() if stage == "rebatch" else pipe.header(draw(st.integers(5, 60)))
    )


@st.composite
def joined_graphs(draw: Any) -> IterDataPipe[Any]:
    """Return a graph with at least one join, and stages that a stream may run on its share only below the last one."""
    branches: list[IterDataPipe[Any]] = [
        IterableWrapper([(chr(97 + place), n) for n in range(draw(st.integers(0, 25)))])
        for place in range(draw(st.integers(1, 3)))
    ]
    for _ in range(draw(st.integers(1, 4))):
        how = draw(st.sampled_from(["zip", "concat", "mux", "fork", "demux", "stage"]))
        branch = branches.pop(draw(st.integers(0, len(branches) - 1)))
        if how == "fork":
            one, two = branch.fork(2, buffer_size=2000)
            branches += [one, two]
        elif how == "demux":
            branches += branch.demux(2, lambda x: len(repr(x)) % 2, buffer_size=2000)
        elif how == "stage" or not branches:
            branches.append(apply_random_stage(draw, branch))
        else:
            other = branches.pop(draw(st.integers(0, len(branches) - 1)))
            branches.append(getattr(branch, how)(other))
    last = branches[0] if len(branches) == 1 else branches[0].concat(*branches[1:])
    # Behind the split: only what acts on each element by itself, or keeps all of them.
    for stage in draw(st.lists(st.sampled_from(["map", "filter", "shuffle", "flatmap", "batch"]), max_size=3)):
        if stage == "map":
            last = last.map(lambda x: ("m", x))
        elif stage == "filter":
            last = last.filter(lambda x: len(repr(x)) % 3 > 0)
        elif stage == "shuffle":
            last = last.shuffle(4)
        elif stage == "flatmap":
            last = last.flatmap(lambda x: [x, ("f", x)])
        else:
            last = last.batch(3).unbatch()
    return last


def multiset(elements: Any) -> Counter[str]:
    return Counter(repr(plain(element)) for element in elements)


def check_automatic(graph: IterDataPipe[Any], streams: int, workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with loader_of(graph, 0, 1) as loader:
            expected = [multiset(loader), multiset(loader)]
        with loader_of(graph, workers, streams) as loader:
            assert [multiset(loader), multiset(loader)] == expected


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(graph=joined_graphs(), streams=st.integers(1, 4))
def test_automatic_sharding_of_any_graph(graph: IterDataPipe[Any], streams: int) -> None:
    check_automatic(graph, streams, 0)


@pytest.mark.usefixtures("no_residue")
@settings(max_examples=4, deadline=None, suppress_health_check=SLOW)
@given(graph=joined_graphs(), workers=st.integers(1, 3))
def test_automatic_sharding_of_any_graph_in_workers(graph: IterDataPipe[Any], workers: int) -> None:
    check_automatic(graph, 3, workers)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(graph=joined_graphs(), streams=st.integers(1, 3), data=st.data())
def test_restoring_behind_forks_and_joins(graph: IterDataPipe[Any], streams: int, data: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loader = loader_of(graph, 0, streams)
        states, whole = [], []
        iterator = iter(loader)
        while True:
            states.append(loader.state_dict())
            try:
                whole.append(plain(next(iterator)))
            except StopIteration:
                break
        again = loader_of(graph, 0, streams, seed=8)
        for at in data.draw(st.sets(st.integers(0, len(whole)), max_size=6)):
            again.load_state_dict(through_json(states[at]))
            assert plain(list(again)) == whole[at:], at


@st.composite
def graphs_split_by_hand(draw: Any) -> IterDataPipe[Any]:
    """Return a graph of joined branches, each with a sharding_filter somewhere and other stages above and below it."""
    branches = []
    for place in range(draw(st.integers(1, 3))):
        branch: IterDataPipe[Any] = IterableWrapper([(chr(97 + place), n) for n in range(draw(st.integers(0, 25)))])
        for _ in range(draw(st.integers(0, 2))):
            branch = apply_random_stage(draw, branch)
        branch = branch.sharding_filter()
        for stage in draw(st.lists(st.sampled_from(["map", "filter", "shuffle"]), max_size=2)):
            if stage == "filter":
                branch = branch.filter(lambda x: len(repr(x)) % 3 > 0)
            elif stage == "shuffle":
                branch = branch.shuffle(4)
            else:
                branch = branch.map(lambda x: ("m", x))
        branches.append(branch)
    last = branches[0]
    for branch in branches[1:]:
        last = getattr(last, draw(st.sampled_from(["zip", "concat"])))(branch).map(lambda x: ("j", x))
    return last


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(graph=graphs_split_by_hand(), streams=st.integers(2, 4))
def test_a_graph_split_by_hand_is_right_or_refused(graph: IterDataPipe[Any], streams: int) -> None:
    try:
        check_automatic(graph, streams, 0)
    except GraphError as refused:
        assert "pairs elements that" in str(refused)  # noqa: PT017


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("kind", ["fork", "demux", "behind", "uneven"])
def test_restoring_behind_a_splitter_at_every_point(kind: str, streams: int) -> None:
    def graph() -> IterDataPipe[Any]:
        source = numbers(60).shuffle(5)
        if kind == "demux":
            odd, even = source.demux(2, lambda x: x % 2)
            return even.zip(odd.shuffle(4)).batch(2)
        if kind == "behind":
            one, two = source.sharding_filter().map(lambda x: x * 10).fork(2)
            return one.batch(2).zip(two.map(str).batch(2))
        one, two = source.fork(2)
        if kind == "uneven":
            return one.zip(two.filter(lambda x: x % 4 == 0)).batch(2)
        return one.zip(two.map(str)).sharding_filter().batch(4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loader, again = loader_of(graph(), 0, streams), loader_of(graph(), 0, streams, seed=8)
        whole = plain(list(loader))
        loader.seed(3)
        iterator = iter(loader)
        for at in itertools.count():
            again.load_state_dict(through_json(loader.state_dict()))
            assert plain(list(again)) == whole[at:], at
            if next(iterator, None) is None:
                break
    assert at == len(whole)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("when", ["worker_init_fn", "worker_reset_fn"])
def test_a_function_that_shards_what_the_loader_splits_is_refused(workers: int, when: str) -> None:
    def shard(pipe: Any, info: Any, seeds: Any = None) -> Any:
        return apply_sharding(pipe, 2, info.worker_id)

    graph = IterableWrapper(range(8)).sharding_filter().map(str)
    found = pytest.raises(GraphError, match=r"called apply_sharding of the sharding_filter .* leave the call out")
    with loader_of(graph, workers, 2, **{when: shard}) as loader, found:
        list(loader)


def test_streams_do_not_share_an_iterator() -> None:
    class Shared:
        """As a loader of another library: each `iter` begins anew, and the older one goes on as the newer."""

        def __init__(self) -> None:
            self.place = 0

        def __iter__(self) -> Any:
            self.place = 0
            return self

        def __next__(self) -> int:
            self.place += 1
            if self.place > 9:
                raise StopIteration
            return self.place

    class Source:
        def __init__(self) -> None:
            self.shared = Shared()

        def __iter__(self) -> Any:
            return iter(self.shared)

    copied = loader_of(IterableWrapper(Source()).sharding_filter(), 0, 2)
    assert sorted(copied) == list(range(1, 10))
    source = Source()
    shared = IterableWrapper(source, deepcopy=False).sharding_filter()
    assert list(loader_of(shared)) == list(range(1, 10))
    assert sorted(loader_of(shared, 0, 2)) == list(range(1, 10))  # each stream has a copy
    source.lock = threading.Lock()  # type: ignore[attr-defined]  # it cannot be copied
    with pytest.raises(GraphError, match=r"0:IterableWrapper wraps a Source that gives all readers one and the same"):
        list(loader_of(shared, 0, 2))
