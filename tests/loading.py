"""What the loader's tests share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
