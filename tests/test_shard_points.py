"""Graphs whose shard points would lose, double or mismatch elements are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipes import IterDataPipe
from pipes.errors import GraphError
from pipes.iter import IterableWrapper, Mapper
from pipes.shard_points import check_shard_points, level_share
from pipes.stages.sharding import SHARDING_PRIORITIES

RANK, WORKER = SHARDING_PRIORITIES.DISTRIBUTED, SHARDING_PRIORITIES.MULTIPROCESSING


def numbers(size: int = 20) -> IterDataPipe[int]:
    return IterableWrapper(range(size))


def shared(size: int = 20) -> IterDataPipe[int]:
    return numbers(size).sharding_filter()


def forked() -> IterDataPipe[Any]:
    a, b = shared().filter(bool).fork(2)
    return a.zip(b.map(str))


class Shifted(Mapper[Any]):
    def __iter__(self) -> Any:
        yield 0
        yield from self.datapipe


GOOD: dict[str, Callable[[], IterDataPipe[Any]]] = {
    "none": lambda: numbers().filter(bool).zip(numbers()),
    "one": lambda: shared().filter(bool).batch(2),
    "both, in step": lambda: shared().map(str).zip(shared().enumerate()),
    "after a filter": lambda: numbers().filter(bool).sharding_filter().zip(shared()),
    "batches alike": lambda: shared().batch(3).zip(shared().map(str).batch(3)),
    "three, nested": lambda: shared().zip(shared()).map(str).zip(shared()),
    "one, forked behind": forked,
    "concat": lambda: shared().filter(bool).concat(shared()),
    "mux": lambda: shared().batch(2).mux(shared()),
    "rank, then worker": lambda: numbers().sharding_filter(RANK).shuffle().sharding_filter(WORKER).zip(shared()),
    "whole beside share": lambda: shared().filter(bool).zip(numbers()),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_graphs(name: str) -> None:
    check_shard_points(GOOD[name](), 4, 2)


TWICE = r"stage 2:ShardingFilter \(built at .*test_shard_points.py:\d+\) splits what 1:ShardingFilter has split"
BAD: dict[str, tuple[Callable[[], IterDataPipe[Any]], str]] = {
    "twice": (lambda: shared().sharding_filter(), TWICE),
    "twice, far apart": (lambda: shared().map(str).batch(2).sharding_filter(), "splits what 1:ShardingFilter"),
    "twice, through a join": (lambda: shared().zip(numbers()).sharding_filter(), "splits what 1:ShardingFilter"),
    "one level twice": (
        lambda: numbers().sharding_filter(RANK).sharding_filter(WORKER).sharding_filter(RANK),
        "3:ShardingFilter .* splits what",
    ),
    "all, then a level": (lambda: shared().sharding_filter(WORKER), "splits what 1:ShardingFilter"),
    "a filter": (
        lambda: shared().filter(bool).zip(shared()),
        r"5:Zipper \(built at .*\) pairs elements that 1:ShardingFilter and 4:ShardingFilter split apart, and 2:Filter "
        r"\(built at .*\) stands between.*behind 5:Zipper",
    ),
    "a filter, then a map": (lambda: shared().zip(shared().filter(bool).map(str)), "4:Filter .* stands between"),
    "a shuffle": (lambda: shared().shuffle().zip(shared()), "2:Shuffler .* stands between"),
    "batches of other sizes": (
        lambda: shared().batch(3).zip(shared().batch(2)),
        r"differently: batch\(3, drop_last=False\) against batch\(2, drop_last=False\)",
    ),
    "one by one against batches": (lambda: shared().batch(3).zip(shared()), "against one by one"),
    "some left out": (lambda: shared().skip(1).zip(shared()), r"skip\(1\) against one by one"),
    "a concat": (lambda: shared().concat(shared()).zip(shared()), "4:Concater .* stands between"),
    "a join with a whole": (lambda: shared().zip(numbers()).zip(shared()), "3:Zipper .* stands between"),
    "nested": (lambda: shared().zip(shared()).filter(bool).zip(shared()), "5:Filter .* stands between"),
    "a user's stage": (lambda: shared().then(Shifted, str).zip(shared()), "2:Shifted .* stands between"),
    "rank only": (lambda: numbers().sharding_filter(RANK).batch(2), "split by rank only, so the 2 streams of a rank"),
    "worker only": (lambda: numbers().sharding_filter(WORKER).batch(2), "split by worker only, so the 2 ranks"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_graphs(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(GraphError, match=message):
        check_shard_points(make(), 4, 2)


def test_a_level_alone_is_enough_where_the_other_is_one() -> None:
    check_shard_points(numbers().sharding_filter(RANK), 2, 2)
    check_shard_points(numbers().sharding_filter(WORKER), 4, 1)


@pytest.mark.parametrize("streams", [2, 4, 6])
def test_levels_together_are_one_split(streams: int) -> None:
    both, rank, worker = frozenset({"rank", "worker"}), frozenset({"rank"}), frozenset({"worker"})
    for stream in range(streams):
        first, ranks = level_share(rank, stream, streams, 2)
        second, workers = level_share(worker, stream, streams, 2)
        twice = [n for place, n in enumerate(n for n in range(50) if n % ranks == first) if place % workers == second]
        number, count = level_share(both, stream, streams, 2)
        assert twice == [n for n in range(50) if n % count == number]
