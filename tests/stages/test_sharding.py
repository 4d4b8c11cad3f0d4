from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from stage_contract import check_stage, start

from pipes.errors import GraphError, StateError
from pipes.iter import IterableWrapper
from pipes.stages.sharding import SHARDING_PRIORITIES

DISTRIBUTED, MULTIPROCESSING = SHARDING_PRIORITIES.DISTRIBUTED, SHARDING_PRIORITIES.MULTIPROCESSING


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


def test_contract() -> None:
    check_stage(lambda: numbers(20).sharding_filter(), list(range(20)), streams=(1, 2, 3))
    check_stage(lambda: numbers(40).shuffle(4).sharding_filter().shuffle(3).batch(2), streams=(3,), epochs=1)
    check_stage(lambda: numbers(14).shuffle(4).sharding_filter(), streams=(1, 2), epochs=1)
    check_stage(lambda: numbers(14).sharding_filter().shuffle(3), streams=(1, 2), epochs=1)

    def forked() -> Any:
        left, right = numbers(14).shuffle(4).fork(2)
        return left.sharding_filter().zip(right.sharding_filter())

    check_stage(forked, streams=(1, 2), epochs=1, equal_state=False)


def test_each_stream_takes_every_nth() -> None:
    pipe = numbers(10).sharding_filter()
    assert [list(start(pipe, stream=s, streams=3)) for s in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize("streams", [2, 5, 12])
def test_streams_share_the_order_above_the_shard_point(streams: int) -> None:
    pipe = numbers(10).shuffle(4).sharding_filter()
    shards = [list(start(pipe, stream=s, streams=streams)) for s in range(streams)]
    assert sorted(chain(*shards)) == list(range(10))


def test_by_hand() -> None:
    pipe = numbers(10).sharding_filter()
    assert list(pipe) == list(range(10))
    pipe.apply_sharding(3, 1)
    assert list(pipe) == [1, 4, 7]
    assert len(pipe) == 3
    pipe.apply_sharding(3, 0)
    assert len(pipe) == 4


def test_levels_multiply_with_the_highest_varying_fastest() -> None:
    shards = []
    for rank in range(2):
        for worker in range(3):
            pipe = numbers(24).sharding_filter()
            pipe.apply_sharding(2, rank, DISTRIBUTED)
            pipe.apply_sharding(3, worker, MULTIPROCESSING)
            # torchdata: id = worker + workers * rank of workers * ranks
            assert list(pipe) == list(range(worker + 3 * rank, 24, 6))
            assert len(pipe) == 4
            shards += list(pipe)
    assert sorted(shards) == list(range(24))


def test_filters_that_heed_one_group_each() -> None:
    pipe = numbers(90)
    graph: Any = pipe
    for group in (1, 2, 3):
        graph = graph.sharding_filter(group)
        for other, (count, own) in {1: (2, 1), 2: (5, 3), 3: (3, 1)}.items():
            if other == group:
                graph.apply_sharding(count, own, other)
    assert list(graph) == [17, 47, 77]
    assert len(graph) == 3


def test_default_does_not_mix_with_other_groups() -> None:
    for first, second in [(1, 2), (2, 1)]:
        pipe = numbers(9).sharding_filter()
        pipe.apply_sharding(3, 0, first)
        with pytest.raises(GraphError, match="cannot be mixed"):
            pipe.apply_sharding(3, 0, second)


@pytest.mark.parametrize("own", [-1, 3, 4])
def test_an_id_out_of_range_is_refused(own: int) -> None:
    with pytest.raises(ValueError, match=r"\[0, 3\)"):
        numbers(9).sharding_filter().apply_sharding(3, own)


@pytest.mark.parametrize("size", [0, 1, 7, 12])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_length_of_each_shard_is_exact(size: int, count: int) -> None:
    for own in range(count):
        pipe = numbers(size).sharding_filter()
        pipe.apply_sharding(count, own)
        assert len(pipe) == len(list(pipe))
        assert len(pipe.batch(2)) == len(list(pipe.batch(2)))


def test_a_damaged_count_is_refused() -> None:
    pipe = numbers(9).sharding_filter()
    with pytest.raises(StateError, match="'given' of 1:ShardingFilter"):
        start(pipe, {"1:ShardingFilter": {"given": -3}})
