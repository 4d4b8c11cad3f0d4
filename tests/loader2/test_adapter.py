"""What torchdata's programs do to a graph before it runs: adapters, the check of shuffles, older names."""

from __future__ import annotations

from typing import Any

import pytest

from pipes.iter import IterableWrapper
from pipes.loader2 import (
    DataLoader2,
    MultiProcessingReadingService,
    PrototypeMultiProcessingReadingService,
    ShuffleSpec,
)
from pipes.loader2.adapter import Adapter, Shuffle
from pipes.loader2.linter import _check_shuffle_before_sharding
from pipes.map import SequenceWrapper


def numbers() -> Any:
    return IterableWrapper(range(20))


def order(pipe: Any, *adapters: Any) -> list[int]:
    loader: DataLoader2[int] = DataLoader2(pipe, list(adapters))
    loader.seed(1)
    return list(loader)


class TestShuffle:
    def test_it_switches_all_shuffles(self) -> None:
        pipe = numbers().shuffle().sharding_filter().shuffle(5)
        assert order(pipe, Shuffle(False)) == list(range(20))
        assert order(pipe, Shuffle(False), Shuffle()) == order(pipe, Shuffle(None)) == order(pipe) != list(range(20))

    def test_one_is_added_where_there_is_none(self) -> None:
        assert order(numbers(), Shuffle(None)) == order(numbers(), Shuffle(False)) == list(range(20))
        with pytest.warns(UserWarning, match="has no shuffle, so one is added at its end"):
            given = order(numbers(), Shuffle(True))
        assert given == order(numbers().shuffle())

    def test_the_loader_s_copy_alone_is_switched(self) -> None:
        pipe = numbers().shuffle()
        order(pipe, Shuffle(False))
        assert order(pipe) != list(range(20))

    def test_an_adapter_needs_a_call(self) -> None:
        with pytest.raises(TypeError, match="abstract"):
            Adapter()  # type: ignore[abstract]
        assert issubclass(type("Own", (ShuffleSpec,), {}), ShuffleSpec)


@pytest.mark.parametrize(
    ("pipe", "expected"),
    [
        (numbers(), True),
        (numbers().shuffle().sharding_filter(), True),
        (numbers().shuffle().set_shuffle(False).map(str).sharding_filter().batch(2), True),
        (numbers().zip(numbers()).shuffle().sharding_filter(), True),
        (numbers().shuffle().zip(numbers().shuffle()).sharding_filter(), True),
        (SequenceWrapper(range(20)).shuffle().sharding_filter(), True),
        (numbers().sharding_filter(), False),
        (numbers().sharding_filter().shuffle(), False),
        (numbers().shuffle().zip(numbers()).sharding_filter(), False),
        (numbers().shuffle().sharding_filter().zip(numbers().sharding_filter()), False),
    ],
    ids=range(10),
)
def test_shuffles_before_sharding(pipe: Any, expected: bool) -> None:
    assert _check_shuffle_before_sharding(pipe) is expected


def test_the_older_name_of_the_workers() -> None:
    with pytest.warns(UserWarning, match="use MultiProcessingReadingService"):
        service = PrototypeMultiProcessingReadingService(2, worker_prefetch_cnt=3)
    assert isinstance(service, MultiProcessingReadingService)
    assert (service.num_workers, service.prefetch) == (2, 3)
