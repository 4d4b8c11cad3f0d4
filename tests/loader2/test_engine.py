"""The engine with real workers: stuck ones, back-pressure, memory, random numbers, log records."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from loading import global_state, loader_of, logged_calls, take, with_draws

from pipes import IterDataPipe
from pipes.errors import WorkerTimeoutError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2

pytestmark = pytest.mark.usefixtures("no_residue")

N = 60


def numbers(count: int = N) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


class TestStuck:
    def test_timeout_shows_the_worker_s_stack(self) -> None:
        def stuck_in_here(element: int) -> int:
            if element == 3:
                time.sleep(60)
            return element

        # The timeout is in force while the workers start, too, and a busy machine may take a while for that.
        with loader_of(numbers().map(stuck_in_here), 2, timeout=5) as loader:
            iterator = iter(loader)
            assert take(iterator, 3) == [0, 1, 2]
            with pytest.raises(WorkerTimeoutError, match=r"(?s)worker 1 .*timeout=5.*stuck_in_here") as caught:
                next(iterator)
            assert isinstance(caught.value, TimeoutError)

    def test_a_worker_that_ignores_the_end_is_killed(self) -> None:
        def ignore(element: int) -> int:
            while element == 3:
                with contextlib.suppress(BaseException):
                    time.sleep(60)
            return element

        loader = loader_of(numbers().map(ignore), 1)
        assert take(iter(loader), 3) == [0, 1, 2]
        started = time.monotonic()
        loader.shutdown()
        assert time.monotonic() - started < 20


class TestBackPressure:
    @pytest.mark.parametrize("prefetch", [1, 4])
    def test_a_worker_is_never_more_than_prefetch_ahead(self, prefetch: int, tmp_path: Path) -> None:
        with loader_of(numbers().map(logged_calls(tmp_path)), 1, prefetch=prefetch) as loader:
            iterator = iter(loader)
            for given in range(1, 10):
                next(iterator)
                time.sleep(0.05)
                assert given <= (tmp_path / "calls").stat().st_size <= given + prefetch


class TestMemory:
    def test_2000_batches_with_every_label_kept(self) -> None:
        def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((3, 64, 64), float(index)), torch.tensor(index)

        threads_before = threading.active_count()
        pipe = numbers(8000).map(sample).batch(4).collate()
        with loader_of(pipe, 2) as loader:
            iterator = iter(loader)
            labels: list[torch.Tensor] = []
            for number, (images, label) in enumerate(iterator):
                assert images.shape == (4, 3, 64, 64)
                labels.append(label)
                if number == 200:
                    main = psutil.Process()
                    before = [(process.num_fds(), process.memory_info().rss) for process in (main, *workers(loader))]
                    threads = threading.active_count()
            after = [(process.num_fds(), process.memory_info().rss) for process in (main, *workers(loader))]
            assert len(labels) == 2000
            assert torch.equal(torch.cat(labels).sort().values, torch.arange(8000))
            assert loader.stats()["copied_batches"] == 0
            assert threads == threads_before == threading.active_count()
            for (descriptors, memory), (descriptors_after, memory_after) in zip(before, after, strict=True):
                assert abs(descriptors_after - descriptors) <= 2
                # 1800 batches hold 350 MB of images
                assert memory_after - memory < 60_000_000


def workers(loader: DataLoader2[Any]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in loader.stats()["workers"]]


class TestRandomNumbers:
    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_every_worker_and_epoch_draws_its_own(self, method: str) -> None:
        np.random.rand(), random.random(), torch.rand(1)
        before = global_state()
        runs = []
        for seed, how in ((1, method), (1, "forkserver"), (2, "forkserver")):
            with loader_of(numbers(8).map(with_draws), 4, seed=seed, multiprocessing_context=how) as loader:
                runs.append([list(loader), list(loader)])
        assert global_state() == before
        assert runs[0] == runs[1]
        for library in (1, 2, 3):
            draws = [element[library] for run in (runs[0], runs[2]) for epoch in run for element in epoch]
            assert len(set(draws)) == 32
        # nor do the libraries repeat each other
        assert len({draw for epoch in runs[0] for element in epoch for draw in element[1:]}) == 48

    @pytest.mark.parametrize("workers", [0, 2])
    def test_iterables_and_map_pipes_of_the_user_are_seeded_too(self, workers: int) -> None:
        class Source:
            def __iter__(self) -> Any:
                return (random.random() for _ in range(10))

        before = global_state()
        runs = []
        for _ in range(2):
            with loader_of(IterableWrapper(Source(), deepcopy=False).sharding_filter(), workers, 2) as loader:
                runs.append(list(loader))
        assert runs[0] == runs[1]
        assert global_state() == before


def test_logs_and_warnings_of_workers_arrive(caplog: pytest.LogCaptureFixture) -> None:
    def speak(element: int) -> int:
        if element == 2:
            logging.getLogger("mine").warning("two came")
            warnings.warn("two is even", stacklevel=1)
        return element

    with pytest.warns(UserWarning, match=r"\[worker 0\] two is even"), loader_of(numbers().map(speak), 2) as loader:
        assert list(loader) == list(range(N))
    assert [record.getMessage() for record in caplog.records] == ["[worker 0] two came"]
