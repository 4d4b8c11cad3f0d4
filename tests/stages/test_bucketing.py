from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_contract import check_everywhere, check_stage, saved, start

from pipes import DataChunk
from pipes.errors import StateError, notes_of
from pipes.inspector.report import describe_graph
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2

LENGTHS = [4, 1, 3, 3, 2, 5, 1, 1, 4, 2, 9, 3]


def words(lengths: list[int]) -> IterableWrapper[str]:
    return IterableWrapper([chr(97 + place) * length for place, length in enumerate(lengths)])


def hashed(number: int) -> int:
    return 1 + number * 7 % 5


def test_contract() -> None:
    check_stage(
        lambda: words(LENGTHS).max_token_bucketize(5, buffer_size=5),
        # One buffer is "aaaa b ccc ddd ee", the next one "fffff g h iiii jj"; the last one "lll" without the nine k.
        [["b", "ee"], ["ccc"], ["ddd"], ["aaaa"], ["g", "h", "jj"], ["iiii"], ["fffff"], ["lll"]],
    )
    check_stage(lambda: words(LENGTHS).max_token_bucketize(5, min_len=2, max_len=3, buffer_size=3))
    check_stage(lambda: words([]).max_token_bucketize(5), [])
    check_everywhere(lambda source: source.max_token_bucketize(9, hashed, buffer_size=4, include_padding=True))


def test_equal_lengths_keep_their_order_and_elements_need_no_order() -> None:
    pipe = IterableWrapper([{"n": n} for n in range(6)]).max_token_bucketize(2)
    assert list(pipe) == [[{"n": n}, {"n": n + 1}] for n in (0, 2, 4)]
    assert type(next(iter(pipe))) is DataChunk


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12)), st.integers(1, 20), st.integers(1, 7), st.booleans())
def test_batches_keep_the_budget_and_lose_nothing(
    lengths: list[int], most: int, buffer_size: int, padded: bool
) -> None:
    pipe = words(lengths).max_token_bucketize(most, buffer_size=buffer_size, include_padding=padded)
    batches = list(pipe)
    assert all(batch for batch in batches)
    for batch in batches:
        tokens = len(batch) * max(map(len, batch)) if padded else sum(map(len, batch))
        assert tokens <= most
        assert len(batch) <= buffer_size
    expected = sorted(word for word in words(lengths) if len(word) <= most)
    assert sorted(chain.from_iterable(batches)) == expected
    # As few batches as the order by length allows: none could have taken the first element of the one after it.
    for at in range(0, len(lengths), buffer_size):
        buffer = sorted(n for n in lengths[at : at + buffer_size] if n <= most)
        count, held, tokens = 0, 0, 0
        for length in buffer:
            tokens = (held + 1) * length if padded else tokens + length
            if held == 0 or tokens > most:
                count, held, tokens = count + 1, 0, length
            held += 1
        found, batches = batches[:count], batches[count:]
        assert [len(word) for batch in found for word in batch] == buffer
    assert batches == []


