"""Users' own pipe classes in a run: the contract of a stage, state, reset, errors, pickling."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from queue import Queue
from typing import Any

import pytest
from stage_contract import check_stage, saved, start
from user_pipes import (
    ByNext,
    Equal,
    Keeps,
    Named,
    Negated,
    Nested,
    OwnBatches,
    OwnPickle,
    Pairing,
    Parts,
    Plain,
    Product,
    Reader,
    Rounds,
    Shuffled,
    ShuffledReplayed,
    SourceIterator,
    Squatter,
    Stateless,
    Strings,
    Summing,
    Twice,
    numbers,
)

from pipes import IterDataPipe
from pipes.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:stage .* has no state of its own")

Make = Callable[[], IterDataPipe[Any]]


def before_and_after(cls: Callable[[Any], IterDataPipe[Any]], size: int = 9) -> list[Make]:
    return [
        lambda: cls(numbers(size)),
        lambda: cls(numbers(size).shuffle(3)).shuffle(4),
    ]


FORMS: list[Any] = [Plain, Stateless, Summing, Rounds, ByNext, SourceIterator, Equal, OwnPickle, Nested, Keeps, Parts]
FORMS += [
    lambda s: Strings(s, str),
    lambda s: Twice(s, str),
    lambda s: Shuffled(s, 4),
    lambda s: ShuffledReplayed(s, 4),
]
FORMS += [lambda s: OwnBatches(s, 2), lambda s: Product(s.header(3)), lambda s: Named(s.batch(2))]
FORMS += [lambda s: Pairing(s, {"b": numbers(7).shuffle(2)})]


@pytest.mark.parametrize("cls", FORMS)
def test_contract(cls: Any) -> None:
    for make in before_and_after(cls):
        check_stage(make, epochs=1, streams=(1, 2))


def test_contract_of_a_source() -> None:
    check_stage(lambda: Negated(range(9)), [-x for x in range(9)])
    check_stage(lambda: Negated(range(9)).shuffle(3), streams=(1, 2))


@pytest.mark.parametrize("cls", [Plain, Stateless, Summing, lambda s: Strings(s, str), lambda s: Shuffled(s, 4)])
@pytest.mark.parametrize("first", [True, False])
def test_contract_behind_a_fork(cls: Any, first: bool) -> None:
    def make() -> IterDataPipe[Any]:
        left, right = numbers(12).shuffle(5).fork(2)
        own = cls(left).shuffle(3)
        return own.zip(right) if first else right.zip(own)

    check_stage(make, epochs=1, streams=(1, 2), equal_state=False)


@pytest.mark.parametrize("cls", [Plain, Stateless, Summing, Rounds, ByNext, Equal, lambda s: Strings(s, str)])
def test_second_and_third_pass(cls: Any) -> None:
    pipe = cls(numbers(5))
    first = list(pipe)
    assert first
    assert list(pipe) == first
    assert list(islice(iter(pipe), 2)) == first[:2]
    assert list(pipe) == first


def test_each_round_of_a_source_is_shuffled_anew() -> None:
    given = list(Rounds(numbers(20).shuffle(20)))
    rounds = [[x for number, x in given if number == wanted] for wanted in range(3)]
    assert [sorted(each) for each in rounds] == [list(range(20))] * 3
    assert rounds[0] != rounds[1] != rounds[2] != rounds[0]


def test_what_a_stage_keeps_beside_its_children_costs_no_elements() -> None:
    pipe = Keeps(numbers(5).shuffle(3))
    for _ in range(2):
        assert sorted(pipe) == [(str(x), x) for x in range(5)]
    assert sorted(Parts(numbers(5))) == [0, 1, 2, 3, 4, 5]


def test_two_loops_over_one_source_are_independent() -> None:
    assert list(Product(numbers(3))) == [(a, b) for a in range(3) for b in range(3)]


def test_a_stage_that_is_not_stateless_after_all_is_refused() -> None:
    class Liar(Product):
        stateless = True

    run = start(Liar(numbers(3)))
    iterator = iter(run)
    next(iterator)
    with pytest.raises(StateError, match="iterates IterableWrapper more than once within an epoch, so it is not state"):
        saved(run)


def test_a_graph_built_while_running_has_no_known_state() -> None:
    class Liar(Nested):
        stateless = True

    run = start(Liar(numbers(9)))
    next(iter(run))
    with pytest.raises(StateError, match="iterates a pipe that its __iter__ builds"):
        saved(run)


def test_a_state_that_is_no_json_is_refused() -> None:
    class Odd(Summing):
        def state_dict(self) -> Any:
            return {"x": object()}

    run = start(Odd(numbers(3)))
    next(iter(run))
    with pytest.raises(StateError, match="of stage 1:Odd is not JSON data"):
        saved(run)


@pytest.mark.filterwarnings("default:stage .* has no state of its own")
def test_a_replay_warns_once_and_says_what_to_do() -> None:
    class Fresh(Plain):
        pass

    run = start(Fresh(numbers(3)))
    next(iter(run))
    with pytest.warns(UserWarning, match="stage 1:Fresh has no state of its own.*stateless = True"):
        saved(run)
    saved(run)


def test_a_finished_stage_is_not_replayed() -> None:
    calls: list[int] = []

    class Counting(Reader):
        def __iter__(self) -> Iterator[Any]:
            for x in self.source:
                calls.append(x)
                yield x

    run = start(Counting(numbers(5)).concat(numbers(3)))
    iterator = iter(run)
    for _ in range(6):
        next(iterator)
    state = saved(run)
    calls.clear()
    assert list(start(Counting(numbers(5)).concat(numbers(3)), state)) == [1, 2]
    assert calls == []


def test_reset_is_called_for_each_iteration() -> None:
    calls: list[str] = []

    class Resetting(Stateless):
        def reset(self) -> None:
            calls.append("reset")

    pipe = Resetting(numbers(2))
    list(pipe)
    list(pipe)
    assert calls == ["reset", "reset"]


def test_state_is_not_asked_for_before_the_first_element() -> None:
    pipe = Summing(numbers(4))
    list(pipe)
    run = start(pipe)
    state = saved(run)
    assert "state" not in state["1:Summing"]
    assert list(start(Summing(numbers(4)), state)) == list(Summing(numbers(4)))


def test_a_stage_with_a_thread_of_its_own() -> None:
    class Ahead(Reader):
        def __iter__(self) -> Iterator[Any]:
            queue: Queue[Any] = Queue()

            def read() -> None:
                for x in self.source:
                    queue.put(x)
                queue.put(None)

            thread = threading.Thread(target=read)
            thread.start()
            while (x := queue.get()) is not None:
                yield x
            thread.join()

    pipe = Ahead(numbers(20).shuffle(20))
    first = list(pipe)
    assert sorted(first) == list(range(20))
    assert sorted(pipe) == list(range(20))


def test_reading_the_source_from_outside_ends_the_stage_clearly() -> None:
    from pipes.errors import StaleIteratorError

    source = numbers(5)
    pipe = Stateless(source)
    iterator = iter(pipe)
    assert next(iterator) == 0
    assert list(source) == [0, 1, 2, 3, 4]
    with pytest.raises(StaleIteratorError):
        next(iterator)
    assert list(pipe) == [0, 2, 4, 6, 8]


def test_an_iterator_that_was_never_started_leaves_nothing_behind() -> None:
    source = numbers(3)
    unused = iter(Stateless(source))
    del unused
    assert list(source) == [0, 1, 2]
    assert list(Stateless(source)) == [0, 2, 4]


def test_files_of_a_users_generator_close_when_iteration_ends_early() -> None:
    closed: list[str] = []

    class Closing(Reader):
        def __iter__(self) -> Iterator[Any]:
            try:
                yield from self.source
            finally:
                closed.append("closed")

    iterator = iter(Closing(numbers(5)).map(str))
    next(iterator)
    del iterator
    assert closed == ["closed"]


def test_an_error_from_above_is_noted_by_the_stage_it_came_from_alone() -> None:
    def broken(x: int) -> int:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as caught:
        list(Stateless(Stateless(numbers(3).map(broken))))
    [note] = caught.value.__notes__
    assert note.startswith("in stage 1:Mapper")


def test_an_error_of_the_users_own_is_noted() -> None:
    class Broken(Reader):
        def __iter__(self) -> Iterator[Any]:
            yield 1
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        list(Broken(numbers(3)).batch(1))
    [note] = caught.value.__notes__
    assert note.startswith("in stage 1:Broken built at")


@pytest.mark.parametrize("cls", [Stateless, OwnPickle, Summing])
def test_pipes_pickle_before_during_and_after_iteration(cls: Any) -> None:
    pipe = cls(numbers(3))
    whole = list(pipe)
    assert list(pickle.loads(pickle.dumps(cls(numbers(3))))) == whole
    iterator = iter(pipe)
    next(iterator)
    copy = pickle.loads(pickle.dumps(pipe))
    assert list(copy) == whole
    assert len(list(iterator)) == 2
    assert list(pickle.loads(pickle.dumps(pipe))) == whole


def test_a_users_attributes_may_have_any_name() -> None:
    check_stage(lambda: Squatter(numbers(6).shuffle(3)).shuffle(2), streams=(1, 2), epochs=1)
    pipe = Squatter(numbers(3))
    assert list(pipe) == [0, 1, 2]
    assert pipe._iterations == 8
    assert "1:Squatter()" in repr(pipe)
    with pytest.raises(TypeError, match="Squatter has no length"):
        len(pipe.batch(2))
