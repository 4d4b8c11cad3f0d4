"""The state of a pipe without a loader: when it is what, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import pickle
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import through_json
from torch.utils.data import DataLoader, get_worker_info
from user_pipes import Summing

from pipes import IterDataPipe
from pipes.errors import StaleIteratorError, StateError
from pipes.iter import FileOpener, IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.saved import sealed


def graph(count: int = 30) -> IterDataPipe[int]:
    return IterableWrapper(range(count)).shuffle(5).filter(bool)


def epochs(pipe: Any, count: int = 2) -> list[list[Any]]:
    return [list(pipe) for _ in range(count)]


@pytest.mark.parametrize("k", [0, 1, 7, 27])
def test_after_break(k: int) -> None:
    whole = epochs(graph())
    pipe, again = graph(), graph()
    for element, _ in zip(pipe, range(k), strict=False):
        assert element
    # zip asks for one more before it ends
    again.load_state_dict(through_json(pipe.state_dict()))
    assert epochs(again) == [whole[0][k + 1 :], whole[1]]


def test_both_kinds_of_the_end() -> None:
    whole = epochs(graph(), 3)
    pipe = graph()
    iterator = iter(pipe)
    list(islice(iterator, 29))
    before = through_json(pipe.state_dict())
    assert next(iterator, None) is None
    after = through_json(pipe.state_dict())
    for state, expected in ((before, [[], *whole[1:]]), (after, whole[1:])):
        again = graph()
        again.load_state_dict(state)
        assert epochs(again, len(expected)) == expected


def test_chains() -> None:
    whole = list(graph())
    given: list[int] = []
    state = graph().state_dict()
    for step in (5, 4, 0, 3, 1, 9):
        pipe = graph()
        pipe.load_state_dict(state)
        assert pipe.state_dict() == state
        given += islice(iter(pipe), step)
        state = through_json(pipe.state_dict())
    pipe.load_state_dict(state)
    assert given + list(pipe) == whole


def test_a_load_replaces_the_iterator_in_use_and_an_unused_one_does_not_use_it_up() -> None:
    whole = epochs(graph())
    pipe = graph()
    iterator = iter(pipe)
    list(islice(iterator, 4))
    state = pipe.state_dict()
    next(iterator)
    pipe.load_state_dict(state)
    with pytest.raises(StaleIteratorError, match="load_state_dict"):
        next(iterator)
    iter(pipe)
    assert pipe.state_dict() == state
    assert epochs(pipe) == [whole[0][4:], whole[1]]
    taken = iter(pipe)
    pipe.load_state_dict(state)
    with pytest.raises(StaleIteratorError, match="load_state_dict"):
        next(taken)
    assert epochs(pipe) == [whole[0][4:], whole[1]]


def test_a_loaded_state_is_never_passed_by() -> None:
    pipe = graph()
    next(iter(pipe))
    pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(StateError, match="loaded into Filter, which Mapper now reads"):
        iter(pipe.map(str))
    with pytest.raises(StateError, match="load a loader's state"):
        DataLoader2(pipe)
    copy = pickle.loads(pickle.dumps(pipe))
    assert list(copy) == list(pipe) == list(graph())[1:]


def test_states_of_others_are_refused() -> None:
    pipe = graph()
    list(islice(pipe, 3))
    with pytest.raises(StateError, match="load it into the pipe"):
        DataLoader2(graph()).load_state_dict(pipe.state_dict())
    with pytest.raises(StateError, match="load it into a DataLoader2"):
        graph().load_state_dict(DataLoader2(graph()).state_dict())
    with pytest.raises(StateError, match="other data: stage 0:IterableWrapper"):
        graph(31).load_state_dict(pipe.state_dict())
    with pytest.warns(UserWarning, match="other data: stage 0:IterableWrapper"):
        graph(31).load_state_dict(pipe.state_dict(), on_changed_data="warn")
    seeded = IterableWrapper(range(30)).shuffle(5).set_seed(4).filter(bool)
    with pytest.raises(StateError, match=r"another graph: stage 1:Shuffler had .*set_seed=4"):
        graph().load_state_dict(seeded.state_dict())
    with pytest.raises(StateError, match=r"another graph: stage 1:Shuffler had .*set_seed=4"):
        DataLoader2(graph()).load_state_dict(DataLoader2(seeded).state_dict())
    other = graph()
    other.load_state_dict(sealed({**graph().state_dict(), "stream": 3, "streams": 4}))
    with pytest.raises(StateError, match=r"stream 3 of 4 .*stream 0 of 1"):
        iter(other)


def test_the_stage_that_is_asked_must_be_the_last() -> None:
    pipe = graph()
    below = pipe.map(str)
    iterator = iter(below)
    next(iterator)
    with pytest.raises(StateError, match="Filter is read by Mapper: ask the last stage"):
        pipe.state_dict()
    list(iterator)
    assert pipe.state_dict()["epoch"] == 0


def test_after_an_error_there_is_none() -> None:
    pipe = IterableWrapper(range(5)).map(lambda x: 1 // (3 - x))
    with pytest.raises(ZeroDivisionError):
        list(pipe)
    with pytest.raises(StateError, match="the iteration failed"):
        pipe.state_dict()
    assert next(iter(pipe)) == 0
    assert pipe.state_dict()["table"] == {"0:IterableWrapper": {"at": 1}}


def test_a_seed_of_its_own_counts_epochs_from_where_it_was_set() -> None:
    def make() -> Any:
        return IterableWrapper(range(20)).shuffle(5).set_seed(4)

    def third_and_fourth(pipe: Any) -> list[list[int]]:
        list(pipe)
        pipe.set_seed(4)
        return epochs(pipe)

    whole = third_and_fourth(make())
    pipe = make()
    list(pipe)
    pipe.set_seed(4)
    fresh = pipe.state_dict()
    iterator = iter(pipe)
    list(islice(iterator, 6))
    state = through_json(pipe.state_dict())
    for saved, expected in ((state, [whole[0][6:], whole[1]]), (through_json(fresh), whole)):
        again = make()
        again.load_state_dict(saved)
        assert epochs(again) == expected
    again.load_state_dict(state)
    again.set_seed(5)
    with pytest.raises(StateError, match="set_seed=4"):
        iter(again)


def test_the_saved_seed_goes_on_in_later_epochs() -> None:
    pipe = graph()
    whole = epochs(pipe, 3)
    again = graph()
    state = sealed({**graph().state_dict(), "seed": torch.initial_seed() ^ 1})
    again.load_state_dict(state)
    other = epochs(again, 3)
    assert all(one != two for one, two in zip(whole, other, strict=True))
    third = graph()
    third.load_state_dict(sealed({**state, "epoch": 1}))
    assert epochs(third) == other[1:]


def test_a_users_own_state_comes_along_from_a_stage_below() -> None:
    def make() -> IterDataPipe[Any]:
        return Summing(IterableWrapper(range(9))).header(None)

    whole = list(make())
    pipe = make()
    list(islice(pipe, 4))
    again = make()
    again.load_state_dict(through_json(pipe.state_dict()))
    assert list(again) == whole[4:]


def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\nc\n")

    class Big:
        pass

    born: list[weakref.ref[Big]] = []

    def make(_: Any) -> Big:
        big = Big()
        born.append(weakref.ref(big))
        return big

    before = len(os.listdir("/proc/self/fd"))
    pipe = FileOpener([str(tmp_path / "a.txt")], "rb").readlines().map(make).shuffle(2)
    for one in pipe:
        del one
        break
    state = pipe.state_dict()
    gc.collect()
    assert len(born) > 2
    assert [big() for big in born] == [None] * len(born)
    assert len(os.listdir("/proc/self/fd")) == before
    pipe.load_state_dict(state)
    assert len(list(pipe)) == 2


class Careless(IterDataPipe[Any]):
    """Pickles all that it has, as many users' classes do."""

    stateless = True

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source

    def __getstate__(self) -> Any:
        return dict(self.__dict__)


