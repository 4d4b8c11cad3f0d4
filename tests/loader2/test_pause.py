"""`pause`, `resume` and `limit` of a loader's iterator, and what it forwards."""

from __future__ import annotations

import copy
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from loading import GRAPHS, loader_of, logged_calls, plain, take, through_json

from pipes.errors import StaleIteratorError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, ReadingServiceInterface

pytestmark = pytest.mark.usefixtures("no_residue")

WORKERS = [0, 1, 2]


def loader(workers: int, **options: Any) -> DataLoader2[Any]:
    return loader_of(GRAPHS["shuffled data"](), workers, 2, **options)


@pytest.fixture(scope="module")
def epochs() -> list[Any]:
    with loader(0) as whole:
        return [plain(list(whole)), plain(list(whole))]


class TestLimit:
    @pytest.mark.parametrize("workers", WORKERS)
    def test_the_same_limit_at_each_resume(self, workers: int, epochs: list[Any]) -> None:
        expected = epochs[0]
        with loader(workers) as it:
            iterator = iter(it)
            iterator.limit(4)
            parts = []
            while not iterator.ended:
                parts.append(plain(list(iterator)))
                assert list(iterator) == []
                assert iterator.paused != iterator.ended
                iterator.resume()
            assert parts == [expected[at : at + 4] for at in range(0, len(expected) + 1, 4)]
            assert it.epoch == 1
            assert plain(list(it)) == epochs[1]

    @pytest.mark.parametrize("workers", WORKERS)
    def test_it_may_change(self, workers: int, epochs: list[Any]) -> None:
        with loader(workers) as it:
            iterator = iter(it)
            iterator.limit(2)
            given = [plain(list(iterator))]
            iterator.limit(3)
            assert list(iterator) == []
            iterator.resume()
            given.append(plain(list(iterator)))
            iterator.resume()
            iterator.limit(1)
            given.append(plain(list(iterator)))
            iterator.limit(None)
            iterator.resume()
            given.append(plain(take(iterator, 2)))
            iterator.limit(1)
            given.append(plain(list(iterator)))
            assert [len(part) for part in given] == [2, 3, 1, 2, 1]
            assert list(itertools.chain(*given)) == epochs[0][:9]

    def test_bad_ones(self) -> None:
        with loader(0) as it:
            iterator = iter(it)
            for bad in (0, -1):
                with pytest.raises(ValueError, match="at least 1"):
                    iterator.limit(bad)
            assert len(list(iterator)) > 4

    @pytest.mark.parametrize("workers", WORKERS)
    def test_the_next_epoch_has_none(self, workers: int, epochs: list[Any]) -> None:
        with loader(workers) as it:
            iterator = iter(it)
            iterator.limit(2)
            assert plain(list(iterator)) == epochs[0][:2]
            assert plain(list(it)) == epochs[1]
            for use in (iterator.resume, iterator.pause, lambda: iterator.limit(3)):
                with pytest.raises(StaleIteratorError):
                    use()


class TestPause:
    @pytest.mark.parametrize("workers", WORKERS)
    def test_the_state_is_exact(self, workers: int, epochs: list[Any]) -> None:
        with loader(workers) as it, loader(0) as other:
            iterator = iter(it)
            given: list[Any] = []
            for count in (1, 3, 2):
                given += plain(take(iterator, count))
                iterator.pause()
                assert next(iterator, None) is None
                state = through_json(it.state_dict())
                other.load_state_dict(state)
                assert plain(list(other)) == epochs[0][len(given) :]
                iterator.resume()
            assert given + plain(list(iterator)) == epochs[0]
            it.load_state_dict(state)
            assert plain(list(it)) == epochs[0][len(given) :]

    @pytest.mark.race
    @pytest.mark.parametrize("in_order", [True, False])
    def test_the_workers_rest(self, in_order: bool, tmp_path: Path) -> None:
        call = logged_calls(tmp_path)
        pipe = IterableWrapper(range(400)).sharding_filter().map(lambda x: time.sleep(0.01) or call(x))
        with loader_of(pipe, 2, prefetch=100, in_order=in_order) as it:
            iterator = iter(it)
            given = take(iterator, 4)
            iterator.pause()
            # each ends what it is making; to fill all that they may they would need a second
            time.sleep(0.3)
            made = (tmp_path / "calls").stat().st_size
            assert made < 200
            time.sleep(0.3)
            assert (tmp_path / "calls").stat().st_size == made
            assert list(iterator) == []
            iterator.resume()
            given += list(iterator)
            assert (given if in_order else sorted(given)) == list(range(400))
            assert (tmp_path / "calls").stat().st_size == 400

    def test_the_loader_can_be_closed_or_iterated_afresh(self, epochs: list[Any]) -> None:
        with loader(2) as it:
            iterator = iter(it)
            take(iterator, 1)
            iterator.pause()
            iterator.pause()
            assert plain(list(it)) == epochs[1]
            iterator = iter(it)
            take(iterator, 1)
            it._pause()
            assert iterator.paused
            it._resume()
            assert not iterator.paused
            it._pause()

    def test_without_an_iterator(self) -> None:
        with loader(0) as it, pytest.raises(RuntimeError, match="iter"):
            it._pause()

    def test_a_dealt_source(self) -> None:
        pipe = IterableWrapper(iter(range(60)), deepcopy=False)
        with loader_of(pipe, 2, prefetch=3) as it:
            iterator = iter(it)
            iterator.limit(7)
            given = []
            while not iterator.ended:
                given += list(iterator)
                time.sleep(0.01)
                iterator.resume()
            assert given == list(range(60))

    def test_hooks_of_an_own_service(self) -> None:
        calls = []

        class Service(ReadingServiceInterface):
            def initialize(self, datapipe: Any) -> Any:
                return datapipe

            def _pause(self) -> None:
                calls.append("pause")

            def _resume(self) -> None:
                calls.append("resume")

        with DataLoader2(IterableWrapper(range(4)), reading_service=Service()) as it:
            iterator = iter(it)
            iterator.limit(3)
            assert list(iterator) == [0, 1, 2]
            iterator.resume()
            assert (list(iterator), calls) == ([3], ["pause", "resume"])


class TestForwarding:
    def test_of_a_service_s_object(self) -> None:
        class Wrapper:
            def __init__(self, pipe: Any) -> None:
                self.pipe = pipe

            def __iter__(self) -> Any:
                return iter(self.pipe)

            def return_one(self) -> int:
                return 1

        class Service(ReadingServiceInterface):
            def initialize(self, datapipe: Any) -> Any:
                return Wrapper(datapipe)

        with DataLoader2(IterableWrapper(range(3)), reading_service=Service()) as it:
            iterator: Any = iter(it)
            assert iterator.return_one() == 1
            assert list(iterator) == [0, 1, 2]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_of_the_graph_s_last_pipe(self, workers: int) -> None:
        with loader_of(IterableWrapper(range(6)).batch(2), workers) as it:
            iterator: Any = iter(it)
            assert iterator.batch_size == 2
            for absent in ("nothing", "state_dict", "_runner_", "map"):
                with pytest.raises(AttributeError, match=absent):
                    getattr(iterator, absent)
            assert copy.copy(iterator) is not iterator
