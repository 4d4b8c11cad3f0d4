"""A function of several elements at a time: `.map_batches`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.stages.batching import Batcher
from pipes.stages.columns import check_columns
from pipes.stages.flattening import ExpandingRun

__all__ = ["BatchMapper"]

R = TypeVar("R")


class _BatchMapperRun(ExpandingRun):
    def expand(self, element: Any) -> Iterator[Any]:
        columns = self.pipe.input_col
        if isinstance(columns, list | tuple):
            element = [[row[column] for column in columns] for row in element]
        elif columns is not None:
            element = [row[columns] for row in element]
        return iter(self.pipe.fn(element))


@functional_datapipe("map_batches")
class BatchMapper(IterDataPipe[R]):
    """Give every item of `fn([x, y, ...])` for each `batch_size` elements, the last of which may be fewer.

    With `input_col` they are that column of each element; several columns are a list for each. `fn` may give more items
    than it got, or fewer. With `on_error="skip"`, the rest of a batch for which it raises is left out, up to
    `max_errors` such batches. Raises AssertionError for a batch_size below 1, else what `.flatmap` does.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(5)).map_batches(lambda batch: [x / max(batch) for x in batch], 3))
    [0.0, 0.5, 1.0, 0.75, 1.0]
    """

    run_class = _BatchMapperRun
    _calls = ("fn",)
    _made_above = True

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        fn: Callable[[list[Any]], Iterable[R]],
        batch_size: int,
        input_col: Any = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_columns(fn, None)
        check_policy(on_error, max_errors)
        self.datapipe = Batcher[Any](datapipe, batch_size, wrapper_class=list)
        self.fn = fn
        self.batch_size = self.datapipe.batch_size
        self.input_col = input_col
        self.on_error = on_error
        self.max_errors = max_errors
