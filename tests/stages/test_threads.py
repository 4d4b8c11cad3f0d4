"""`.threadpool_map`: order, bound, errors at their place, exact resume, and no thread left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from stage_contract import check_everywhere, saved, start

from pipes import IterDataPipe
from pipes.errors import ErrorBudgetExceeded, StateError
from pipes.iter import IterableWrapper, ThreadPoolMapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService


def slow_first(x: int) -> int:
    """The earlier of neighbours end later."""
    time.sleep(0.002 * (3 - x % 4))
    return 10 * x


def draw(x: Any, rng: np.random.Generator) -> tuple[Any, float]:
    return x, rng.random()


def threads() -> list[threading.Thread]:
    """Return those of the stage's pools."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(("pipes ", "decode"))]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


def broken_at(*places: int) -> Callable[[int], int]:
    def function(x: int) -> int:
        if x in places:
            raise KeyError(x)
        return slow_first(x)

    return function


def test_contract_when_elements_are_skipped() -> None:
    def function(x: int) -> int:
        if x in (1, 5, 13):
            raise KeyError(x)
        return x

    check_everywhere(lambda source: source.threadpool_map(function, scheduled_tasks=3, max_workers=2, on_error="skip"))


@pytest.mark.parametrize("scheduled", [1, 2, 40, 1000])
def test_order_is_that_of_the_inputs(scheduled: int) -> None:
    pipe = IterableWrapper(range(40)).threadpool_map(slow_first, scheduled_tasks=scheduled, max_workers=4)
    assert list(pipe) == [10 * x for x in range(40)]
    assert len(pipe) == 40


def test_a_resume_after_many_anchors_takes_few_inputs_again() -> None:
    taken: list[int] = []

    def graph() -> Any:
        return (
            IterableWrapper(range(400))
            .filter(lambda x: taken.append(x) is None)
            .threadpool_map(lambda x: x, scheduled_tasks=50, max_workers=3)
        )

    run = start(graph())
    assert list(islice(run, 300)) == list(range(300))
    state = saved(run)
    run.context.close()
    assert state["2:ThreadPoolMapper"]["taken"] == 300
    taken.clear()
    again = start(graph(), state)
    assert 284 <= taken[0] < 300
    assert list(again) == list(range(300, 400))


def test_a_resume_calls_the_function_only_for_what_was_not_given() -> None:
    calls: list[int] = []

    def counted(x: int) -> int:
        calls.append(x)
        return x

    def graph() -> Any:
        return IterableWrapper(range(100)).threadpool_map(counted, max_workers=3).shuffle(10)

    run = start(graph())
    got = list(islice(run, 30))
    state = saved(run)
    run.context.close()
    calls.clear()
    rest = list(start(graph(), state))
    assert sorted(got + rest) == list(range(100))
    assert sorted(calls) == sorted(rest)


def test_no_more_than_scheduled_tasks_are_in_flight() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for x in range(50):
            taken.append(x)
            yield x

    pipe = IterableWrapper(source(), deepcopy=False).threadpool_map(lambda x: x, scheduled_tasks=7, max_workers=2)
    for place, x in enumerate(pipe):
        assert x == place
        assert len(taken) <= place + 7
    assert len(taken) == 50


def test_calls_run_side_by_side() -> None:
    together = threading.Barrier(4, timeout=20)
    pipe = IterableWrapper(range(8)).threadpool_map(lambda x: together.wait() >= 0, max_workers=4)
    assert list(pipe) == [True] * 8


def test_columns() -> None:
    pairs = IterableWrapper([(1, 2), (3, 4)])
    assert list(pairs.threadpool_map(lambda a, b: a + b, [0, 1], max_workers=2)) == [(3,), (7,)]
    dicts = IterableWrapper([{"x": 1}])
    assert list(dicts.threadpool_map(str, "x", "text", max_workers=2)) == [{"x": 1, "text": "1"}]


