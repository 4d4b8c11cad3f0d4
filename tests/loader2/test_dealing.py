"""Sources that can be read only once: main reads them and deals their elements to the streams."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from loading import global_state, loader_of, take, through_json, with_draws

from pipes import IterDataPipe
from pipes.errors import GraphError, UnpicklableStageError
from pipes.iter import IterableWrapper
from pipes.loader2.dealing import Dealer, Exhausted, cut, positions_of
from pipes.loader2.streams import Plan

pytestmark = [
    pytest.mark.usefixtures("no_residue"),
    pytest.mark.filterwarnings("ignore:.*wraps a generator, which can be read once"),
]


def numbers(count: int = 60, fail_at: int | None = None, taken: list[int] | None = None) -> Iterator[int]:
    for number in range(count):
        if number == fail_at:
            raise LookupError(f"no number {number}")
        if taken is not None:
            taken.append(number)
        yield number


def once(count: int = 60, **options: Any) -> IterDataPipe[int]:
    return IterableWrapper(numbers(count, **options))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
class TestOrder:
    def test_it_is_that_of_a_list(self, workers: int) -> None:
        def graph(source: Any) -> IterDataPipe[Any]:
            return IterableWrapper(source).sharding_filter().map(with_draws).batch(4)

        with loader_of(graph(list(range(60))), 0, 3) as loader:
            expected = list(loader)
        with loader_of(graph(numbers()), workers, 3) as loader:
            assert list(loader) == expected

    def test_without_a_sharding_filter_each_comes_once(self, workers: int) -> None:
        with loader_of(once().batch(4), workers, 3) as loader:
            assert sorted(x for batch in loader for x in batch) == list(range(60))

    def test_a_stage_above_the_shard_point_runs_in_main(self, workers: int) -> None:
        before = global_state()
        runs = []
        for streams in (3, 3):
            with loader_of(once().shuffle(9).map(with_draws).sharding_filter(), workers, streams) as loader:
                runs.append(list(loader))
        assert runs[0] == runs[1]
        assert sorted(x[0] for x in runs[0]) == list(range(60))
        assert len({x[1] for x in runs[0]}) == 60
        assert global_state() == before

    @pytest.mark.parametrize("count", [0, 1, 2, 7])
    def test_it_may_end_early(self, workers: int, count: int) -> None:
        with loader_of(once(count).sharding_filter(), workers, 3) as loader:
            assert list(loader) == list(range(count))
            assert list(loader) == []

    def test_its_error_comes_in_its_place(self, workers: int) -> None:
        with loader_of(once(fail_at=41).sharding_filter().batch(5), workers, 3, prefetch=4) as loader:
            iterator = iter(loader)
            given = []
            with pytest.raises(LookupError, match="no number 41"):  # noqa: PT012
                while True:
                    given.append(next(iterator))
        with loader_of(IterableWrapper(range(60)).sharding_filter().batch(5), 0, 3) as loader:
            expected = list(loader)
        # the third batch of stream 0 is the first that wants an element from 41 on
        assert given == expected[:6]

    def test_a_resume_warns_and_is_exact(self, workers: int) -> None:
        def graph() -> IterDataPipe[Any]:
            return once().sharding_filter().shuffle(5).map(with_draws).batch(3)

        with loader_of(graph(), workers, 3) as loader:
            expected = list(loader)
        for at in (1, 13):
            with loader_of(graph(), workers, 3, snapshot_every=2) as loader:
                take(iter(loader), at)
                state = through_json(loader.state_dict())
            with loader_of(graph(), 0 if workers else 2, 3) as loader:
                loader.load_state_dict(state)
                with pytest.warns(UserWarning, match="can be read only once, so this resume reads it again"):
                    iterator = iter(loader)
                assert list(iterator) == expected[at:]

    def test_only_what_may_be_asked_again_is_kept(self, workers: int) -> None:
        taken: list[int] = []
        kept = []
        with loader_of(once(3000, taken=taken).sharding_filter(), workers, 2, prefetch=2) as loader:
            for given, _ in enumerate(loader, 1):
                assert len(taken) <= given + 20
                if given % 50 == 0:
                    dealer: Any = loader._runner._dealer  # type: ignore[union-attr]
                    kept.append(sum(map(len, dealer._hands)))
        assert max(kept) <= 200

    def test_elements_that_cannot_travel(self, workers: int) -> None:
        lock = threading.Lock()
        with loader_of(
            IterableWrapper(x if x != 7 else lock for x in range(20)).sharding_filter(), workers, 2
        ) as loader:
            iterator = iter(loader)
            if workers == 0:
                assert take(iterator, 8)[7] is lock
                return
            assert take(iterator, 7) == list(range(7))
            with pytest.raises(UnpicklableStageError, match=r"an element of stream 1.*lock"):
                next(iterator)

    def test_several_epochs_need_another_source(self, workers: int) -> None:
        class Again(IterDataPipe[int]):
            stateless = True

            def __iter__(self) -> Iterator[int]:
                yield from range(10)

        with loader_of(Again().sharding_filter(), workers, 2) as loader:
            assert list(loader) == list(loader) == list(range(10))


def test_a_worker_killed_meanwhile_asks_again() -> None:
    taken: list[int] = []
    pipe = once(400, taken=taken).sharding_filter().shuffle(10).map(lambda x, rng: (x, rng.random()), rng=True).batch(3)
    with loader_of(pipe, 2, 3) as loader:
        expected = list(loader)
    draw = random.Random(1)
    taken.clear()
    pipe = once(400, taken=taken).sharding_filter().shuffle(10).map(lambda x, rng: (x, rng.random()), rng=True).batch(3)
    with warnings.catch_warnings(record=True) as caught, loader_of(pipe, 2, 3, max_restarts=100) as loader:
        warnings.simplefilter("always")
        given = []
        for batch in loader:
            given.append(batch)
            if draw.random() < 0.1:
                os.kill(draw.choice(loader.stats()["workers"]), signal.SIGKILL)
    assert given == expected
    assert taken == list(range(400))
    assert any("started again" in str(warning.message) for warning in caught)


def test_an_interrupt_inside_the_source_is_raised_at_once() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise KeyboardInterrupt

    with loader_of(IterableWrapper(source()).sharding_filter(), 2, 2) as loader:
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            list(iterator)


def test_a_second_reading_is_refused() -> None:
    with loader_of(once(10).sharding_filter().cycle(2), 0, 2) as loader, pytest.raises(GraphError, match="second time"):
        list(loader)


def test_a_source_that_each_stream_would_read_is_refused() -> None:
    joined = IterableWrapper(range(9)).sharding_filter().zip(once(9))
    with loader_of(joined, 0, 2) as loader, pytest.raises(GraphError, match="read once only"):
        list(loader)
    with pytest.raises(UnpicklableStageError, match="generator"):
        loader_of(once().batch(2), 2, sharding="replicate")
    with loader_of(once().batch(2), 0, 2, sharding="replicate") as loader, pytest.raises(GraphError, match="read once"):
        list(loader)


def test_a_source_beside_the_shard_point_serves_one_stream() -> None:
    pipe = IterableWrapper(range(9)).sharding_filter().zip(once(9))
    assert list(loader_of(pipe, 0, 1)) == [(x, x) for x in range(9)]


class TestParts:
    def test_dealer(self) -> None:
        dealer = Dealer(once(5), Plan(seed=1, epoch=0, streams=2), resumed=False)
        assert dealer.take(1, 0) == 1
        assert [dealer.take(0, number) for number in range(3)] == [0, 2, 4]
        dealer.release(0, 2)
        assert dealer.take(0, 2) == 4
        with pytest.raises(GraphError):
            dealer.take(0, 1)
        for _ in range(2):
            with pytest.raises(Exhausted):
                dealer.take(1, 2)
        dealer.close()

    def test_a_failure_stays(self) -> None:
        dealer = Dealer(once(5, fail_at=3), Plan(seed=1, epoch=0, streams=1), resumed=False)
        assert dealer.take(0, 2) == 2
        for _ in range(2):
            with pytest.raises(LookupError):
                dealer.take(0, 3)
        dealer.close()

    def test_cut_leaves_graphs_that_can_be_read_again_alone(self) -> None:
        graph = IterableWrapper([1]).sharding_filter()
        assert cut(graph) == (graph, None)

    def test_the_length_is_that_of_what_its_streams_give(self) -> None:
        for count in (4, 10, 11, 12):
            with loader_of(once(count).set_length(count).sharding_filter().batch(2), 0, 4) as loader:
                assert len(loader) == len(list(loader))
        with pytest.raises(TypeError, match=r"IterableWrapper .* has no length: its iterable, a .*, has none"):
            len(loader_of(once().sharding_filter().batch(2), 0, 4))

    def test_positions_of_looks_inside_anchors(self) -> None:
        table = {"0:DealtSource": {"at": 9}, "1:Shuffler": {"anchor": {"table": {"0:DealtSource": {"at": 4}}}}}
        assert sorted(positions_of(table, "DealtSource")) == [4, 9]
