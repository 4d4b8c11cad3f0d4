"""One pipe of rows into one pipe a column: `.unzip`, of iterable pipes by a fork, and of map pipes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, ClassVar

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, MapDataPipe, functional_datapipe
from pipes.errors import GraphError
from pipes.stages.keyed import MapMapper
from pipes.stages.mapping import Mapper
from pipes.stages.splitting import Forker

__all__ = ["MapUnZipper", "UnZipper"]


def _kept(sequence_length: int, columns_to_skip: Sequence[int] | None) -> list[itemgetter[Any]]:
    """Return one function a column that is wanted, which takes it from a row."""
    sequence_length = whole("sequence_length", sequence_length)
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    left_out = {whole("a column of columns_to_skip", column) for column in columns_to_skip or ()}
    for column in left_out:
        if not -sequence_length <= column < sequence_length:
            raise ValueError(f"columns_to_skip has {column}, but rows have {sequence_length} columns")
    left_out = {column % sequence_length for column in left_out}
    columns = [column for column in range(sequence_length) if column not in left_out]
    if not columns:
        raise GraphError(f"columns_to_skip leaves none of the {sequence_length} columns")
    return [itemgetter(column) for column in columns]


@functional_datapipe("unzip")
class UnZipper(IterDataPipe[Any]):
    """Return a list of pipes, one a column of rows that have `sequence_length` of them, less `columns_to_skip`.

    They are children of a `.fork`, each with a `.map`: `buffer_size` is the fork's, which raises BufferError.
    Raises ValueError for a length below 1 or a column that is not there, GraphError when all columns are skipped; while
    iterating, IndexError for a row that is too short.

    >>> from pipes.iter import IterableWrapper
    >>> names, sizes = IterableWrapper([("a", 1, 10), ("b", 2, 20)]).unzip(3, columns_to_skip=[1])
    >>> list(names), list(sizes)
    (['a', 'b'], [10, 20])
    """

    _chained_result: ClassVar[str] = "list[IterDataPipe[Any]]"

    def __new__(
        cls,
        source_datapipe: IterDataPipe[Any],
        sequence_length: int,
        buffer_size: int = 1000,
        columns_to_skip: Sequence[int] | None = None,
    ) -> Any:
        functions = _kept(sequence_length, columns_to_skip)
        buffer_size = whole("buffer_size", buffer_size)
        children: Any = Forker[Any](source_datapipe, len(functions), buffer_size)
        children = children if len(functions) > 1 else [children]
        return [Mapper[Any](child, function) for child, function in zip(children, functions, strict=True)]


@functional_datapipe("unzip")
class MapUnZipper(MapDataPipe[Any]):
    """Return a list of map pipes, one a column of rows that have `sequence_length` of them, less `columns_to_skip`.

    Raises ValueError for a length below 1 or a column that is not there, GraphError when all columns are skipped;
    IndexError when a row is read that is too short.

    >>> from pipes.map import SequenceWrapper
    >>> names, sizes = SequenceWrapper([("a", 1), ("b", 2)]).unzip(2)
    >>> names[1], sizes[1]
    ('b', 2)
    """

    _chained_result: ClassVar[str] = "list[MapDataPipe[Any]]"

    def __new__(
        cls, source_datapipe: MapDataPipe[Any], sequence_length: int, columns_to_skip: Sequence[int] | None = None
    ) -> Any:
        return [MapMapper[Any](source_datapipe, function) for function in _kept(sequence_length, columns_to_skip)]
