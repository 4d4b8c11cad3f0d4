"""A list of samples into one batch: `.collate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import default_collate as torch_default_collate

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.stages.mapping import Mapper

__all__ = ["Collator", "default_collate"]

R = TypeVar("R")

_stack: Callable[[list[Any]], Any] = torch_default_collate


def default_collate(samples: list[Any]) -> Any:
    """Stack a list of samples as `torch.utils.data.default_collate` does: same values, types and shapes.

    In a worker process the stacked tensors are written straight into the shared memory that carries the batch.

    >>> default_collate([{"x": 1}, {"x": 2}])
    {'x': tensor([1, 2])}
    """
    return _stack(samples)


def stack_with(function: Callable[[list[Any]], Any]) -> None:
    """Let `default_collate` stack with `function` in this process, as a worker does."""
    global _stack
    _stack = function


@functional_datapipe("collate")
class Collator(Mapper[R]):
    """Turn each list of samples into one batch with `conversion` (or `collate_fn`), by default stacking tensors.

    Raises TypeError if the function is not callable; a dict of conversions, which torchdata took for data frames
    alone, is refused.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(3)).batch(2).collate())
    [tensor([0, 1]), tensor([2])]
    """

    _calls = ("conversion", "collate_fn")

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        conversion: Callable[[Any], R] | None = None,
        collate_fn: Callable[[Any], R] | None = None,
    ) -> None:
        if isinstance(conversion, dict):
            raise TypeError("a dict of conversions is for data frames, which are not supported: pass a function")
        super().__init__(datapipe, collate_fn or conversion or default_collate)
        self.conversion = conversion
        self.collate_fn = collate_fn
