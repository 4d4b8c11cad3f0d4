"""Rows with fewer or flatter columns, and columns of rows: `.slice`, `.drop`, `.flatten`, `.rows2columnar`.

A row is a list, a tuple or a dict; its result is a list, a tuple, or a dict of the same class. The rows of the input
stay as they are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pipes.arguments import whole_or_none
from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.errors import brief
from pipes.stages.mapping import AppliedPipe

__all__ = ["Dropper", "Flattener", "Rows2Columnar", "Slicer"]


def _listed(columns: Any) -> tuple[Any, ...]:
    return tuple(columns) if isinstance(columns, list | tuple) else (columns,)


def _places(row: Sequence[Any], columns: tuple[Any, ...]) -> set[int]:
    """Return the places of `columns` in a list or tuple, negative ones counted from its end."""
    size = len(row)
    places = [operator.index(column) for column in columns]
    missing = [place for place in places if not -size <= place < size]
    if missing:
        raise IndexError(f"there is no column {missing[0]} in a row of {size}")
    return {place % size for place in places}


def _like(row: Any, columns: Iterable[Any]) -> Any:
    return tuple(columns) if isinstance(row, tuple) else list(columns)


def _without(row: Any, columns: tuple[Any, ...]) -> Any:
    """Return a row less `columns`, which it must have: KeyError, IndexError; TypeError for what is no row."""
    if isinstance(row, dict):
        rest = copy.copy(row)
        for column in dict.fromkeys(columns):
            rest.pop(column)
        return rest
    _check_row(row)
    places = _places(row, columns)
    return _like(row, (value for place, value in enumerate(row) if place not in places))


def _check_row(row: Any) -> None:
    if not isinstance(row, list | tuple):
        raise TypeError(f"a row is a list, a tuple or a dict, not the {type(row).__name__} {brief(row)}")


@functional_datapipe("drop")
class Dropper(AppliedPipe[Any]):
    """Give each row less the columns `indices`: keys, or places in a list or tuple; one, or a list of them.

    With `on_error="skip"`, rows that lack one of them are left out, up to `max_errors`; see the page on errors.
    Raises, while iterating, KeyError or IndexError for such a row, TypeError for what is no row.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([(1, 2, 3), (4, 5, 6)]).drop([0, -1]))
    [(2,), (5,)]
    >>> list(IterableWrapper([{"x": 1, "y": 2}]).drop("y"))
    [{'x': 1}]
    """

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        indices: Any,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        super().__init__(datapipe, on_error, max_errors)
        self.indices = indices

    def function(self) -> Callable[[Any], Any]:
        """Return the function of one row."""
        columns = _listed(self.indices)
        return lambda row: _without(row, columns)


@functional_datapipe("slice")
class Slicer(AppliedPipe[Any]):
    """Give the columns `index` to `stop` of each row, every `step`-th, as Python slices; or a list of columns.

    A dict has the columns that are named, one key or a list of them. Columns keep the order that they have in the row.
    With `on_error="skip"`, rows that lack one of the columns are left out, up to `max_errors`.
    Raises ValueError for a list, or a key, together with `stop` or `step`; while iterating, KeyError or IndexError for
    a row without a column of the list, TypeError for what is no row.

    >>> from pipes.iter import IterableWrapper
    >>> rows = IterableWrapper([(1, 2, 3), (4, 5, 6)])
    >>> list(rows.slice(1)), list(rows.slice(0, 2)), list(rows.slice([0, 2]))
    ([(2, 3), (5, 6)], [(1, 2), (4, 5)], [(1, 3), (4, 6)])
    >>> list(IterableWrapper([{"x": 1, "y": 2, "z": 3}]).slice(["z", "x"]))
    [{'x': 1, 'z': 3}]
    """

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        index: Any,
        stop: int | None = None,
        step: int | None = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        stop, step = whole_or_none("stop", stop), whole_or_none("step", step)
        if isinstance(index, list | tuple | str) and (stop, step) != (None, None):
            raise ValueError(f"the columns {brief(index)} say all: leave out stop and step, or give the first column")
        if step == 0:
            raise ValueError("step must not be 0")
        super().__init__(datapipe, on_error, max_errors)
        self.index = index
        self.stop = stop
        self.step = step

    def function(self) -> Callable[[Any], Any]:
        """Return the function of one row."""
        columns, listed = _listed(self.index), isinstance(self.index, list | tuple)
        window = slice(self.index, self.stop, self.step)

        def sliced(row: Any) -> Any:
            if isinstance(row, dict):
                if (self.stop, self.step) != (None, None):
                    raise TypeError("a dict has no places to slice by: give .slice() its key, or a list of keys")
                return _without(row, tuple(_without(row, columns)))
            _check_row(row)
            if listed:
                return _like(row, (row[place] for place in sorted(_places(row, columns))))
            return _like(row, row[window])

        return sliced


@functional_datapipe("flatten")
class Flattener(AppliedPipe[Any]):
    """Put the items of nested columns into the row itself, one level deep: lists and tuples, in a dict other dicts.

    `indices` names the columns, one or a list of them; by default all. A column that is not nested stays as it is, and
    so does text. With `on_error="skip"`, rows that fail are left out, up to `max_errors`.
    Raises, while iterating, KeyError or IndexError for a row without such a column, ValueError where two columns of a
    dict would have one key, TypeError for what is no row.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([(0, 10, (100, 1000))]).flatten(2)), list(IterableWrapper([[[1, 2], (3, [4])]]).flatten())
    ([(0, 10, 100, 1000)], [[1, 2, 3, [4]]])
    >>> list(IterableWrapper([{"x": 1, "box": {"w": 2, "h": 3}}]).flatten("box"))
    [{'x': 1, 'w': 2, 'h': 3}]
    """

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        indices: Any = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        super().__init__(datapipe, on_error, max_errors)
        self.indices = indices

    def function(self) -> Callable[[Any], Any]:
        """Return the function of one row."""
        columns = () if self.indices is None else _listed(self.indices)

        def flattened(row: Any) -> Any:
            if isinstance(row, dict):
                return _flat_dict(row, _without(row, columns) if columns else ())
            _check_row(row)
            return _like(row, _flat(row, _places(row, columns) if columns else range(len(row))))

        return flattened


def _flat(row: Sequence[Any], places: Any) -> Iterator[Any]:
    for place, value in enumerate(row):
        if place in places and isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _flat_dict(row: dict[Any, Any], kept: Any) -> dict[Any, Any]:
    flat = copy.copy(row)
    flat.clear()
    for key, value in row.items():
        items = value if isinstance(value, dict) and key not in kept else {key: value}
        for name, item in items.items():
            if name in flat:
                raise ValueError(f"two columns would have the key {brief(name)}: rename one with .map(), or .drop() it")
            flat[name] = item
    return flat


@functional_datapipe("rows2columnar")
class Rows2Columnar(AppliedPipe[dict[Any, list[Any]]]):
    """Turn each batch of rows into a dict of columns: by name, the list of its values, one a row.

    `column_names` names the columns of rows that are lists or tuples, or chooses some of those of dicts; without it
    all rows of a batch are dicts with the same keys. With `on_error="skip"`, batches that fail are left out.
    Raises TypeError for names that are no list, ValueError for one that comes twice; while iterating, KeyError for a
    row without a column, ValueError for more or fewer columns than there are names, TypeError for what is no row.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([{"a": 1, "b": 2}, {"a": 3, "b": 4}]).batch(2).rows2columnar())
    [{'a': [1, 3], 'b': [2, 4]}]
    >>> list(IterableWrapper([(1, 2), (3, 4)]).batch(2).rows2columnar(["a", "b"]))
    [{'a': [1, 3], 'b': [2, 4]}]
    """

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        column_names: Sequence[Any] | None = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        if column_names is not None and not isinstance(column_names, list | tuple):
            raise TypeError(f"column_names is a list of names, not the {type(column_names).__name__} {column_names!r}")
        names = list(column_names or ())
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"column_names has {twice[0]!r} twice")
        super().__init__(source_datapipe, on_error, max_errors)
        self.column_names = column_names

    def function(self) -> Callable[[Any], Any]:
        """Return the function of one batch."""
        return self._columns

    def _columns(self, rows: Iterable[Any]) -> dict[Any, list[Any]]:
        chosen = tuple(self.column_names or ())
        names = chosen or None
        columns: dict[Any, list[Any]] = {name: [] for name in chosen}
        for row in rows:
            if isinstance(row, dict):
                if names is None:
                    names, columns = tuple(row), {name: [] for name in row}
                if not chosen and len(row) != len(names):
                    raise ValueError(
                        f"a row has the columns {brief(list(row))}, where others have {brief(list(names))}"
                    )
                values: Iterable[Any] = [row[name] for name in names]
            else:
                _check_row(row)
                if len(row) != len(chosen):
                    raise ValueError(f"a row has {len(row)} columns, but column_names names {len(chosen)}")
                values = row
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return columns
