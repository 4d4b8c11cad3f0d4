"""Workers that die at any moment: each output still comes once, in the same order, until the limit of restarts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from loading import loader_of, take, through_json, with_draws
from worker_processes import is_running

from pipes import IterDataPipe
from pipes.errors import WorkerDiedError
from pipes.iter import IterableWrapper
from pipes.loader2 import process
from pipes.loader2.guard import sleep_until

pytestmark = [pytest.mark.usefixtures("no_residue"), pytest.mark.race]

N = 60


def numbers(count: int = N) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


@pytest.fixture
def expects_restarts() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def restarts_told(caught: list[warnings.WarningMessage]) -> int:
    told = [str(warning.message) for warning in caught]
    assert all("started again from its last snapshot" in text for text in told), told
    return len(told)


class TestDeaths:
    def test_a_killed_worker_is_started_again(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        with loader_of(numbers(1000).batch(1), 4, prefetch=8) as loader:
            iterator = iter(loader)
            given = take(iterator, 100)
            os.kill(loader.stats()["workers"][2], signal.SIGKILL)
            given += list(iterator)
            assert given == [[x] for x in range(1000)]
            assert loader.stats()["restarts"] == restarts_told(expects_restarts) == 1
            message = str(expects_restarts[0].message)
            assert "worker 2" in message
            assert "SIGKILL" in message
            assert "stream 2 after output" in message
            assert list(loader) == [[x] for x in range(1000)]

    def test_the_limit(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        with loader_of(numbers(1000).batch(1), 4, prefetch=2, max_restarts=3) as loader:
            iterator = iter(loader)
            given = []
            with pytest.raises(WorkerDiedError) as caught:  # noqa: PT012
                for _ in range(10):
                    os.kill(loader.stats()["workers"][2], signal.SIGKILL)
                    given += take(iterator, 30)
            assert given == [[x] for x in range(len(given))]
            assert restarts_told(expects_restarts) == 3
            for part in ("worker 2", "SIGKILL", "stream 2", "after output", "max_restarts=3"):
                assert part in str(caught.value)
            state = loader.state_dict()
            assert [next(iter(loader))] == [[0]]
            loader.load_state_dict(state)
            rest = list(loader)
        with loader_of(numbers(1000).batch(1), 0, 4) as loader:
            assert rest == list(loader)[len(rest) * -1 :]
            assert len(rest) >= 1000 - len(given) - 30

    def test_without_recovery(self) -> None:
        with loader_of(numbers(1000), 2, on_worker_death="raise", prefetch=2) as loader:
            iterator = iter(loader)
            given = take(iterator, 10)
            os.kill(loader.stats()["workers"][1], signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match=r"(?s)worker 1 .*SIGKILL.*turns recovery off"):  # noqa: PT012
                for element in iterator:
                    given.append(element)
            assert given == list(range(len(given)))
            assert len(given) < 20
            assert list(loader) == list(range(1000))

    @pytest.mark.parametrize("way", ["SIGKILL", "SIGSEGV", "exit", "exit 0"])
    def test_an_element_that_kills(
        self, way: str, tmp_path: Path, expects_restarts: list[warnings.WarningMessage]
    ) -> None:
        once = tmp_path / "died"

        def die(element: int) -> int:
            if element == 21 and not once.exists():
                once.touch()
                if way.startswith("exit"):
                    os._exit(0 if way == "exit 0" else 3)
                os.kill(os.getpid(), getattr(signal, way))
            return element

        clean = list(loader_of(numbers().batch(2), 0, 3))
        with loader_of(numbers().map(die).batch(2), 2, 3) as loader:
            assert list(loader) == clean
        assert restarts_told(expects_restarts) == 1
        reason = {"exit": "exit code 3", "exit 0": "exit code 0"}.get(way, way)
        assert reason in str(expects_restarts[0].message)

    def test_an_element_that_always_kills(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        def die(element: int) -> int:
            if element == 21:
                os._exit(9)
            return element

        given = []
        with loader_of(numbers().map(die), 2, 4, max_restarts=1) as loader:
            iterator = iter(loader)
            with pytest.raises(WorkerDiedError, match=r"worker 1 .*exit code 9.*stream 1 after output 5"):  # noqa: PT012
                while True:
                    given.append(next(iterator))
        assert given == list(range(len(given)))
        assert len(given) <= 21
        assert restarts_told(expects_restarts) == 1

    def test_at_the_start(self, tmp_path: Path, expects_restarts: list[warnings.WarningMessage]) -> None:
        once = tmp_path / "died"

        def init(pipe: Any, info: Any) -> Any:
            if info.worker_id == 1 and not once.exists():
                once.touch()
                os._exit(1)
            return pipe

        with loader_of(numbers(), 2, worker_init_fn=init) as loader:
            assert list(loader) == list(range(N))
        assert restarts_told(expects_restarts) == 1

    def test_at_every_start(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        with loader_of(numbers(), 2, worker_init_fn=lambda pipe, info: os._exit(4)) as loader:
            iterator = iter(loader)
            with pytest.raises(WorkerDiedError, match="exit code 4"):
                next(iterator)
        assert 3 <= restarts_told(expects_restarts) <= 6

    def test_between_epochs(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        with loader_of(numbers(), 2) as loader:
            assert list(loader) == list(range(N))
            process = psutil.Process(loader.stats()["workers"][0])
            process.kill()
            with contextlib.suppress(psutil.Error):
                process.wait(5)
            assert list(loader) == list(range(N))
        assert restarts_told(expects_restarts) <= 1

    def test_the_forkserver_with_all_its_workers(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        with loader_of(numbers(1000).batch(4), 3, prefetch=2) as loader:
            iterator = iter(loader)
            given = take(iterator, 20)
            for _ in range(2):
                pids = [process._server.pid, *loader.stats()["workers"]]
                os.kill(pids[0], signal.SIGKILL)
                assert sleep_until(lambda pids=pids: not any(map(is_running, pids)), 20)
                given += take(iterator, 60)
            assert given + list(iterator) == list(loader_of(numbers(1000).batch(4), 0, 3))
            assert loader.stats()["restarts"] == restarts_told(expects_restarts) == 6

    def test_after_a_stream_s_end(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        # stream 0 ends at once; its worker's end is known but not used when the worker dies
        pipe = numbers(40).filter(lambda x: x % 4 != 0 or x < 8)
        with loader_of(pipe, 0, 4) as loader:
            expected = list(loader)
        with loader_of(pipe, 2, 4, prefetch=3) as loader:
            for count in range(0, len(expected), 4):
                iterator = iter(loader)
                given = take(iterator, count)
                time.sleep(0.01)
                for pid in loader.stats()["workers"]:
                    os.kill(pid, signal.SIGKILL)
                assert given + list(iterator) == expected, count

    def test_in_mid_output(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        # outputs of 30 MB, pickled inline: a kill hits the sending
        pipe = numbers(12).map(lambda x: (x, [float(x)] * 1_000_000))
        draw = random.Random(5)
        with loader_of(pipe, 2, prefetch=2, max_restarts=100) as loader:
            given = []
            iterator = iter(loader)
            for _ in range(12):
                for pid in loader.stats()["workers"]:
                    if draw.random() < 0.4:
                        time.sleep(draw.random() * 0.05)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                element, data = next(iterator)
                assert data == [float(element)] * 1_000_000
                given.append(element)
            assert given == list(range(12))
            assert list(iterator) == []

    @pytest.mark.parametrize("seed", range(3))
    def test_at_random_moments(self, seed: int, expects_restarts: list[warnings.WarningMessage]) -> None:
        def graph() -> IterDataPipe[Any]:
            pipe = IterableWrapper(range(400)).shuffle(20).sharding_filter().map(lambda x, rng: x, rng=True)
            return pipe.shuffle(9).map(with_draws).batch(4).map(lambda batch: (batch, torch.zeros(100, 100)))

        with loader_of(graph(), 0, 4) as loader:
            expected = [batch for batch, _ in loader]
        draw = random.Random(seed)
        killers = []
        with loader_of(graph(), 3, 4, max_restarts=1000, snapshot_every=3) as loader:

            def kill() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(loader.stats()["workers"]), draw.choice([signal.SIGKILL, signal.SIGSEGV]))

            iterator = iter(loader)
            given = []
            for batch in iterator:
                given.append(batch)
                # as a training step: the kills fall into the epoch
                time.sleep(0.005)
                if draw.random() < 0.1:
                    killers.append(threading.Timer(draw.random() * 0.02, kill))
                    killers[-1].start()
            for killer in killers:
                killer.join()
        assert [batch for batch, _ in given] == expected
        assert restarts_told(expects_restarts) >= 1

    def test_state_after_a_restart(self, expects_restarts: list[warnings.WarningMessage]) -> None:
        def graph() -> IterDataPipe[Any]:
            return IterableWrapper(range(200)).shuffle(20).sharding_filter().map(with_draws).batch(3)

        with loader_of(graph(), 0, 2) as loader:
            expected = list(loader)
        with loader_of(graph(), 2, snapshot_every=4) as loader, loader_of(graph(), 0, 2) as other:
            iterator = iter(loader)
            given = take(iterator, 21)
            os.kill(loader.stats()["workers"][0], signal.SIGKILL)
            for _ in range(5):
                other.load_state_dict(through_json(loader.state_dict()))
                assert list(other) == expected[len(given) :]
                given += take(iterator, 7)
