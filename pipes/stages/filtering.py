"""Elements that pass a test: `.filter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.run import Run
from pipes.stages.columns import check_columns, pick_columns
from pipes.stages.wrapping import as_pipe

__all__ = ["Filter"]

T = TypeVar("T")


class _FilterRun(Run):
    """Holds nothing: where its input stands says all."""

    def elements(self) -> Iterator[Any]:
        test = pick_columns(self.pipe.filter_fn, self.pipe.input_col)
        for element in self.inputs[0]:
            try:
                verdict = test(element)
                if verdict is not True and verdict is not False and not isinstance(verdict, np.bool_):
                    raise ValueError(
                        f"a filter function answers with a bool, but {_name(self.pipe.filter_fn)} gave "
                        f"{type(verdict).__name__}; wrap it in bool(...)"
                    )
            except BaseException as error:
                self.note(error, element)
                raise
            if verdict:
                yield element


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


@functional_datapipe("filter")
class Filter(IterDataPipe[T]):
    """Keep the elements for which `filter_fn` gives True; it must give a bool (Python's or NumPy's).

    Raises ValueError, while iterating, for an answer of another type.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(range(6)).filter(lambda x: x % 2 == 0))
    [0, 2, 4]
    """

    run_class = _FilterRun
    calls_user = True

    def __init__(self, datapipe: IterDataPipe[T], filter_fn: Callable[..., Any], input_col: Any = None) -> None:
        check_columns(filter_fn, input_col)
        self.datapipe = as_pipe(datapipe)
        self.filter_fn = filter_fn
        self.input_col = input_col
