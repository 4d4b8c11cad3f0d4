"""Workers that do not answer: the error shows where each is stuck, and the loader goes on or closes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from loading import loader_of, take, through_json

from pipes.errors import WorkerTimeoutError
from pipes.iter import IterableWrapper

pytestmark = [pytest.mark.usefixtures("no_residue"), pytest.mark.race]


def spin_for_ever() -> None:
    while True:
        pass


def hold_the_interpreter_lock() -> None:
    ctypes.PyDLL(None).sleep(60)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleep() -> None:
    time.sleep(60)


def wait_for_a_thread() -> None:
    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    thread.join()


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


WAYS: dict[Callable[[], None], list[str]] = {
    spin_for_ever: ["in spin_for_ever"],
    hold_the_interpreter_lock: ["in hold_the_interpreter_lock"],
    wait_for_a_lock: ["in wait_for_a_lock"],
    sleep: ["in sleep"],
    wait_for_a_thread: ["in wait_for_a_thread", "in sleep", "Thread 0x"],
    stop_oneself: ["the worker is stopped, by SIGSTOP", "kill -CONT"],
}


def run_into(loader: Any, given: list[int], moment: str, once: Path) -> str:
    """Iterate until the error of `moment`; on a busy machine a worker may be too late before that, and goes on."""
    while True:
        with pytest.raises(WorkerTimeoutError) as caught:  # noqa: PT012
            for element in loader:
                given.append(element)
        if moment in str(caught.value):
            return str(caught.value)
        once.unlink(missing_ok=True)
        loader.load_state_dict(through_json(loader.state_dict()))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_error_shows_where_and_the_loader_goes_on(way: Callable[[], None], tmp_path: Path) -> None:
    def get_stuck(element: int) -> int:
        if element == 9 and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            way()
        return element

    pipe = IterableWrapper(range(40)).shuffle(5).sharding_filter().map(get_stuck)
    with loader_of(pipe.map(lambda x: x), 0, 2) as loader:
        (tmp_path / "once").touch()
        expected = list(loader)
        (tmp_path / "once").unlink()
    with loader_of(pipe.map(lambda x: x), 2, timeout=2, snapshot_every=3) as loader:
        stuck = expected.index(9) % 2
        moment = f"worker {stuck}, making output {expected.index(9) // 2} of stream {stuck}:"
        given: list[int] = []
        error = run_into(loader, given, moment, tmp_path / "once")
        assert given == expected[: len(given)]
        pid = loader.stats()["workers"][stuck]
        for part in (f"worker {stuck} (pid {pid}) gave no output within timeout=2 s", moment, *WAYS[way]):
            assert part in error
        assert "_watch_main" not in error
        loader.load_state_dict(through_json(loader.state_dict()))
        assert list(loader) == expected[len(given) :]


def test_a_loader_closes_over_workers_that_do_not_answer() -> None:
    def get_stuck(element: int) -> int:
        if element == 2:
            hold_the_interpreter_lock()
        if element == 3:
            stop_oneself()
        return element

    loader = loader_of(IterableWrapper(range(10)).sharding_filter().map(get_stuck), 2, timeout=30)
    iterator = iter(loader)
    assert take(iterator, 2) == [0, 1]
    pids = loader.stats()["workers"]
    loader.shutdown()
    assert not any(map(psutil.pid_exists, pids))


def test_a_stopped_worker_that_goes_on_in_time_is_no_error() -> None:
    with loader_of(IterableWrapper(range(2000)).sharding_filter(), 2, timeout=60, prefetch=1) as loader:
        iterator: Any = iter(loader)
        given = take(iterator, 10)
        pid = loader.stats()["workers"][1]
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
        timer.start()
        given += list(iterator)
        timer.join()
        assert given == list(range(2000))
        assert loader.stats()["restarts"] == 0
