"""Worker processes under a loader: errors, deaths, stuck workers, back-pressure, memory, random numbers, interrupts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from loading import global_state, loader_of, take, through_json, with_draws

from pipes import IterDataPipe
from pipes.errors import RemoteError, StateError, WorkerDiedError, WorkerTimeoutError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2

pytestmark = pytest.mark.usefixtures("no_residue")

N = 60


def numbers(count: int = N) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


class NeedsTwo(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("the disk of the pickle is full")


def raise_(make: Callable[[], BaseException]) -> None:
    raise make()


# what item 5 does, and what the error in main must be and say
FAILURES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "two arguments": (lambda: raise_(lambda: NeedsTwo("this", "that")), RemoteError, "NeedsTwo: this and that"),
    "a lock": (lambda: raise_(lambda: HoldsLock("held")), RemoteError, "HoldsLock: held"),
    "no text": (lambda: raise_(Unprintable), RemoteError, "Unprintable: <unprintable>"),
    "two lines": (lambda: raise_(lambda: KeyError("a\nb")), KeyError, r"a\nb"),
    "exit": (lambda: raise_(lambda: SystemExit(3)), RemoteError, "SystemExit: 3"),
    "pickling": (Unpicklable, TypeError, "OSError: the disk of the pickle is full"),
    "stop": (lambda: raise_(StopIteration), RuntimeError, "StopIteration"),
    "interrupt": (lambda: raise_(KeyboardInterrupt), RemoteError, "KeyboardInterrupt"),
}


def failing_at(number: int, what: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda element: what() if element == number else element


class TestErrors:
    @pytest.mark.parametrize("name", FAILURES)
    def test_they_come_in_their_place_and_say_where(self, name: str) -> None:
        what, kind, text = FAILURES[name]
        with loader_of(numbers().map(failing_at(5, what)), 3) as loader:
            iterator = iter(loader)
            assert take(iterator, 5) == [0, 1, 2, 3, 4]
            with pytest.raises(kind) as caught:
                next(iterator)
            error = caught.value
            assert text in str(error)
            notes = "\n".join(error.__notes__)
            assert "stage 2:Mapper" in notes
            assert "raised in worker 2" in notes
            assert "output 1 of stream 2, epoch 0" in notes
            assert "Traceback (most recent call last)" in str(error.__cause__)
            with pytest.raises(RuntimeError, match="gives no more"):
                next(iterator)
            # the state stands before the failing element, and a new iteration works
            state = loader.state_dict()
            assert take(iter(loader), 5) == [0, 1, 2, 3, 4]
            loader.load_state_dict(state)
            with pytest.raises(kind):
                next(iter(loader))

    @pytest.mark.parametrize("workers", [0, 1, 2, 3])
    def test_all_before_the_error_is_given_and_the_state_is_before_its_unit(self, workers: int) -> None:
        flag: list[int] = []

        def graph(bad: bool) -> IterDataPipe[Any]:
            return numbers().map(failing_at(40, lambda: 1 // (0 if bad else 1))).map(with_draws).batch(4)

        with loader_of(graph(False), 0, 3) as loader:
            expected = list(loader)
        with loader_of(graph(True), workers, 3) as loader:
            given = []
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                for batch in loader:
                    given.append(batch)
            state = through_json(loader.state_dict())
        count = len(given)
        assert 8 <= count < 12
        assert given == expected[:count]
        assert not flag
        with loader_of(graph(False), 0, 3) as loader:
            loader.load_state_dict(state)
            assert list(loader) == expected[count:]

    def test_what_main_cannot_rebuild(self) -> None:
        class Local:
            def __reduce__(self) -> Any:
                return raise_in_main, (os.getpid(),)

        def raise_in_main(pid: int) -> None:
            raise ValueError("cannot be rebuilt here")

        with loader_of(numbers(4).map(lambda x: Local() if x == 2 else x), 1) as loader:
            iterator = iter(loader)
            assert take(iterator, 2) == [0, 1]
            with pytest.raises(Exception, match=r"rebuilt|raise_in_main"):
                next(iterator)
            assert take(iter(loader), 2) == [0, 1]

    def test_worker_init_fn_that_raises(self) -> None:
        def refuse(pipe: Any, info: Any) -> Any:
            raise LookupError(f"no data for {info.worker_id} of {info.num_workers}")

        with loader_of(numbers(), 2, worker_init_fn=refuse) as loader:
            for _ in range(2):
                with pytest.raises(LookupError, match=r"no data for \d of 2") as caught:
                    next(iter(loader))
                assert any("raised in worker" in note for note in caught.value.__notes__)

    def test_worker_reset_fn_that_raises(self) -> None:
        def refuse(pipe: Any, info: Any, seeds: Any) -> Any:
            raise LookupError("not this epoch")

        with loader_of(numbers(), 2, worker_reset_fn=refuse) as loader:
            for _ in range(2):
                with pytest.raises(LookupError, match="not this epoch"):
                    next(iter(loader))

    def test_a_warning_that_is_an_error_in_main_loses_no_message(self) -> None:
        def warn(element: int) -> int:
            if element == 50:
                warnings.warn("fifty came", stacklevel=1)
            return element

        pipe = numbers().map(warn).batch(2).map(lambda batch: torch.full((200, 200), batch[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with loader_of(pipe, 2) as loader:
                iterator = iter(loader)
                next(iterator)
                shown: list[Any] = []

                def refuse(message: Any, *arguments: Any, **options: Any) -> None:
                    shown.append(str(message))
                    raise UserWarning(str(message))

                original, warnings.showwarning = warnings.showwarning, refuse
                try:
                    with pytest.raises(UserWarning, match=r"\[worker \d\] fifty came"):
                        list(iterator)
                finally:
                    warnings.showwarning = original
                assert len(shown) == 1
                with warnings.catch_warnings(record=True):
                    assert len(list(loader)) == N // 2


def logged_calls(folder: Path) -> Callable[[int], int]:
    """Return a function that notes each call of it."""

    def call(element: int) -> int:
        with (folder / "calls").open("ab") as file:
            file.write(b".")
        return element

    return call


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


class TestStuck:
    def test_timeout_shows_the_worker_s_stack(self) -> None:
        def stuck_in_here(element: int) -> int:
            if element == 3:
                time.sleep(60)
            return element

        with loader_of(numbers().map(stuck_in_here), 2, timeout=0.7) as loader:
            iterator = iter(loader)
            assert take(iterator, 3) == [0, 1, 2]
            with pytest.raises(WorkerTimeoutError, match=r"(?s)worker 1 .*timeout=0\.7.*stuck_in_here") as caught:
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

    def test_bytes_in_flight(self, tmp_path: Path) -> None:
        call = logged_calls(tmp_path)
        pipe = numbers().map(lambda x: torch.zeros(250_000) + call(x))
        with loader_of(pipe, 1, prefetch=50, max_bytes_in_flight=2_500_000) as loader:
            iterator = iter(loader)
            for given in range(1, 10):
                assert next(iterator)[0] == given - 1
                time.sleep(0.05)
                assert (tmp_path / "calls").stat().st_size <= given + 3

    def test_one_output_larger_than_the_budget(self) -> None:
        with loader_of(numbers(5).map(lambda x: torch.zeros(250_000) + x), 2, max_bytes_in_flight=1000) as loader:
            assert [int(output[0]) for output in loader] == list(range(5))


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

    def test_batches_that_are_kept_are_copied_beyond_the_limit(self) -> None:
        with loader_of(numbers(40).map(lambda x: torch.zeros(50_000) + x), 1, max_held=4) as loader:
            kept = list(loader)
            assert [int(tensor[0]) for tensor in kept] == list(range(40))
            assert loader.stats()["copied_batches"] >= 30


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


SCRIPT = """
import sys, time, random
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
def slow(x):
    time.sleep(0.01)
    return x
