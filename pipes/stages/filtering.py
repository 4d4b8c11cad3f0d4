"""Elements that pass a test: `.filter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.run import Run
from pipes.stages.columns import check_columns, pick_columns
from pipes.stages.wrapping import as_pipe
from pipes.tallies import Tally

__all__ = ["Filter"]

T = TypeVar("T")


class _FilterRun(Run):
    """Holds nothing: where its input stands says all."""

    def elements(self) -> Iterator[Any]:
        return self._strict() if self.tolerant is None else self._going_on(self.tolerant)

    def _strict(self) -> Iterator[Any]:
        test = pick_columns(self.pipe.filter_fn, self.pipe.input_col)
        for element in self.inputs[0]:
            try:
                verdict = test(element)
                if verdict is not True and verdict is not False and not isinstance(verdict, np.bool_):
                    raise self._no_bool(verdict)
            except BaseException as error:
                self.note(error, element)
                raise
            if verdict:
                yield element

    def _going_on(self, tally: Tally) -> Iterator[Any]:
        test = pick_columns(self.pipe.filter_fn, self.pipe.input_col)
        for element, _ in zip(self.inputs[0], tally.ticks, strict=False):
            try:
                verdict = test(element)
                if verdict is not True and verdict is not False and not isinstance(verdict, np.bool_):
                    raise self._no_bool(verdict)
            except BaseException as error:
                element = tally.handle(error, element)
                verdict = element is not None
            if verdict:
                yield element

    def _no_bool(self, verdict: Any) -> ValueError:
        return ValueError(
            f"a filter function answers with a bool, but {_name(self.pipe.filter_fn)} gave {type(verdict).__name__}; "
            "wrap it in bool(...)"
        )


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


@functional_datapipe("filter")
class Filter(IterDataPipe[T]):
    """Keep the elements for which `filter_fn` gives True; it must give a bool (Python's or NumPy's).

    With `on_error="skip"`, elements for which it raises are left out and counted, up to `max_errors`.
    Raises ValueError, while iterating, for an answer of another type.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(6)).filter(lambda x: x % 2 == 0))
    [0, 2, 4]
    """

    run_class = _FilterRun
    _calls = ("filter_fn",)

    def __init__(
        self,
        datapipe: IterDataPipe[T],
        filter_fn: Callable[..., Any],
        input_col: Any = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_columns(filter_fn, input_col)
        check_policy(on_error, max_errors)
        self.datapipe = as_pipe(datapipe)
        self.filter_fn = filter_fn
        self.input_col = input_col
        self.on_error = on_error
        self.max_errors = max_errors
