"""`.threadpool_map` in workers that a call of a thread ends: stage and element are named."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipes.errors import WorkerDiedError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService


def deadly(x: int) -> int:
    if x == 13:
        os._exit(7)
    return x


@pytest.mark.usefixtures("no_residue")
@pytest.mark.filterwarnings("ignore:worker 0 .* died:RuntimeWarning")
def test_a_worker_that_dies_of_an_element_names_it() -> None:
    graph = IterableWrapper(range(40)).sharding_filter().threadpool_map(deadly, max_workers=3).batch(4)
    loader: DataLoader2[Any] = DataLoader2(graph, reading_service=MultiProcessingReadingService(num_workers=1))
    with pytest.raises(WorkerDiedError, match="in stage 2:ThreadPoolMapper, on element 13"):
        list(loader)
    loader.shutdown()


@pytest.mark.usefixtures("no_residue")
@pytest.mark.filterwarnings("ignore:worker 0 .* died:RuntimeWarning")
def test_a_worker_that_dies_of_an_element_while_it_waits_names_it_too(tmp_path: Path) -> None:
    given = tmp_path / "given"

    def deadly_when_given(x: int) -> int:
        while x == 13 and not given.exists():
            time.sleep(0.005)
        return deadly(x)

    graph = IterableWrapper(range(40)).sharding_filter().threadpool_map(deadly_when_given, max_workers=3)
    service = MultiProcessingReadingService(num_workers=1, prefetch=1)
    loader: DataLoader2[Any] = DataLoader2(graph, reading_service=service)
    iterator, deaths = iter(loader), 0
    with pytest.raises(WorkerDiedError, match="in stage 2:ThreadPoolMapper, on element 13"):  # noqa: PT012
        while True:
            next(iterator)
            given.touch()
            # Nothing is taken until a thread has ended the worker, which has nothing to do but wait.
            deaths += deaths == 0 and ends(loader.stats()["workers"][0])
    loader.shutdown()
    assert deaths == 1


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)
