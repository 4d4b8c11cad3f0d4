"""What the loader's tests share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipes import IterDataPipe
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService


def loader_of(
    pipe: Any, workers: int = 0, streams: int | None = None, *, seed: int = 3, sharding: str = "auto", **options: Any
) -> DataLoader2[Any]:
    """Return a seeded loader of `pipe` on `workers` processes."""
    service = MultiProcessingReadingService(workers, **options)
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=service, num_streams=streams, sharding=sharding)
    loader.seed(seed)
    return loader


def with_draws(element: Any) -> tuple[Any, float, float, float]:
    """Return the element with one draw from each global generator."""
    return element, random.random(), float(np.random.rand()), torch.rand(1).item()


def global_state() -> tuple[Any, ...]:
    """Return the state of the global generators in a form that `==` compares."""
    numpy = np.random.get_state(legacy=False)
    return random.getstate(), str(numpy["state"]), torch.default_generator.get_state().tolist()


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


def take(iterator: Any, count: int) -> list[Any]:
    return [next(iterator) for _ in range(count)]


def logged_calls(folder: Path) -> Callable[[int], int]:
    """Return a function that notes each call of it."""

    def call(element: int) -> int:
        with (folder / "calls").open("ab") as file:
            file.write(b".")
        return element

    return call


N = 50


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def source() -> IterDataPipe[int]:
    return IterableWrapper(range(N))


GRAPHS: dict[str, Callable[[], IterDataPipe[Any]]] = {
    "elements": lambda: source().sharding_filter(),
    "shuffled names": lambda: source().shuffle(7).sharding_filter().map(with_draws),
    "shuffled data": lambda: source().sharding_filter().shuffle(5).map(with_draws).batch(3),
    "both": lambda: source().shuffle(7).sharding_filter().shuffle(4).map(with_draws).batch(4, drop_last=True),
    "collated": lambda: source().sharding_filter().map(with_draws).batch(3).collate(),
    "exact batches": lambda: source().shuffle(9).batch(4).sharding_filter().map(with_draws),
    "filtered": lambda: source().sharding_filter().map(with_draws).filter(lambda x: x[0] % 3 > 0).batch(2),
    "expanded": lambda: source().sharding_filter().flatmap(lambda x: [x] * (x % 3)).shuffle(5),
    "keyed": lambda: source().sharding_filter().map(lambda x, rng: (x, rng.random()), rng=True).shuffle(6).batch(3),
    "joined": lambda: source().zip(IterableWrapper(range(100, 100 + N))).shuffle(5).sharding_filter().batch(3),
}


def two_epochs(loader: DataLoader2[Any]) -> list[Any]:
    return [plain(list(loader)), plain(list(loader))]
