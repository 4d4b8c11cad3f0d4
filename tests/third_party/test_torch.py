"""torch's DataLoader takes a pipe as it is."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pipes import IterDataPipe
from pipes.iter import IterableWrapper

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
