from __future__ import annotations

import io
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_contract import check_everywhere, check_stage, saved, start

from pipes.errors import StateError, notes_of
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.utils import StreamWrapper


def pairs(keys: Any) -> IterableWrapper[tuple[int, str]]:
    return IterableWrapper([(key, f"r{key}") for key in keys])


def same(number: int) -> int:
    return number


def first(pair: tuple[int, str]) -> int:
    return pair[0]


def joined(keys: Any, references: Any, **options: Any) -> Any:
    return IterableWrapper(keys).zip_with_iter(pairs(references), same, first, **options)


def test_contract() -> None:
    check_stage(
        lambda: joined([0, 1, 2, 3, 4], [4, 3, 2, 1, 0, 7]),
        [(0, (0, "r0")), (1, (1, "r1")), (2, (2, "r2")), (3, (3, "r3")), (4, (4, "r4"))],
    )
    check_stage(lambda: joined([], [4, 3]), [])
    check_stage(
        lambda: joined(range(9), [2, 0, 1, 8, 7, 6, 3, 4, 5], keep_key=True, merge_fn=lambda a, b: [a, b[1]]),
        [(n, [n, f"r{n}"]) for n in range(9)],
        epochs=1,
        streams=(1,),
    )
    check_everywhere(
        lambda source: source.zip_with_iter(IterableWrapper(range(14)).shuffle(6), same), streams=(1,), epochs=1
    )


def test_both_sides_of_a_fork() -> None:
    def graph() -> Any:
        left, right = IterableWrapper(range(12)).shuffle(3).fork(2)
        return left.shuffle(5).zip_with_iter(right.shuffle(4), same)

    check_stage(graph, epochs=1, streams=(1,), equal_state=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(0, 20), st.integers(0, 10**6))
def test_every_resume_of_every_order(count: int, unused: int, seed: int) -> None:
    draws = random.Random(seed)
    references = list(range(count + unused))
    draws.shuffle(references)
    keys = draws.sample(references, count)
    whole = list(start(joined(keys, references)))
    assert whole == [(key, (key, f"r{key}")) for key in keys]
    run = start(joined(keys, references))
    iterator, k = iter(run), draws.randint(0, count)
    for _ in range(k):
        next(iterator)
    assert list(start(joined(keys, references), saved(run))) == whole[k:]


def test_a_restore_makes_the_references_that_wait_and_no_elements() -> None:
    made: list[Any] = []

    def note(what: Any) -> Any:
        made.append(what)
        return what

    def graph() -> Any:
        references = pairs([5_000, *range(5_000), *range(5_001, 9_000)]).map(note)
        return IterableWrapper(range(9_000)).map(note).zip_with_iter(references, same, first)

    run = start(graph())
    iterator = iter(run)
    for _ in range(4_000):
        next(iterator)
    state, rest = saved(run), list(iterator)
    assert state[run.stage]["held"] == [0]
    made.clear()
    again = start(graph(), state)
    assert made == [(5_000, "r5000")]
    assert list(again) == rest
    assert saved(start(joined(range(9), range(9))))["2:IterKeyZipper"]["anchor"]["extra"] == [0]


def test_a_full_buffer_drops_the_oldest_with_a_warning() -> None:
    with DataLoader2(joined([2, 7], [4, 3, 2, 1, 0, 7, 8], buffer_size=3)) as loader:
        with pytest.warns(UserWarning, match="3 references wait in stage 2:IterKeyZipper"):
            assert list(loader) == [(2, (2, "r2")), (7, (7, "r7"))]
        assert loader.stats()["left_out"] == {"2:IterKeyZipper": {"of references beyond the buffer": 1}}
    with (
        pytest.warns(UserWarning, match="raise buffer_size"),
        pytest.raises(BufferError, match=r"No matching key can be found .* key 4; its buffer was full") as caught,
    ):
        list(joined([0, 4], [4, 3, 2, 1, 0], buffer_size=3))
    assert any("element 4" in note for note in notes_of(caught.value))


def test_keys_without_a_reference_and_with_two() -> None:
    with pytest.raises(BufferError, match=r"for key 5\n"):
        list(joined([5], [4, 3]))
    with pytest.raises(ValueError, match="Duplicate key is found in the reference pipe of stage 2:IterKeyZipper: 3"):
        list(joined([0], [3, 3, 0]))
    assert [key for key, _ in joined([0, 0, 1], [0, 1, 0])] == [0, 0, 1]


def test_streams_of_references_that_nobody_asks_for_are_closed() -> None:
    streams = [StreamWrapper(io.BytesIO(b"")) for _ in range(3)]
    references = IterableWrapper(list(enumerate(streams)), deepcopy=False)
    [(_, (_, stream))] = IterableWrapper([2]).zip_with_iter(references, same, first)
    assert [each.closed for each in streams] == [True, True, False]
    assert stream is streams[2]


def test_arguments_that_cannot_be_are_refused() -> None:
    source = IterableWrapper([1])
    with pytest.raises(TypeError, match="ref_datapipe is an iterable pipe, not a list"):
        source.zip_with_iter([1], same)
    with pytest.raises(ValueError, match="at least 1, or None for no limit, not 0"):
        source.zip_with_iter(IterableWrapper([1]), same, buffer_size=0)
    with pytest.raises(ValueError, match="takes 1 arguments, but input_col gives 2"):
        source.zip_with_iter(IterableWrapper([1]), same, merge_fn=same)
    assert len(joined(range(5), range(9))) == 5


@pytest.mark.parametrize(
    "change", [{"given": 0}, {"held": [99]}, {"taken": -1}, {"anchor": {"taken": 0, "table": {}, "extra": [1, 2]}}]
)
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    run = start(joined(range(200), range(200)))
    iterator = iter(run)
    for _ in range(150):
        next(iterator)
    table = saved(run)
    table[run.stage].update(change)
    with pytest.raises(StateError, match="damaged"):
        start(joined(range(200), range(200)), table)
