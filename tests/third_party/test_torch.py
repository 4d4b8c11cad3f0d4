"""torch's DataLoader takes a pipe as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipes import IterDataPipe
from pipes.iter import IterableWrapper
from pipes.map import SequenceWrapper

N = 40


def graph() -> IterDataPipe[Any]:
    return IterableWrapper(range(N)).shuffle().sharding_filter()


def epochs(count: int, pipe: Any = None, seed: int = 5, **options: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
    loader = DataLoader(pipe or graph(), batch_size=None, generator=generator, **options)
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("persistent", [False, True])
def test_every_element_once_in_a_new_order_each_epoch(persistent: bool) -> None:
    found = epochs(3, persistent_workers=persistent)
    assert [sorted(epoch) for epoch in found] == [list(range(N))] * 3
    assert found[0] != found[1] != found[2] != found[0]
    assert epochs(3, persistent_workers=persistent) == found
    other = epochs(2, seed=6, persistent_workers=persistent)
    assert not any(epoch in found for epoch in other)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_other_numbers_of_workers(workers: int) -> None:
    context = {"multiprocessing_context": "fork" if workers else None}
    first, second = epochs(2, num_workers=workers, **context)
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second


def test_torch_batches_and_collates() -> None:
    loader = DataLoader(graph().map(float), batch_size=8, num_workers=2, multiprocessing_context="fork")
    batches = list(loader)
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert sorted(torch.cat(batches).tolist()) == list(range(N))


@pytest.mark.filterwarnings("ignore:the graph has no sharding_filter")
def test_without_a_sharding_filter_nothing_comes_twice() -> None:
    (found,) = epochs(1, IterableWrapper(range(N)).batch(3))
    assert sorted(chain.from_iterable(found)) == list(range(N))


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_of_a_generator_that_the_stage_passes_in(persistent: bool) -> None:
    pipe = graph().map(lambda x, rng: (x, rng.random()), rng=True)
    first, second = epochs(2, pipe, persistent_workers=persistent)
    assert len({draw for _, draw in first + second}) == 2 * N


def rows(number: int) -> IterDataPipe[int]:
    """As many rows as a file may have, by a pipe."""
    return IterableWrapper(range(number * 10, number * 10 + 4))


def files() -> IterDataPipe[int]:
    return IterableWrapper(range(3)).sharding_filter()


class Reader(IterDataPipe[int]):
    """A user's stage that builds a graph for each element."""

    def __init__(self, source_datapipe: IterDataPipe[int]) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[int]:
        for number in self.source_datapipe:
            yield from rows(number).map(int)


class ByHand(IterDataPipe[int]):
    """A user's source that takes its worker's share itself."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield from range(3) if info is None else range(info.id, 3, info.num_workers)


class Files(Dataset[list[int]]):
    """torch's own kind of data set, each element of which is read by a pipe."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> list[int]:
        if number > 2:
            raise IndexError(number)
        return list(rows(number))


class OwnFiles(IterableDataset[int]):
    """torch's other kind, which takes its worker's share itself."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for number in range(info.id, 3, info.num_workers):
            yield from rows(number)


@pytest.mark.filterwarnings("ignore:stage .* has no state of its own", "ignore:the graph has no sharding_filter")
@pytest.mark.parametrize(
    "make",
    [
        lambda: files().flatmap(rows),
        lambda: files().map(lambda number: list(rows(number).shuffle().sharding_filter())),
        lambda: files().threadpool_map(lambda number: list(rows(number)), max_workers=2),
        lambda: Reader(files()),
        lambda: ByHand().flatmap(rows),
        lambda: IterableWrapper(IterableWrapper(range(3)).flatmap(rows).map(int)).sharding_filter(),
        lambda: SequenceWrapper(range(3)).map(lambda number: list(rows(number))),
        Files,
        OwnFiles,
    ],
    ids=["flatmap", "map", "threads", "stage", "by hand", "wrapped", "map pipe", "data set", "iterable data set"],
)
def test_a_pipe_inside_an_element_is_read_whole(make: Callable[[], Any]) -> None:
    loader = DataLoader(make(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    found = [number for each in loader for number in (each if isinstance(each, list) else [each])]
    assert sorted(map(int, found)) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