def test_an_error_comes_at_its_place_and_names_stage_and_element() -> None:
    got = []
    with pytest.raises(KeyError) as caught:  # noqa: PT012
        for x in IterableWrapper(range(30)).threadpool_map(broken_at(5, 7), max_workers=4):
            got.append(x)
    assert got == [0, 10, 20, 30, 40]
    [note] = caught.value.__notes__
    assert "in stage 1:ThreadPoolMapper built at" in note
    assert "test_threads.py:" in note
    assert "on element 5" in note
    assert not threads()


def test_an_error_from_above_comes_after_what_was_given_before() -> None:
    graph = IterableWrapper(range(9)).map(broken_at(5)).threadpool_map(lambda x: x, max_workers=2)
    got = []
    with pytest.raises(KeyError) as caught:  # noqa: PT012
        for x in graph:
            got.append(x)
    assert got == [0, 10, 20, 30, 40]
    [note] = caught.value.__notes__
    assert "in stage 1:Mapper" in note


def test_an_error_in_a_restore_names_stage_and_element() -> None:
    broken = False

    def function(x: int) -> int:
        if broken:
            raise KeyError(x)
        return x

    def graph() -> Any:
        return IterableWrapper(range(30)).threadpool_map(function, max_workers=2).shuffle(5)

    run = start(graph())
    next(iter(run))
    state = saved(run)
    run.context.close()
    broken = True
    with pytest.raises(KeyError) as caught:
        start(graph(), state)
    assert "in stage 1:ThreadPoolMapper" in caught.value.__notes__[0]


def test_policies() -> None:
    source = IterableWrapper(range(12))
    skipping = source.threadpool_map(broken_at(3, 4, 11), max_workers=3, on_error="skip")
    assert list(skipping) == [0, 10, 20, 50, 60, 70, 80, 90, 100]
    with pytest.raises(TypeError, match="on_error"):
        len(skipping)
    asked = []

    def instead(error: Exception, x: Any) -> Any:
        asked.append((threading.current_thread() is threading.main_thread(), x))
        return -x

    assert list(source.threadpool_map(broken_at(3, 4), max_workers=3, on_error=instead))[2:6] == [20, -3, -4, 50]
    assert asked == [(True, 3), (True, 4)]
    with pytest.raises(ErrorBudgetExceeded, match="stage 1:ThreadPoolMapper skipped 2"):
        list(source.threadpool_map(broken_at(3, 4), max_workers=3, on_error="skip", max_errors=1))


@pytest.mark.parametrize("mistake", [StopIteration(), SystemExit(3), KeyboardInterrupt()])
def test_what_is_no_ordinary_error_ends_the_run(mistake: BaseException) -> None:
    def function(x: int) -> int:
        if x == 2:
            raise mistake
        return x

    expected: Any = RuntimeError if isinstance(mistake, StopIteration) else type(mistake)
    with pytest.raises(expected):
        list(IterableWrapper(range(5)).threadpool_map(function, max_workers=2))
    assert not threads()


def test_threads_begin_with_the_first_output_and_end_with_the_iteration() -> None:
    begun = threading.Event()

    def function(x: int) -> int:
        begun.set()
        time.sleep(0.05)
        return x

    pipe = IterableWrapper(range(1000)).threadpool_map(function, max_workers=3, thread_name_prefix="decode")
    iterator = iter(pipe)
    assert not threads()
    assert next(iterator) == 0
    assert begun.is_set()
    assert {thread.name.split("_")[0] for thread in threads()} == {"decode"}
    iterator.close()  # type: ignore[attr-defined]
    assert not threads()
    for _ in islice(pipe, 2):  # given up
        pass
    assert not threads()
    first, second = iter(pipe), None
    next(first)
    second = iter(pipe)  # takes over
    assert next(second) == 0
    del first, second
    assert not threads()


def test_threads_end_while_the_error_is_kept() -> None:
    with pytest.raises(KeyError) as caught:
        list(IterableWrapper(range(50)).threadpool_map(broken_at(3), max_workers=3))
    assert caught.value.__traceback__ is not None
    assert not threads()