def test_pipes_that_were_iterated_can_be_pickled() -> None:
    pipe = Careless(IterableWrapper(range(4)))
    iterator = iter(pipe)
    next(iterator)
    copy = pickle.loads(pickle.dumps(pipe))
    assert list(copy) == list(range(4))
    assert list(iterator) == [1, 2, 3]


def test_in_the_workers_of_torchs_loader() -> None:
    """Each worker's pipe has a state of its own, which goes on in the same worker."""
    pipe = IterableWrapper(range(12)).shuffle(4).sharding_filter().map(with_its_state)
    torch.manual_seed(5)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for worker, element in DataLoader(pipe, batch_size=None, num_workers=2):
        found[worker].append(element)
    assert sorted(found[0] + found[1]) == list(range(12))


def with_its_state(element: int) -> tuple[int, int]:
    info = get_worker_info()
    assert info is not None
    state = info.dataset.state_dict()  # type: ignore[union-attr]
    assert (state["stream"], state["streams"]) == (info.id, 2)
    return info.id, element


BAD: list[Any] = [None, b"\x80\x04K\x01.", "{}", 3, [], {}, {"of": "pipe"}, {"pipes_state": 1, "of": "pipe"}]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_what_is_no_state_is_refused(bad: Any) -> None:
    pipe = graph()
    iterator = iter(pipe)
    given = list(islice(iterator, 3))
    with pytest.raises(StateError):
        pipe.load_state_dict(bad)
    with pytest.raises(StateError):
        pipe.load_state_dict(json.loads(json.dumps(pipe.state_dict()).replace("30", "31")))
    assert given + list(iterator) == list(graph())


def test_a_graph_with_all_children_of_a_fork_has_a_state() -> None:
    def graph() -> IterDataPipe[Any]:
        one, two = IterableWrapper(range(30)).shuffle(5).fork(2)
        return one.batch(2).zip(two.shuffle(4).batch(2))

    pipe = graph()
    whole, second = list(pipe), list(pipe)
    pipe = graph()
    iterator = iter(pipe)
    for at in range(len(whole) + 1):
        again = graph()
        again.load_state_dict(pipe.state_dict())
        assert list(again) == whole[at:]
        assert list(again) == second
        if at < len(whole):
            next(iterator)


def test_an_iterator_tells_whether_its_end_was_seen() -> None:
    pipe = IterableWrapper(range(3)).shuffle()
    iterator: Any = iter(pipe)
    next(iterator)
    assert iterator.state_dict() == {"ended": False}
    list(iterator)
    assert iterator.state_dict() == {"ended": True}
    state, second = pipe.state_dict(), list(pipe)
    again = IterableWrapper(range(3)).shuffle()
    again.load_state_dict(state)
    fresh: Any = iter(again)
    fresh.load_state_dict({"ended": True})
    assert list(fresh) == []
    assert again.state_dict() == state
    assert list(again) == second
