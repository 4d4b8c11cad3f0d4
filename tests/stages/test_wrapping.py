from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.utils.data
from stage_contract import check_everywhere, check_stage, saved, start

from pipes.errors import StateError
from pipes.iter import Batcher, IterableWrapper, MapToIterConverter
from pipes.map import SequenceWrapper
from pipes.stages.wrapping import as_pipe


class Squares(Sequence[int]):
    """A sequence of its own kind that counts how often it is read."""

    reads = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> int:
        Squares.reads += 1
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index * index  # type: ignore[no-any-return]


class Restartable:
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: range(5), [0, 1, 2, 3, 4]),
        (lambda: [[1], [2], [3]], [[1], [2], [3]]),
        (lambda: ("a", "b"), ["a", "b"]),
        (lambda: "abc", ["a", "b", "c"]),
        (lambda: b"ab", [97, 98]),
        (lambda: {"a": 1, "b": 2}, ["a", "b"]),
        (lambda: deque([1, 2, 3]), [1, 2, 3]),
        (lambda: Squares(5), [0, 1, 4, 9, 16]),
        (Restartable, [0, 1, 2, 3, 4, 5]),
        (list, []),
    ],
)
def test_contract(make: Any, expected: list[Any]) -> None:
    check_stage(lambda: IterableWrapper(make()), expected, streams=(1, 2))
    check_stage(lambda: IterableWrapper(make()).shuffle(2), streams=(1,))


def test_edits_during_an_epoch_do_not_show_and_edits_before_do() -> None:
    data = [[1], [2]]
    pipe = IterableWrapper(data)
    data.append([3])
    iterator = iter(pipe)
    data[1] = [20]
    assert next(iterator) == [1]
    data.append([4])
    data[2] = [30]
    assert list(iterator) == [[20], [3]]
    assert list(pipe) == [[1], [20], [30], [4]]


def test_elements_are_copies_unless_told_otherwise() -> None:
    data = [[1]]
    assert next(iter(IterableWrapper(data))) is not data[0]
    assert next(iter(IterableWrapper(data, deepcopy=False))) is data[0]


def test_a_generator_gives_one_epoch_and_warns() -> None:
    pipe = IterableWrapper(i for i in range(3))
    with pytest.warns(UserWarning, match="wraps a generator, which can be read once"):
        assert list(pipe) == [0, 1, 2]
    with pytest.warns(UserWarning, match="second epoch will be empty"):
        assert list(pipe) == []


def test_what_cannot_be_copied_is_used_and_warns() -> None:
    class Holder:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __iter__(self) -> Iterator[int]:
            return iter((1, 2))

    with pytest.warns(UserWarning, match="cannot deep-copy its iterable"):
        assert list(IterableWrapper(Holder())) == [1, 2]
    assert list(IterableWrapper(Holder(), deepcopy=False)) == [1, 2]


def test_length() -> None:
    assert len(IterableWrapper([1, 2])) == 2
    with pytest.raises(TypeError, match=r"IterableWrapper .* no length: its iterable, a generator, has none"):
        len(IterableWrapper(i for i in range(3)))


def test_two_million_strings_are_neither_walked_nor_copied_to_look_at_a_graph() -> None:
    class Watched(list[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("the list was walked")

    data = Watched(["x"]) * 2_000_000
    watched = Watched(data)
    pipe = IterableWrapper(watched).shuffle().batch(2)
    assert "2000000 items" in repr(pipe)
    assert len(pipe) == 1_000_000
    start(pipe)


def test_a_sequence_is_skipped_by_position() -> None:
    pipe = IterableWrapper(Squares(100_000)).shuffle(100)
    run = start(pipe)
    iterator = iter(run)
    for _ in range(90_000):
        next(iterator)
    state = saved(run)
    expected = [next(iterator) for _ in range(100)]
    Squares.reads = 0
    again = iter(start(pipe, state))
    assert [next(again) for _ in range(100)] == expected
    assert Squares.reads <= 1500


@pytest.mark.parametrize("data", [range(5), Squares(5)])
def test_data_that_became_shorter_is_refused(data: Any) -> None:
    with pytest.raises(StateError, match="has 5 elements, but the state was saved after element 7"):
        list(start(IterableWrapper(data), {"0:IterableWrapper": {"at": 7}}))


def test_an_error_of_the_iterable_names_the_stage() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire") as caught:
        list(IterableWrapper(Broken()).map(str).batch(2))
    assert "in stage 0:IterableWrapper built at" in caught.value.__notes__[0]


def test_any_iterable_feeds_a_stage() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper as TorchWrapper

    assert list(Batcher([1, 2, 3], 2)) == [[1, 2], [3]]  # type: ignore[arg-type]
    assert list(Batcher(TorchWrapper([1, 2, 3]), 2)) == [[1, 2], [3]]  # type: ignore[arg-type]
    assert list(Batcher(SequenceWrapper([1, 2, 3]), 2)) == [[1, 2], [3]]  # type: ignore[arg-type]
    for source in (5, None, "names"):
        with pytest.raises(TypeError, match="reads a pipe or an iterable"):
            as_pipe(source)


def test_sequence_wrapper_copies_at_construction() -> None:
    data = [[1], [2]]
    pipe = SequenceWrapper(data)
    data[0].append(5)
    data.append([3])
    assert (pipe[0], len(pipe)) == ([1], 2)
    shared = SequenceWrapper(data, deepcopy=False)
    assert shared[0] is data[0]
    assert SequenceWrapper({"k": 1})["k"] == 1
    with pytest.raises(IndexError):
        pipe[7]
    assert isinstance(pipe, torch.utils.data.Dataset)


def test_sequence_wrapper_that_cannot_be_copied_warns() -> None:
    locks = [threading.Lock()]
    with pytest.warns(UserWarning, match="cannot deep-copy its sequence"):
        assert SequenceWrapper(locks)[0] is locks[0]


def test_keys_contract() -> None:
    check_stage(lambda: SequenceWrapper([5, 6, 7]).to_iter_datapipe(), [5, 6, 7])
    check_stage(lambda: SequenceWrapper({"a": 1, "b": 2}).to_iter_datapipe(["b", "a", "b"]), [2, 1, 2])
    check_stage(lambda: SequenceWrapper([5, 6, 7]).map(str).to_iter_datapipe([]), ["5", "6", "7"])
    check_stage(lambda: SequenceWrapper(list(range(12))).to_iter_datapipe().shuffle(3))
    check_everywhere(lambda source: source.zip(SequenceWrapper(list(range(30))).to_iter_datapipe()))


def test_a_missing_key_names_stage_and_key() -> None:
    pipe = SequenceWrapper({"a": 1}).to_iter_datapipe(["a", "z"])
    with pytest.raises(KeyError) as caught:
        list(pipe)
    assert "1:MapToIterConverter" in caught.value.__notes__[0]
    assert "on element 'z'" in caught.value.__notes__[0]


def test_a_map_pipe_without_length_says_so() -> None:
    from pipes import MapDataPipe

    class Endless(MapDataPipe[int]):
        def __getitem__(self, index: int) -> int:
            return index

    pipe = Endless()
    with pytest.raises(TypeError, match="Endless"):
        len(pipe.to_iter_datapipe())
    assert list(pipe.to_iter_datapipe([3, 5])) == [3, 5]
    with pytest.raises(TypeError, match="not a list"):
        MapToIterConverter([1])  # type: ignore[arg-type]