def test_calls_not_begun_are_dropped() -> None:
    calls: list[int] = []

    def function(x: int) -> int:
        calls.append(x)
        time.sleep(0.02)
        return x

    iterator: Any = iter(IterableWrapper(range(1000)).threadpool_map(function, scheduled_tasks=500, max_workers=2))
    next(iterator)
    iterator.close()
    assert len(calls) < 500


@pytest.mark.parametrize("fails", [False, True])
def test_an_initializer_runs_once_in_each_thread(fails: bool) -> None:
    ran: list[int] = []

    def initializer(word: str) -> None:
        ran.append(threading.get_ident())
        if fails:
            raise OSError(f"no {word}")

    pipe = IterableWrapper(range(20)).threadpool_map(
        slow_first, max_workers=3, initializer=initializer, initargs=("model",)
    )
    if fails:
        with pytest.raises(OSError, match="no model") as caught:
            list(pipe)
        assert "in stage 1:ThreadPoolMapper" in caught.value.__notes__[0]
        return
    assert list(pipe) == [10 * x for x in range(20)]
    assert len(ran) == len(set(ran)) <= 3
    assert threading.get_ident() not in ran


@pytest.mark.usefixtures("no_residue")
def test_a_forked_child_leaves_the_threads_alone() -> None:
    iterator: Any = iter(IterableWrapper(range(1000)).threadpool_map(slow_first, max_workers=2))
    next(iterator)
    child = os.fork()
    if child == 0:
        iterator.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert next(iterator) == 10
    iterator.close()


def test_draws_do_not_depend_on_the_threads() -> None:
    def graph(workers: int) -> list[Any]:
        pipe: IterDataPipe[Any] = IterableWrapper(range(50)).threadpool_map(draw, rng=True, max_workers=workers)
        return list(start(pipe))

    one, several = graph(1), graph(4)
    assert one == several
    assert len({value for _, value in one}) == 50


@pytest.mark.parametrize("field", ["taken", "anchor"])
def test_a_damaged_position_is_refused(field: str) -> None:
    def graph() -> Any:
        return IterableWrapper(range(50)).threadpool_map(lambda x: x, max_workers=2)

    run = start(graph())
    list(islice(run, 20))
    state = saved(run)
    run.context.close()
    position = state["1:ThreadPoolMapper"]
    for wrong in ({**position, field: -1}, {**position, "taken": 3}):
        with pytest.raises(StateError, match="damaged"):
            start(graph(), {**state, "1:ThreadPoolMapper": wrong})


def test_wrong_parameters() -> None:
    source = IterableWrapper([1])
    for name in ("scheduled_tasks", "max_workers"):
        with pytest.raises(ValueError, match=f"{name} must be 1 or more"):
            source.threadpool_map(str, **{name: 0})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expected a function"):
        ThreadPoolMapper(source, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="initializer is a function"):
        source.threadpool_map(str, initializer="x")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="rng=True"):
        source.threadpool_map(slow_first, rng=True)
    with pytest.raises(ValueError, match="has no effect"):
        source.threadpool_map(str, max_errors=3)


@pytest.mark.usefixtures("no_residue")
def test_workers_give_the_same_as_in_process() -> None:
    def graph() -> Any:
        source = IterableWrapper(range(60)).shuffle(10).sharding_filter()
        return source.threadpool_map(draw, rng=True, scheduled_tasks=8, max_workers=2).batch(4)

    def batches(workers: int, at: int = 0) -> list[Any]:
        service = MultiProcessingReadingService(num_workers=workers)
        loader: DataLoader2[Any] = DataLoader2(graph(), reading_service=service, num_streams=2)
        loader.seed(3)
        iterator = iter(loader)
        got = list(islice(iterator, at)) if at else []
        if at:
            state = loader.state_dict()
            loader.shutdown()
            loader = DataLoader2(graph(), reading_service=service, num_streams=2)
            loader.load_state_dict(state)
            iterator = iter(loader)
        got += iterator
        loader.shutdown()
        return got

    whole = batches(0)
    assert sorted(x for batch in whole for x, _ in batch) == list(range(60))
    assert batches(2) == whole
    assert batches(2, at=5) == whole
