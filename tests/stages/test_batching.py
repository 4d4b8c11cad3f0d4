from __future__ import annotations

from typing import Any

import pytest
from stage_contract import check_everywhere, check_stage, start

from pipes import DataChunk
from pipes.iter import Batcher, IterableWrapper


def ten() -> IterableWrapper[int]:
    return IterableWrapper(range(10))


def test_batch_contract() -> None:
    check_stage(lambda: ten().batch(3), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]])
    check_stage(lambda: ten().batch(3, drop_last=True), [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    check_stage(lambda: ten().batch(5), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    check_stage(lambda: IterableWrapper(range(0)).batch(3), [])
    check_stage(lambda: ten().batch(3, wrapper_class=tuple))
    check_everywhere(lambda source: source.batch(3))
    check_everywhere(lambda source: source.batch(4, drop_last=True))


def test_batches_of_batches() -> None:
    check_stage(lambda: ten().batch(2).batch(2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]])


def test_a_chunk_is_a_list_with_torchdatas_methods() -> None:
    chunk = next(iter(ten().batch(2)))
    assert type(chunk) is DataChunk
    assert chunk == [0, 1]
    assert chunk.items == [0, 1]
    assert list(chunk.raw_iterator()) == [0, 1]
    assert str(chunk) == "[0, 1]"
    assert chunk.as_str("  ") == "  [0, 1]"


@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [(list, [[0, 1], [2]]), (tuple, [(0, 1), (2,)]), (sum, [1, 2]), (set, [{0, 1}, {2}])],
)
def test_any_wrapper_makes_the_batch(wrapper: Any, expected: list[Any]) -> None:
    assert list(IterableWrapper(range(3)).batch(2, wrapper_class=wrapper)) == expected


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(AssertionError, match=f"at least 1, not {size}"):
        ten().batch(size)


@pytest.mark.parametrize(
    ("elements", "size", "drop", "length"), [(10, 3, False, 4), (10, 3, True, 3), (0, 3, False, 0)]
)
def test_length(elements: int, size: int, drop: bool, length: int) -> None:
    pipe = IterableWrapper(range(elements)).batch(size, drop)
    assert len(pipe) == length == len(list(pipe))


def test_length_of_a_batch_of_unknown_names_the_stage_without_one() -> None:
    with pytest.raises(TypeError, match=r"Filter \(built at .*test_batching.py:\d+\) has no length"):
        len(ten().filter(bool).batch(2))


def test_a_restored_batch_does_not_make_those_before_it() -> None:
    made: list[int] = []

    def build(elements: Any) -> list[int]:
        chunk = list(elements)
        made.append(chunk[0])
        return chunk

    def graph() -> Any:
        return IterableWrapper(range(1000)).batch(2, wrapper_class=build).shuffle(10)

    run = start(graph())
    iterator = iter(run)
    for _ in range(400):
        next(iterator)
    state = run.table()
    made.clear()
    rest = list(start(graph(), state))
    assert len(rest) == 100
    # those held in the buffer, the last one gone over, and the rest
    assert len(made) <= 10 + 1 + 90


def test_plain_iterables_can_be_batched_by_the_class() -> None:
    assert list(Batcher([1, 2, 3], 2)) == [[1, 2], [3]]  # type: ignore[arg-type]


def test_unbatch_contract() -> None:
    check_stage(lambda: ten().batch(3).unbatch(), list(range(10)))
    check_stage(lambda: ten().batch(2).batch(2).unbatch(-1), list(range(10)))
    check_stage(lambda: ten().batch(2).batch(2).unbatch(0).unbatch(2), list(range(10)))
    check_everywhere(lambda source: source.batch(3).unbatch())


def test_unbatch_opens_lists_but_not_tuples() -> None:
    nested = [[[1, (2, 3)]], [[4]]]
    assert list(IterableWrapper(nested).unbatch()) == [[1, (2, 3)], [4]]
    assert list(IterableWrapper(nested).unbatch(2)) == [1, (2, 3), 4]
    assert list(IterableWrapper(nested).unbatch(-1)) == [1, (2, 3), 4]
    with pytest.raises(IndexError, match="exceeds the depth"):
        list(IterableWrapper(nested).unbatch(3))
    with pytest.raises(IndexError, match="exceeds the depth"):
        list(IterableWrapper([(1, 2)]).unbatch())


def test_a_wrong_level_shows_while_iterating() -> None:
    pipe = IterableWrapper([[1]]).unbatch(-2)
    with pytest.raises(ValueError, match="-1"):
        list(pipe)


def test_unbatch_has_no_length() -> None:
    with pytest.raises(TypeError, match="UnBatcher"):
        len(ten().batch(2).unbatch())