def test_what_is_left_out_is_counted_once_also_by_a_resume() -> None:
    def graph() -> Any:
        return words([3, 0, 9, 1, 2, 7, 1, 8]).max_token_bucketize(6, min_len=1, buffer_size=4)

    whole = list(graph())
    for k in range(len(whole) + 1):
        run = start(graph())
        iterator = iter(run)
        for _ in range(k):
            next(iterator)
        again = start(graph(), saved(run))
        assert list(again) == whole[k:]
        assert again.context.tallies.counts()["1:MaxTokenBucketizer"].left_out == (("too short", 1), ("too long", 3))
    with DataLoader2(graph()) as loader:
        list(loader)
        assert loader.stats()["left_out"] == {"1:MaxTokenBucketizer": {"too short": 1, "too long": 3}}


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"max_token_count": -1}, "<= -1"),
        ({"max_token_count": 5, "min_len": -1}, "0 <= -1"),
        ({"max_token_count": 5, "min_len": 4, "max_len": 3}, "4 <= 3"),
        ({"max_token_count": 5, "max_len": 6}, "6 <= 5"),
        ({"max_token_count": 5, "min_len": 6}, "6 <= 5"),
        ({"max_token_count": 5, "buffer_size": 0}, "at least 1, not 0"),
    ],
)
def test_bounds_that_cannot_be_are_refused(settings_: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        words([1]).max_token_bucketize(**settings_)


def test_an_error_of_the_length_names_stage_and_element() -> None:
    pipe = IterableWrapper(["ab", 7]).max_token_bucketize(5)
    with pytest.raises(TypeError, match="has no len") as caught:
        list(pipe)
    assert any("1:MaxTokenBucketizer" in note and "element 7" in note for note in notes_of(caught.value))


def test_a_resume_over_other_lengths_is_refused() -> None:
    lengths = {"a": 3, "b": 3}

    def graph() -> Any:
        return IterableWrapper(["a", "b"]).max_token_bucketize(5, lambda word: lengths[word])

    run = start(graph())
    iterator = iter(run)
    assert [next(iterator), next(iterator)] == [["a"], ["b"]]
    state = saved(run)
    lengths["a"] = lengths["b"] = 1
    with pytest.raises(StateError, match="fewer batches after input 0"):
        list(start(graph(), state))


@pytest.mark.parametrize("change", [{"taken": 1}, {"taken": -1}, {"given": "x"}, {"anchor": None}])
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    run = start(words(LENGTHS).max_token_bucketize(9, buffer_size=5))
    next(iter(run))
    table = saved(run)
    table[run.stage].update(change)
    with pytest.raises(StateError, match="damaged"):
        start(words(LENGTHS).max_token_bucketize(9, buffer_size=5), table)


def test_a_restore_reads_one_buffer_again() -> None:
    made: list[int] = []

    def graph() -> Any:
        return (
            IterableWrapper(range(1000))
            .map(lambda n: made.append(n) or n)
            .max_token_bucketize(9, hashed, buffer_size=20)
        )

    run = start(graph())
    iterator = iter(run)
    for _ in range(200):
        next(iterator)
    state, left = saved(run), sum(map(len, iterator))
    made.clear()
    again = start(graph(), state)
    assert sum(map(len, again)) == left
    assert left <= len(made) <= left + 20


def test_the_report_tells_what_it_holds() -> None:
    [_, stage] = describe_graph(words(LENGTHS).max_token_bucketize(9, buffer_size=5), streams=2).stages
    assert (stage.buffer, stage.rereads, stage.state) == (5, 5, "anchor")


def test_it_has_no_length() -> None:
    with pytest.raises(TypeError, match="MaxTokenBucketizer"):
        len(words(LENGTHS).max_token_bucketize(9))


def by_digit(bucket: list[int]) -> list[int]:
    return sorted(bucket, key=lambda number: number % 10)


def test_contract_of_bucketbatch() -> None:
    check_stage(
        lambda: IterableWrapper([5, 1, 4, 2, 3, 9, 0]).bucketbatch(2, batch_num=2, sort_key=sorted),
        [[1, 2], [4, 5], [0, 3], [9]],
    )
    check_stage(lambda: IterableWrapper(range(23)).bucketbatch(2, True, 2, 2, by_digit), epochs=1)
    check_stage(lambda: IterableWrapper(range(13)).bucketbatch(2, batch_num=3, bucket_num=1), streams=(2,), epochs=1)
    check_everywhere(lambda source: source.bucketbatch(2, batch_num=2, bucket_num=2, sort_key=sorted))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_buckets_hold_each_element_once_and_batches_are_of_one_bucket(
    count: int, size: int, batch_num: int, bucket_num: int, drop_last: bool, seed: int
) -> None:
    buckets: list[list[int]] = []

    def sort(bucket: list[int]) -> list[int]:
        buckets.append(sorted(bucket))
        return sorted(bucket)

    pipe = IterableWrapper(range(count)).bucketbatch(size, drop_last, batch_num, bucket_num, sort).set_seed(seed)
    batches = list(pipe)
    assert len(pipe) == len(batches)
    assert sorted(chain.from_iterable(buckets)) == list(range(count))
    cut = [bucket[at : at + size] for bucket in buckets for at in range(0, len(bucket), size)]
    assert sorted(batches) == sorted(batch for batch in cut if len(batch) == size or not drop_last)
    pool = size * batch_num * bucket_num
    for at, bucket in enumerate(buckets):
        first = at // bucket_num * pool
        assert set(bucket) <= set(range(first, first + pool))
    if bucket_num == 1:
        assert batches == sorted(batches)


def test_the_order_of_bucketbatch_is_random_and_can_be_switched_off() -> None:
    pipe = IterableWrapper(range(400)).bucketbatch(2, batch_num=10, bucket_num=5, sort_key=sorted)
    first, second = list(pipe), list(pipe)
    assert first != second
    assert sorted(chain.from_iterable(first)) == list(range(400))
    # In torchdata the batch with the least elements of a pool was always among its first five.
    places = {min(range(50), key=lambda at, batches=list(pipe): batches[at]) for _ in range(12)}
    assert max(places) > 9
    assert list(pipe.set_shuffle(False)) == [[n, n + 1] for n in range(0, 400, 2)]
    plain = IterableWrapper(range(8)).bucketbatch(2, batch_num=2).set_seed(3)
    assert sorted(chain.from_iterable(list(plain)[:2])) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["batch_size", "batch_num", "bucket_num"])
def test_sizes_of_bucketbatch_are_refused_below_one(name: str) -> None:
    with pytest.raises(AssertionError, match=f"{name} must be at least 1, not 0"):
        IterableWrapper([1]).bucketbatch(**{"batch_size": 1, name: 0})


def test_a_sort_that_loses_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="gave 2 for 3") as caught:
        list(IterableWrapper([3, 3, 4]).bucketbatch(1, sort_key=lambda bucket: list(set(bucket))))
    assert any("1:BucketBatcher" in note for note in notes_of(caught.value))


def test_the_report_tells_what_a_bucketbatch_holds() -> None:
    [_, stage] = describe_graph(IterableWrapper(range(9)).bucketbatch(2, False, 3, 4), streams=2).stages
    assert (stage.buffer, stage.rereads, stage.state) == (24, 24, "anchor")
