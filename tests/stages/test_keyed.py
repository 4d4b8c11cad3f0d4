from __future__ import annotations

import copy
from typing import Any

import pytest
from stage_contract import check_stage, saved, start

from pipes import DataChunk, MapDataPipe
from pipes.iter import IterableWrapper
from pipes.map import Batcher, Concater, SequenceWrapper, Shuffler, Zipper


def letters(text: str = "abcde") -> SequenceWrapper[str]:
    return SequenceWrapper(text)


class Endless(MapDataPipe[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_map_is_lazy() -> None:
    calls: list[str] = []
    pipe = letters().map(lambda x: calls.append(x) or x.upper())
    assert calls == []
    assert (pipe[1], calls, len(pipe)) == ("B", ["b"], 5)
    with pytest.raises(TypeError, match="expected a function"):
        letters().map(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Endless"):
        len(Endless().map(abs))


def test_batch() -> None:
    pipe = letters().batch(2)
    assert [pipe[0], pipe[1], pipe[2]] == [["a", "b"], ["c", "d"], ["e"]]
    assert type(pipe[0]) is DataChunk
    assert len(pipe) == 3
    assert len(letters().batch(2, drop_last=True)) == 2
    assert letters().batch(2, wrapper_class=tuple)[0] == ("a", "b")
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"batch {index} of 3"):
            pipe[index]
    with pytest.raises(IndexError):
        letters().batch(2, drop_last=True)[2]
    with pytest.raises(AssertionError, match="at least 1"):
        Batcher(letters(), 0)


def test_concat() -> None:
    pipe = letters("ab").concat(letters(""), letters("cd"))
    assert list(pipe.to_iter_datapipe()) == ["a", "b", "c", "d"]
    assert len(pipe) == 4
    for index in (4, -1):
        with pytest.raises(IndexError, match=f"index {index} of 4"):
            pipe[index]


def test_zip() -> None:
    pipe = letters("abc").zip(SequenceWrapper([7, 8]))
    assert list(pipe.to_iter_datapipe()) == [("a", 7), ("b", 8)]
    assert len(pipe) == 2
    with pytest.raises(IndexError, match="input 1 of Zipper, a SequenceWrapper, has no index 2"):
        pipe[2]


@pytest.mark.parametrize("join", [Concater, Zipper])
def test_joins_take_map_pipes_with_a_length(join: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        join()
    with pytest.raises(TypeError, match=r"input 1 of .*er is a IterableWrapper, not a MapDataPipe"):
        join(letters(), IterableWrapper("ab"))
    with pytest.raises(TypeError, match="Endless"):
        join(letters(), Endless())


def test_shuffle_contract() -> None:
    check_stage(lambda: letters("abcdefghi").shuffle(), streams=(1, 2))
    check_stage(lambda: letters("abcdefghi").map(str.upper).shuffle(indices=[3, 1, 1, 8]).batch(2))
    check_stage(lambda: letters("abcdefghi").shuffle().shuffle(3), streams=(1,))
    check_stage(lambda: letters("abcde").shuffle().set_shuffle(False), list("abcde"))


def test_shuffle_gives_every_key_once_anew_each_epoch() -> None:
    pipe = SequenceWrapper(range(50)).shuffle()
    first = [list(pipe) for _ in range(3)]
    assert [sorted(each) for each in first] == [list(range(50))] * 3
    assert first[0] != first[1] != first[2] != first[0]
    pipe.set_seed(3)
    again = list(pipe)
    assert list(pipe.set_seed(3)) == again != list(pipe.set_seed(4))
    assert len(pipe) == 50


def test_streams_share_the_order_of_a_shuffle_above_the_split() -> None:
    pipe = SequenceWrapper(range(30)).shuffle().sharding_filter()
    assert sorted(x for s in range(3) for x in start(pipe, stream=s, streams=3)) == list(range(30))
    automatic = SequenceWrapper(range(30)).shuffle().batch(2)
    assert sorted(x for s in range(3) for b in start(automatic, stream=s, streams=3) for x in b) == list(range(30))


def test_a_restore_reads_only_what_is_left() -> None:
    reads: list[int] = []
    pipe = SequenceWrapper(range(100)).map(lambda x: reads.append(x) or x).shuffle()
    run = start(pipe)
    iterator = iter(run)
    head = [next(iterator) for _ in range(90)]
    state = saved(run)
    reads.clear()
    rest = list(start(pipe, state))
    assert sorted(head + rest) == list(range(100))
    assert reads == rest


def test_shuffle_takes_map_pipes() -> None:
    with pytest.raises(TypeError, match="reads a MapDataPipe, not a list"):
        Shuffler([1])  # type: ignore[arg-type]


def test_a_cache_reads_each_key_once_and_travels_without_its_elements() -> None:
    asked: list[int] = []
    pipe = SequenceWrapper([5, 6]).map(lambda x: asked.append(x) or [x]).in_memory_cache()
    assert [pipe[1], pipe[1], pipe[0]] == [[6], [6], [5]]
    assert list(pipe.to_iter_datapipe()) == [[5], [6]]
    assert asked == [6, 5]
    assert len(pipe) == 2
    with pytest.raises(IndexError):
        pipe[2]
    assert copy.copy(pipe)[0] == [5]
    assert asked == [6, 5, 5]
