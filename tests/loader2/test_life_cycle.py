"""A loader broken out of, iterated again, dropped, shut down; what its services check."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from loading import GRAPHS, N, global_state, loader_of, plain, source, take

from pipes.errors import StaleIteratorError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService

pytestmark = pytest.mark.usefixtures("no_residue")


class TestLifeCycle:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_breaking_off_begins_the_next_epoch(self, workers: int) -> None:
        make = GRAPHS["shuffled data"]
        with loader_of(make(), workers, 2) as loader:
            expected = [plain(list(loader)) for _ in range(3)]
            loader.seed(3)
            for batch in loader:
                assert plain(batch) == expected[0][0]
                break
            assert loader.epoch == 0
            for batch in loader:
                assert plain(batch) == expected[1][0]
                break
            assert loader.epoch == 1
            iterator = iter(loader)
            assert plain(take(iterator, 2)) == expected[2][:2]
            iter(loader)
            with pytest.raises(StaleIteratorError, match="iter"):
                next(iterator)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_iterator_that_was_never_asked_shares_its_epoch(self, workers: int) -> None:
        with loader_of(GRAPHS["shuffled data"](), workers, 2) as loader:
            first = plain(list(loader))
            loader.seed(3)
            kept = iter(loader)
            iter(loader)
            assert plain(list(loader)) == first
            assert loader.epoch == 1
            with pytest.raises(StaleIteratorError):
                next(kept)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_ended_iterator_stays_ended(self, workers: int) -> None:
        with loader_of(source().sharding_filter(), workers) as loader:
            iterator = iter(loader)
            assert len(list(iterator)) == N
            assert [next(iterator, None), next(iterator, None)] == [None, None]
            assert loader.epoch == 1

    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_exception_in_the_loop_leaves_the_loader_usable(self, workers: int) -> None:
        with loader_of(source().sharding_filter(), workers) as loader:

            def loop() -> None:
                for element in loader:
                    assert element != 3

            with pytest.raises(AssertionError):
                loop()
            assert len(list(loader)) == N

    @pytest.mark.parametrize("workers", [0, 2])
    def test_shutdown(self, workers: int) -> None:
        loader = loader_of(source().sharding_filter(), workers)
        iterator = iter(loader)
        take(iterator, 3)
        loader.shutdown()
        loader.shutdown()
        with pytest.raises(StaleIteratorError, match="shut down"):
            next(iterator)
        with pytest.raises(RuntimeError, match="shut down"):
            iter(loader)

    def test_a_dropped_loader_ends_its_workers(self) -> None:
        loader = loader_of(source().sharding_filter(), 2)
        take(iter(loader), 3)
        del loader
        gc.collect()

    @pytest.mark.race
    def test_shutdown_while_another_thread_waits(self) -> None:
        def slow(element: int) -> int:
            time.sleep(60)
            return element

        loader = loader_of(source().sharding_filter().map(slow), 2)
        iterator = iter(loader)
        stopper = threading.Timer(0.5, loader.shutdown)
        stopper.start()
        with pytest.raises(RuntimeError, match="shut down"):
            next(iterator)
        stopper.join()

    @pytest.mark.race
    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("batched", [False, True])
    def test_shutdown_while_another_thread_iterates_is_no_end(self, workers: int, batched: bool) -> None:
        ends: list[Exception] = []

        def iterate(iterator: Any) -> None:
            try:
                given = sum(1 for _ in iterator)
            except Exception as error:
                ends.append(error)
            else:
                raise AssertionError(f"it ended after {given} outputs")

        pipe = IterableWrapper(range(10**8)).sharding_filter().map(abs)
        for attempt in range(10):
            loader = loader_of(pipe.batch(1000) if batched else pipe, workers)
            iterator = iter(loader)
            take(iterator, 5)
            thread = threading.Thread(target=iterate, args=(iterator,))
            thread.start()
            time.sleep(0.003 * attempt)
            loader.shutdown()
            thread.join()
            assert len(ends) == attempt + 1
            assert "shut down" in str(ends[-1]), ends[-1]

    @pytest.mark.race
    def test_shutdown_in_another_thread_twice(self) -> None:
        loader = loader_of(source().sharding_filter(), 2)
        take(iter(loader), 3)
        threads = [threading.Thread(target=loader.shutdown) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_main_s_generators_do_not_move(self, workers: int) -> None:
        np.random.rand(), random.random(), torch.rand(1)
        before = global_state()
        with loader_of(GRAPHS["both"](), workers, 2) as loader:
            take(iter(loader), 3)
            loader.load_state_dict(loader.state_dict())
            list(loader)
            assert global_state() == before

    def test_two_loaders_in_step(self) -> None:
        service = InProcessReadingService()
        loaders = [DataLoader2(GRAPHS["both"](), reading_service=service, num_streams=2) for _ in range(2)]
        for loader in loaders:
            loader.seed(1)
        assert all(plain(a) == plain(b) for a, b in zip(*loaders, strict=True))

    def test_repr_says_what_it_runs(self) -> None:
        text = repr(loader_of(source().batch(3), 0, 2))
        assert "num_streams=2" in text
        assert "Batcher" in text

    def test_stats(self) -> None:
        with loader_of(source().sharding_filter().batch(5), 2) as loader:
            assert loader.stats()["batches"] == 0
            list(loader)
            stats = loader.stats()
            assert (stats["batches"], stats["copied_batches"], stats["restarts"]) == (10, 0, 0)
            assert stats["bytes"] > 0
            assert len(stats["workers"]) == 2


def test_the_service_s_options_are_checked() -> None:
    for options, message in [
        ({"num_workers": -1}, "num_workers"),
        ({"multiprocessing_context": "thread"}, "forkserver, spawn, fork"),
        ({"on_worker_death": "ignore"}, "restart"),
        ({"timeout": 0}, "timeout"),
        ({"prefetch": 0}, "prefetch"),
        ({"snapshot_every": 0}, "snapshot_every"),
        ({"max_held": -1}, "max_held"),
        ({"max_bytes_in_flight": 0}, "max_bytes_in_flight"),
    ]:
        with pytest.raises(ValueError, match=message):
            MultiProcessingReadingService(**options)  # type: ignore[arg-type]
