"""In turn and as ready: what a slow worker holds up, what the others may do, and that each output comes once."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import loader_of, take, through_json, with_draws

from pipes import IterDataPipe
from pipes.errors import GraphError, WorkerTimeoutError
from pipes.iter import IterableWrapper
from pipes.loader2.delivery import AsReady, InOrder
from pipes.loader2.progress import Progress
from pipes.loader2.slot import Slot
from pipes.loader2.streams import StreamState

pytestmark = pytest.mark.usefixtures("no_residue")

HANG = 60.0


def numbers(count: int) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


def progress_of(lengths: list[int], workers: int) -> list[Progress]:
    return [Progress(stream, stream % workers, StreamState(ended=not length)) for stream, length in enumerate(lengths)]


class TestDelivery:
    """The rule alone, without processes."""

    def test_in_order_waits_for_the_stream_whose_turn_it_is(self) -> None:
        slots = [Slot(0, 2), Slot(1, 2)]
        delivery = InOrder(progress_of([1, 0, 1, 1], 2), slots)
        seen = []
        for stream in (0, 2, 3, 0, 2):
            seen.append(delivery.awaited()[0].number)
            delivery.advance(stream)
        assert seen == [0, 0, 1, 0, 0]
        with pytest.raises(AssertionError):
            delivery.advance(0)
        for stream in (3, 0, 2):
            delivery.end(stream)
        assert delivery.awaited() == ()

    def test_as_ready_serves_first_who_was_served_longest_ago(self) -> None:
        slots = [Slot(number, 3) for number in range(3)]
        delivery = AsReady(progress_of([1, 1, 1, 0, 1], 3), slots)
        delivery.advance(1)
        assert [slot.number for slot in delivery.awaited()] == [0, 2, 1]
        delivery.advance(0)
        delivery.advance(4)
        assert [slot.number for slot in delivery.awaited()] == [2, 0, 1]
        delivery.end(0)
        delivery.end(1)
        assert [slot.number for slot in delivery.awaited()] == [2, 1]
        delivery.end(2)
        delivery.end(4)
        assert delivery.awaited() == ()


def slow_in(worker: int, seconds: float, log: Path | None = None) -> Any:
    """Return a `worker_init_fn` that makes the elements of one worker slow, and notes every call by worker."""

    def init(pipe: Any, info: Any) -> Any:
        def work(element: int) -> tuple[int, int]:
            time.sleep(seconds if info.worker_id == worker else seconds / 20)
            if log is not None:
                with (log / str(info.worker_id)).open("ab") as file:
                    file.write(b".")
            return info.worker_id, element

        return pipe.map(work)

    return init


class TestOneSlowWorker:
    SECONDS = 0.4

    def test_it_does_not_stall_the_others_as_ready(self) -> None:
        options = {"in_order": False, "worker_init_fn": slow_in(1, self.SECONDS), "prefetch": 2}
        with loader_of(numbers(400), 3, **options) as loader:
            given = list(itertools.islice(loader, 150))
            workers = [worker for worker, _ in given]
            at = [place for place, worker in enumerate(workers) if worker == 1]
            # what lies between two outputs of the slow one, once both run
            between = [after - before - 1 for before, after in itertools.pairwise(at)]
            assert len(between) >= 2
            assert min(between) >= 10, workers
            # the fast ones take turns
            assert abs(workers.count(0) - workers.count(2)) <= 10 + workers.count(0) // 4
            waited = [count["seconds_waited"] for count in loader.stats()["per_worker"]]
            assert sum(waited) == pytest.approx(loader.stats()["seconds_waited"])

    @pytest.mark.parametrize("in_order", [True, False])
    def test_the_others_do_not_work_further_ahead_than_allowed(self, in_order: bool, tmp_path: Path) -> None:
        options = {"in_order": in_order, "worker_init_fn": slow_in(1, 0.1, tmp_path), "prefetch": 3}
        with loader_of(numbers(400), 3, **options) as loader:
            given: Counter[int] = Counter()
            for count, (worker, _) in enumerate(loader):
                given[worker] += 1
                # what is in the making, on the way and waiting here
                ahead = {
                    n: (tmp_path / str(n)).stat().st_size - given[n] for n in (0, 2) if (tmp_path / str(n)).exists()
                }
                assert all(number <= 3 for number in ahead.values()), ahead
                if in_order:
                    assert max(given.values()) - min(given[n] for n in range(3)) <= 1
                if count == 40:
                    break

    def test_bytes_in_flight_of_the_others(self, tmp_path: Path) -> None:
        def init(pipe: Any, info: Any) -> Any:
            return slow_in(1, 0.1, tmp_path)(pipe, info).map(lambda pair: (*pair, torch.zeros(25_000)))

        # 100 KB an output, 250 KB a worker: the third begins below the budget, none after it
        options = {"worker_init_fn": init, "prefetch": 50, "max_bytes_in_flight": 750_000}
        with loader_of(numbers(400), 3, **options) as loader:
            given: Counter[int] = Counter()
            for worker, _, _ in itertools.islice(loader, 30):
                given[worker] += 1
                sizes = {n: (tmp_path / str(n)).stat().st_size for n in (0, 2) if (tmp_path / str(n)).exists()}
                assert all(size - given[n] <= 3 for n, size in sizes.items()), (sizes, given)


class TestAsReady:
    @staticmethod
    def graph(count: int = 200) -> IterDataPipe[Any]:
        return IterableWrapper(range(count)).shuffle(20).sharding_filter().map(with_draws).batch(3)

    def expected(self) -> list[Any]:
        with loader_of(self.graph(), 0, 4) as loader:
            return list(loader)

    @staticmethod
    def uneven(pipe: Any, info: Any) -> Any:
        return pipe.map(lambda batch: time.sleep(0.004 * (info.worker_id == 0)) or batch)

    @pytest.mark.parametrize("workers", [0, 1, 2, 4])
    def test_each_output_comes_once(self, workers: int) -> None:
        with loader_of(self.graph(), workers, 4, in_order=False, worker_init_fn=self.uneven) as loader:
            assert sorted(loader) == sorted(self.expected())
            assert len(list(loader)) == len(self.expected())

    @pytest.mark.parametrize("then", [0, 1, 3])
    def test_the_state_is_exact_at_every_output(self, then: int) -> None:
        expected = sorted(self.expected())
        given, states = [], []
        options = {"in_order": False, "snapshot_every": 4}
        with loader_of(self.graph(), 2, 4, worker_init_fn=self.uneven, **options) as loader:
            iterator = iter(loader)
            for _ in expected:
                states.append(through_json(loader.state_dict()))
                given.append(next(iterator))
            states.append(through_json(loader.state_dict()))
            assert list(iterator) == []
        with loader_of(self.graph(), then, **options) as loader:
            for count, state in list(enumerate(states))[::5]:
                loader.load_state_dict(state)
                assert sorted(given[:count] + list(loader)) == expected, count

    def test_chained_resumes(self) -> None:
        given: list[Any] = []
        state = None
        for workers, in_order in itertools.cycle([(2, False), (3, True), (4, False)]):
            with loader_of(self.graph(), workers, 4, in_order=in_order) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                part = list(itertools.islice(loader, 9))
                state = through_json(loader.state_dict())
                given += part
            if len(part) < 9:
                break
        assert sorted(given) == sorted(self.expected())

    @pytest.mark.race
    def test_each_output_comes_once_across_kills(self) -> None:
        draw = random.Random(3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*started again from its last snapshot")
            with loader_of(
                self.graph(), 3, 4, in_order=False, worker_init_fn=self.uneven, max_restarts=1000, snapshot_every=3
            ) as loader:
                given = []
                for batch in loader:
                    given.append(batch)
                    if len(given) % 9 == 0:
                        os.kill(draw.choice(loader.stats()["workers"]), signal.SIGKILL)
                assert sorted(given) == sorted(self.expected())
                assert loader.stats()["restarts"] == sum(c["restarts"] for c in loader.stats()["per_worker"]) > 0

    def test_a_stuck_worker_is_named(self) -> None:
        def stuck_in_here(element: int) -> int:
            if element % 2:
                time.sleep(60)
            return element

        with loader_of(numbers(20).map(stuck_in_here), 2, in_order=False, timeout=3) as loader:
            iterator = iter(loader)
            assert take(iterator, 10) == list(range(0, 20, 2))
            with pytest.raises(WorkerTimeoutError, match=r"(?s)^worker 1 \(pid \d+\) gave no output.*stuck_in_here"):
                next(iterator)

    def test_an_error_comes_after_what_its_worker_gave(self) -> None:
        def fail(element: int) -> int:
            if element == 9:
                raise KeyError("nine")
            return element

        with loader_of(numbers(100).map(fail), 2, in_order=False) as loader:
            given = []
            with pytest.raises(KeyError):  # noqa: PT012
                for element in loader:
                    given.append(element)
            assert [x for x in given if x % 2] == [1, 3, 5, 7]
            assert [x for x in given if x % 2 == 0] == list(range(0, 2 * (len(given) - 4), 2))
            state = through_json(loader.state_dict())
            assert {k: v["given"] for k, v in state["streams"].items()} == {"0": len(given) - 4, "1": 4}

    def test_a_source_that_can_be_read_once_is_refused(self) -> None:
        pipe = IterableWrapper(iter(range(9)), deepcopy=False)
        with pytest.raises(GraphError, match="in_order=False"):
            loader_of(pipe, 2, in_order=False)
        assert list(loader_of(pipe, 0, in_order=False)) == list(range(9))


class TestNoBudgetIsADeadlock:
    @pytest.mark.race
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        sizes=st.lists(st.lists(st.integers(0, 60_000), max_size=8), min_size=1, max_size=5),
        workers=st.integers(1, 3),
        prefetch=st.integers(1, 4),
        budget=st.sampled_from([1, 1000, 100_000, 1 << 30]),
        in_order=st.booleans(),
    )
    def test_uneven_streams(
        self, sizes: list[list[int]], workers: int, prefetch: int, budget: int, in_order: bool
    ) -> None:
        # stream s gives arrays of the sizes sizes[s], which may be many, few, or none
        longest = max(1, *map(len, sizes))
        places = [(s, k) for k in range(longest) for s in range(len(sizes))]

        def make(place: tuple[int, int]) -> list[Any]:
            stream, number = place
            return [(place, torch.zeros(sizes[stream][number]))] if number < len(sizes[stream]) else []

        pipe = IterableWrapper(places).sharding_filter().flatmap(make)
        options = {"prefetch": prefetch, "max_bytes_in_flight": budget, "in_order": in_order}
        with loader_of(pipe, workers, len(sizes), **options) as loader:
            alarm = threading.Timer(HANG, os.kill, (os.getpid(), signal.SIGINT))
            alarm.start()
            try:
                given = [(place, len(array)) for place, array in loader]
            finally:
                alarm.cancel()
                alarm.join()
        expected = [((s, k), sizes[s][k]) for s, k in places if k < len(sizes[s])]
        assert (given if in_order else sorted(given)) == (expected if in_order else sorted(expected))