graph = IterableWrapper(range(10_000)).sharding_filter().map(slow)
service = MultiProcessingReadingService(2, multiprocessing_context={method!r})
loader = DataLoader2(graph, reading_service=service)
"""


def run_script(tmp_path: Path, body: str, method: str = "forkserver") -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(method=method) + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def nothing_is_left_of(session: int) -> bool:
    """Return whether all processes of a session end within seconds."""
    deadline = time.monotonic() + 15
    while any(_session(pid) == session for pid in psutil.pids()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _session(pid: int) -> int:
    try:
        # who ended and was not waited for yet is the business of the system's first process
        return -1 if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getsid(pid)
    except (OSError, psutil.Error):
        return -1


class TestEndOfProgram:
    @pytest.mark.parametrize("method", ["forkserver", "fork"])
    def test_with_a_live_loader(self, method: str, tmp_path: Path) -> None:
        program = run_script(tmp_path, "iterator = iter(loader)\nprint(next(iterator), next(iterator))", method)
        out, err = program.communicate(timeout=60)
        assert (program.returncode, out, err) == (0, "0 1\n", "")
        assert nothing_is_left_of(program.pid)

    @pytest.mark.parametrize("method", ["forkserver", "fork"])
    def test_ctrl_c_in_the_loop(self, method: str, tmp_path: Path) -> None:
        program = run_script(tmp_path, "for x in loader: print(x, flush=True)", method)
        assert program.stdout is not None
        assert program.stdout.readline() == "0\n"
        os.killpg(program.pid, signal.SIGINT)
        _, err = program.communicate(timeout=60)
        assert program.returncode in (1, 130, -signal.SIGINT)
        assert err.count("Traceback (most recent call last)") == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt"), err
        assert nothing_is_left_of(program.pid)

    def test_go_on_after_ctrl_c(self, tmp_path: Path) -> None:
        program = run_script(
            tmp_path,
            """
            for attempt in range(12):
                given = []
                try:
                    for x in loader:
                        given.append(x)
                        if len(given) == 5: print("ready", flush=True)
                except KeyboardInterrupt:
                    assert given == list(range(len(given))), given
                    state = loader.state_dict()
                    loader.load_state_dict(state)
                    assert next(iter(loader)) in (len(given), len(given) + 1)
            print("done", flush=True)
            """,
        )
        assert program.stdout is not None
        for number in range(12):
            assert program.stdout.readline() == "ready\n", program.communicate()
            time.sleep(0.001 * (number % 7))
            os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=60)
        assert (program.returncode, out, err) == (0, "done\n", "")

    def test_sigkill_of_main(self, tmp_path: Path) -> None:
        program = run_script(tmp_path, "for x in loader: print(x, flush=True)")
        assert program.stdout is not None
        program.stdout.readline()
        program.kill()
        program.communicate()
        assert nothing_is_left_of(program.pid)


def test_a_damaged_state_is_an_error_of_the_stream() -> None:
    def graph() -> IterDataPipe[Any]:
        return IterableWrapper(range(50)).shuffle(7).sharding_filter().map(abs).batch(2)

    for workers in (0, 2):
        with loader_of(graph(), workers, 2, snapshot_every=2) as loader:
            take(iter(loader), 10)
            state = through_json(loader.state_dict())
            text = json.dumps(state).replace('"taken": ', '"taken": 99')
            loader.load_state_dict(json.loads(text))
            with pytest.raises(StateError):
                list(loader)
            loader.load_state_dict(state)
            assert len(list(loader)) == 16
