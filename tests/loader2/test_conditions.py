"""Loaders made and used under other conditions: in threads, in changed surroundings, with processes of their own."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import loader_of, take

from pipes import IterDataPipe
from pipes.errors import BusyError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.loader2.engine import Engine

pytestmark = pytest.mark.usefixtures("no_residue")
every_method = pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])


def numbers(count: int = 40) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).sharding_filter()


def in_thread(function: Callable[[], Any]) -> Any:
    """Call the function in a thread, which is over afterwards; return what it returned."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    (result,) = results
    return result


class TestThreads:
    @every_method
    def test_made_and_begun_in_a_thread_that_ends(self, method: str) -> None:
        def make() -> tuple[DataLoader2[Any], Any, list[int]]:
            loader = loader_of(numbers(), 2, multiprocessing_context=method)
            iterator = iter(loader)
            return loader, iterator, take(iterator, 5)

        loader, iterator, given = in_thread(make)
        # the workers outlive the thread that started them
        assert given + list(iterator) == list(range(40))
        assert list(loader) == list(range(40))
        in_thread(loader.shutdown)

    def test_each_epoch_in_another_thread(self) -> None:
        with loader_of(numbers(), 2) as loader:
            for _ in range(3):
                assert in_thread(lambda: list(loader)) == list(range(40))

    def test_many_loaders_in_threads_at_once(self) -> None:
        def load(number: int) -> None:
            with loader_of(numbers().map(lambda x: (number, x)), 1) as loader:
                results[number] = list(loader)

        results: dict[int, Any] = {}
        threads = [threading.Thread(target=load, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: [(number, x) for x in range(40)] for number in range(5)}

    @pytest.mark.parametrize("workers", [0, 2])
    def test_one_iterator_in_several_is_refused_and_goes_on(self, workers: int) -> None:
        inside, go_on = threading.Event(), threading.Event()

        def source() -> Any:
            for element in range(40):
                inside.set()
                assert go_on.wait(60)
                yield element

        # read in this process whatever the number of workers
        pipe = IterableWrapper(source(), deepcopy=False)
        with loader_of(pipe, workers, 2) as loader:
            iterator = iter(loader)
            inside.clear()
            given: list[int] = []
            thread = threading.Thread(target=lambda: given.append(next(iterator)))
            thread.start()
            assert inside.wait(60)
            with pytest.raises(BusyError, match="another thread"):
                next(iterator)
            go_on.set()
            thread.join()
            assert given + list(iterator) == list(range(40))

    def test_a_new_epoch_while_another_one_waits_is_refused(self) -> None:
        def wait(element: int) -> int:
            time.sleep(0.5 if element == 3 else 0)
            return element

        with loader_of(numbers().map(wait), 1, prefetch=1) as loader:
            iterator = iter(loader)
            take(iterator, 3)
            thread = threading.Thread(target=lambda: given.append(next(iterator)))
            given: list[int] = []
            thread.start()
            while loader._runner._reader is None:  # type: ignore[union-attr]
                time.sleep(0.001)
            with pytest.raises(BusyError, match="another thread"):
                iter(loader)
            thread.join()
            assert given == [3]
            assert list(loader) == list(range(40))


class TestForkedChild:
    @staticmethod
    def of(use: Callable[[], Any]) -> str:
        """Return what `use` says in a forked child."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                said = repr(use())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            said = file.read()
        os.waitpid(child, 0)
        return said

    @pytest.mark.race
    @pytest.mark.parametrize("method", ["forkserver", "fork"])
    def test_it_does_nothing_to_the_workers_and_may_have_its_own(self, method: str) -> None:
        def iterate() -> tuple[int, list[int], bool]:
            epoch = loader.epoch
            given = list(loader)
            loader.shutdown()
            return epoch, given[:3], loader.stats()["restarts"] == 0

        with loader_of(numbers(400), 2, prefetch=2, multiprocessing_context=method) as loader:
            iterator = iter(loader)
            given = take(iterator, 5)
            state = loader.state_dict()
            for use in (lambda: next(iterator), iterator.pause):
                assert "forked from; iter(loader) starts others here" in self.of(use)
            # what main's own end, and a collection of the child's garbage, would do
            assert self.of(loader.shutdown) == self.of(loader._runner.close) == "None"  # type: ignore[union-attr]
            assert self.of(lambda: loader.state_dict() == state) == "True"
            assert self.of(iterate) == "(0, [0, 1, 2], True)"
            assert given + list(iterator) == list(range(400))
            assert loader.stats()["restarts"] == 0

    @pytest.mark.parametrize("method", ["forkserver", "fork"])
    def test_one_forked_while_a_thread_is_inside_iter(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        main, start = os.getpid(), Engine._start
        inside, go_on = threading.Event(), threading.Event()

        def wait_in_main(engine: Engine, worker: Any) -> None:
            if os.getpid() == main:
                inside.set()
                assert go_on.wait(60)
            start(engine, worker)

        monkeypatch.setattr(Engine, "_start", wait_in_main)
        with loader_of(numbers(), 2, multiprocessing_context=method) as loader:
            given: list[int] = []
            thread = threading.Thread(target=lambda: given.extend(loader))
            thread.start()
            assert inside.wait(60)
            said = self.of(lambda: list(loader) == list(range(40)))
            go_on.set()
            thread.join()
            assert said == "True"
            assert given == list(range(40))

    def test_one_forked_while_a_thread_is_inside_next(self) -> None:
        pipe = numbers(8).map(lambda x: time.sleep(1 if x == 3 else 0) or x)
        with loader_of(pipe, 1, prefetch=1) as loader:
            iterator = iter(loader)
            given = take(iterator, 3)
            thread = threading.Thread(target=lambda: given.append(next(iterator)))
            thread.start()
            while loader._runner._reader is None:  # type: ignore[union-attr]
                time.sleep(0.001)
            said = self.of(lambda: next(iterator))
            thread.join()
            assert "forked from; iter(loader) starts others here" in said
            assert given + list(iterator) == list(range(8))

    def test_one_that_a_function_of_the_user_s_forks(self) -> None:
        main, said = os.getpid(), []

        def fork_at_five(element: int) -> int:
            if element == 5 and os.getpid() == main:
                said.append(self.of(lambda: list(loader) == list(range(40))))
            return element

        with loader_of(numbers().map(fork_at_five)) as loader:
            assert list(loader) == list(range(40))
        assert said == ["True"]


def test_a_loader_in_use_is_neither_copied_nor_pickled() -> None:
    with loader_of(numbers(6)) as loader:
        with copy.deepcopy(loader) as other:
            assert list(other) == list(loader) == list(range(6))
        for use in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"load_state_dict\(loader.state_dict\(\)\)"):
                use(loader)


class TestDropping:
    def test_an_iterator_in_mid_epoch(self) -> None:
        with loader_of(numbers(), 2) as loader:
            iterator = iter(loader)
            take(iterator, 3)
            del iterator
            assert list(loader) == list(range(40))

    def test_the_loader_while_its_iterator_is_used(self) -> None:
        loader = loader_of(numbers(), 2)
        iterator = iter(loader)
        given = take(iterator, 3)
        del loader
        assert given + list(iterator) == list(range(40))

    def test_a_loader_that_nobody_names(self) -> None:
        assert [x for x in loader_of(numbers(), 2)] == list(range(40))  # noqa: C416


@every_method
def test_surroundings_are_those_at_the_first_iter(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(element: int) -> tuple[Any, ...]:
        import only_there

        with open(f"made-{element}", "w"):
            pass
        made = Path(f"made-{element}").stat()
        return only_there.VALUE, os.environ["PIPES_TEST"], os.getcwd(), made.st_mode & 0o777, sys.path[0]

    # a forkserver runs already, in the surroundings of before
    with loader_of(numbers(2).map(look), 2, multiprocessing_context=method) as loader:
        (tmp_path / "only_there.py").write_text("VALUE = 5\n")
        monkeypatch.setenv("PIPES_TEST", method)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        mask = os.umask(0o027)
        try:
            assert list(loader) == [(5, method, str(tmp_path), 0o640, str(tmp_path))] * 2
        finally:
            os.umask(mask)
            sys.modules.pop("only_there", None)


@every_method
def test_processes_inside_workers(method: str) -> None:
    def work(element: int) -> tuple[str, list[int], int]:
        run = subprocess.run([sys.executable, "-S", "-c", f"print({element} * 2)"], capture_output=True, text=True)
        # as users call it, by the platform's method
        with multiprocessing.Pool(2) as pool:
            absolutes = pool.map(abs, [-element, element])
        process = multiprocessing.Process(target=os._exit, args=(element,))
        process.start()
        process.join()
        return run.stdout, absolutes, process.exitcode or 0

    with loader_of(numbers(4).map(work), 2, multiprocessing_context=method) as loader:
        assert list(loader) == [(f"{2 * x}\n", [x, x], x) for x in range(4)]


@every_method
def test_a_pool_that_a_worker_keeps_ends_with_it(method: str) -> None:
    def init(pipe: Any, info: Any) -> Any:
        pool = multiprocessing.get_context("fork").Pool(1)
        return pipe.map(lambda x: (pool.apply(os.getpid), pool.apply(abs, (-x,))))

    with loader_of(numbers(6), 2, worker_init_fn=init, multiprocessing_context=method) as loader:
        given = list(loader)
    assert [x for _, x in given] == list(range(6))
    assert len({pid for pid, _ in given}) == 2


@every_method
def test_a_context_object_and_the_hooks_of_workers(method: str) -> None:
    parent = os.getpid()
    context: Any = multiprocessing.get_context(method)

    def init(pipe: Any, info: Any) -> Any:
        return pipe.map(lambda x: (x, os.getppid() == parent, info.worker_id, info.num_workers))

    def reset(pipe: Any, info: Any, seeds: Any) -> Any:
        return pipe.map(lambda made: (*made, seeds.generate_shared_seed()))

    options = {"worker_init_fn": init, "worker_reset_fn": reset, "multiprocessing_context": context}
    with loader_of(numbers(4), 2, **options) as loader:
        epochs = [list(loader), list(loader)]
    for epoch in epochs:
        assert [element[:4] for element in epoch] == [(x, method != "forkserver", x % 2, 2) for x in range(4)]
        # the workers share the sequence
        assert epoch[0][4] == epoch[1][4] != epoch[2][4] == epoch[3][4]
    assert epochs[0][0][4] != epochs[1][0][4]
