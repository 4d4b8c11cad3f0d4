"""Stages over Parquet files: `.list_parquet_row_groups`, `.load_parquet`, `.load_parquet_as_df`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, ClassVar, Literal, NamedTuple

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.errors import DataError
from pipes.formats.parquet import ParquetReader, need_pyarrow
from pipes.formats.records import RecordsRun
from pipes.sources.listing import Identity, RootsRun
from pipes.sources.s3_options import S3Options
from pipes.sources.seeking import SeekableOpener, seekable
from pipes.stages.wrapping import as_pipe
from pipes.state import Position
from pipes.utils import StreamWrapper, validate_pathname_binary_tuple

__all__ = ["ParquetDataFrameLoader", "ParquetLoader", "ParquetRowGroupLister", "RowGroup"]


class RowGroup(NamedTuple):
    """A row group of a Parquet file: its file's name, its number from 0 on, and how many rows it has."""

    name: str
    group: int
    rows: int


class _ParquetRun(RecordsRun):
    fields: ClassVar[tuple[str, ...]] = ("group", "row")

    def restore(self, position: Position) -> None:
        self.reads_parts = self.pipe.form == "rows"
        super().restore(position)

    def opened_element(self, element: Any) -> tuple[str, Any]:
        self.unit: RowGroup | None = None
        if isinstance(element, tuple) and len(element) == 3:
            self.unit = RowGroup(*element)
            element = self.unit.name
        if isinstance(element, str | os.PathLike):
            path = os.fspath(element)
            return path, StreamWrapper(self.pipe._opener(element), name=path)
        validate_pathname_binary_tuple(element)
        return element[0], element[1]

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        pipe, unit = self.pipe, self.unit
        file = seekable(stream, path)
        self.reader = ParquetReader(
            file,
            path,
            columns=pipe.columns,
            batch_size=None if pipe.form == "tables" else pipe.batch_size,
            group=at.get("group"),
            row=at.get("row", 0),
            only=None if unit is None else unit.group,
            use_threads=pipe.use_threads,
            dictionaries=pipe.dictionaries,
        )
        if unit is not None:
            self.reader.expect(unit.group, unit.rows)
        self.rows: Any = iter(())
        return self._named(path, _SHAPES[pipe.form](self, path))

    def _named(self, path: str, outputs: Iterator[Any]) -> Iterator[Any]:
        if not self.pipe.return_path:
            return outputs
        if self.reads_parts:
            return (zip(repeat(path), part) for part in outputs)
        return ((path, output) for output in outputs)

    def by_row(self, path: str) -> Iterator[Iterator[Any]]:
        for batch in self.reader:
            _refuse_twins(batch.schema, path)
            self.rows = iter(_python(batch.to_pylist, path))
            yield self.rows

    def end_part(self) -> None:
        deque(self.rows, maxlen=0)

    def by_columns(self, path: str) -> Iterator[Any]:
        for batch in self.reader:
            _refuse_twins(batch.schema, path)
            yield {
                name: _values(column, f"{path}: column {name!r}")
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }

    def by_batch(self, path: str) -> Iterator[Any]:
        return iter(self.reader)

    def by_table(self, path: str) -> Iterator[Any]:
        from pyarrow import Table

        batches: list[Any] = []
        rows = 0
        for batch in self.reader:
            batches.append(batch)
            rows += batch.num_rows
            del batch  # or it would stay in memory beside the next row group
            if rows == self.reader.rows_of(self.reader.group):
                table = Table.from_batches(batches)
                batches, rows = [], 0
                yield table
                del table

    def where(self) -> tuple[Any, ...]:
        reader = self.reader
        return reader.group, reader.row - self.rows.__length_hint__() if self.pipe.form == "rows" else reader.row


_SHAPES: dict[str, Callable[[_ParquetRun, str], Iterator[Any]]] = {
    "rows": _ParquetRun.by_row,
    "columns": _ParquetRun.by_columns,
    "batches": _ParquetRun.by_batch,
    "tables": _ParquetRun.by_table,
}


def _refuse_twins(schema: Any, path: str) -> None:
    names = schema.names
    if len(set(names)) < len(names):
        twins = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"{path}: several columns are called {twins}, which dicts cannot hold; use form='batches'")


def _python(convert: Callable[[], list[Any]], what: str) -> list[Any]:
    try:
        return convert()
    except (ValueError, OverflowError) as error:
        # Python's datetime has no nanoseconds, and years from 1 to 9999 only.
        raise DataError(f"{what}: a value has no Python form ({error}); use form='batches'") from error


def _values(column: Any, what: str) -> Any:
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_timestamp(kind)
    if plain and not column.null_count:
        # A copy where Arrow's own memory is read-only: torch wants arrays that may be written.
        return column.to_numpy(zero_copy_only=False).copy()
    return _python(column.to_pylist, what)


@functional_datapipe("load_parquet")
class ParquetLoader(IterDataPipe[Any]):
    """Give the rows of Parquet files, one row group after the other, as dicts, columns, Arrow batches or tables.

    Args:
        datapipe: gives names (local paths, `s3://`, fsspec's URLs), the units of `list_parquet_row_groups`, or
            `(path, stream)`. A stream that cannot seek is copied to a temporary file first; S3's are read by ranges.
        form: "rows" gives dicts of Python values; "columns" dicts of numpy arrays (numbers, booleans, timestamps; a
            column with nulls, of texts or nested is a list of Python values); "batches" pyarrow.RecordBatch;
            "tables" a pyarrow.Table for each row group.
        columns: the names to read, "a.b" for a field of a struct, in the order wanted; None is all. The rest is
            neither read nor decoded.
        dictionaries: names of columns of texts (or bytes) that "batches" and "tables" hold as Arrow dictionaries: for
            categories, less to decode, filter and hash. DataError, while iterating, for other columns.
        batch_size: rows of a batch, or decoded at a time, never over 2**20; the last of a row group may be fewer.
        return_path: give `(path, output)`.
        endpoint_url, options: of the S3 store, see `S3Options`.
        storage_options: keyword arguments of fsspec's file system, for other URLs.
        on_error, max_errors: "skip" leaves out the rest of bad files (or units), up to so many; see the page on errors.

    About one row group in compressed form and a batch are in memory. The position is (row group, row): a resume reads
    the footer and goes on at that row group, and is refused when the object is another by then.

    Raises ModuleNotFoundError without pyarrow, ValueError for an unknown form or a batch size below 1; while iterating,
    TruncatedError for an empty or cut file, DataError for a damaged one or a column that it lacks.

    >>> import io, pyarrow, pyarrow.parquet
    >>> from pipes.iter import IterableWrapper
    >>> file = io.BytesIO()
    >>> pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["a", None]}), file)
    >>> list(IterableWrapper([("a.parquet", file)]).load_parquet())
    [{'id': 1, 'text': 'a'}, {'id': 2, 'text': None}]
    >>> list(IterableWrapper([("a.parquet", file)]).load_parquet("columns", columns=["id"]))
    [{'id': array([1, 2])}]
    """

    run_class = _ParquetRun
    use_threads = False

    def __init__(
        self,
        datapipe: Any,
        form: Literal["rows", "columns", "batches", "tables"] = "rows",
        *,
        columns: Sequence[str] | None = None,
        batch_size: int = 1024,
        dictionaries: Sequence[str] | None = None,
        return_path: bool = False,
        endpoint_url: str | None = None,
        options: S3Options | None = None,
        storage_options: dict[str, Any] | None = None,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        need_pyarrow()
        check_policy(on_error, max_errors)
        if form not in _SHAPES:
            raise ValueError(f"form={form!r} is none of {', '.join(map(repr, _SHAPES))}")
        batch_size = whole("batch_size", batch_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a number of rows, at least 1, is needed")
        self.datapipe = as_pipe(datapipe)
        self.form = form
        self.columns = _names(columns)
        self.batch_size = batch_size
        self.dictionaries = _names(dictionaries, "dictionaries")
        self.return_path = return_path
        self.endpoint_url = endpoint_url
        self.options = options
        self.storage_options = storage_options
        self.on_error = on_error
        self.max_errors = max_errors
        self._opener = SeekableOpener(endpoint_url, options, storage_options)


@functional_datapipe("load_parquet_as_df")
class ParquetDataFrameLoader(IterDataPipe[Any]):
    """Give a pyarrow.Table for each row group; torchdata's name, whose torcharrow frames no longer exist.

    `table.to_pandas()` makes a pandas frame of it; `load_parquet` has more forms and settings. `use_threads` decodes
    columns side by side. `dtype` and `device` were torcharrow's: other values than the defaults raise ValueError.

    >>> import io, pyarrow, pyarrow.parquet
    >>> from pipes.iter import IterableWrapper
    >>> file = io.BytesIO()
    >>> pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3]}), file, row_group_size=2)
    >>> [table.num_rows for table in IterableWrapper([("a.parquet", file)]).load_parquet_as_df()]
    [2, 1]
    """

    run_class = _ParquetRun
    form = "tables"
    return_path = False
    batch_size = None
    dictionaries = None

    def __init__(
        self,
        source_dp: Any,
        dtype: None = None,
        columns: Sequence[str] | None = None,
        device: str = "",
        use_threads: bool = False,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        need_pyarrow()
        check_policy(on_error, max_errors)
        if dtype is not None or device not in ("", "cpu"):
            raise ValueError(
                f"dtype={dtype!r}, device={device!r}: torcharrow's settings have no meaning for tables of pyarrow; "
                "cast with map, move batches with DataLoader2(device=...)"
            )
        self.source_dp = as_pipe(source_dp)
        self.dtype = dtype
        self.columns = _names(columns)
        self.device = device
        self.use_threads = use_threads
        self.on_error = on_error
        self.max_errors = max_errors
        self._opener = SeekableOpener()


@functional_datapipe("list_parquet_row_groups")
class ParquetRowGroupLister(IterDataPipe[RowGroup]):
    """Give the row groups of each Parquet file as units `(name, row group, rows)`, for `load_parquet`.

    Put it before `sharding_filter`, so that streams share the row groups of few or large files; only the footers are
    read, once for each stream. Arguments after `datapipe` are those of `load_parquet`. A resume reads the footer of the
    file it stands in again and is refused, with ChangedDataError, when its row groups differ.

    Raises as `load_parquet`; TypeError, while iterating, for elements that are no names.

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(pyarrow.table({"id": range(5)}), f"{folder}/a.parquet", row_group_size=3)
    ...     groups = ParquetRowGroupLister([f"{folder}/a.parquet"])
    ...     [tuple(unit)[1:] for unit in groups], list(groups.sharding_filter().load_parquet("columns"))
    ([(0, 3), (1, 2)], [{'id': array([0, 1, 2])}, {'id': array([3, 4])}])
    """

    run_class = RootsRun

    def __init__(
        self,
        datapipe: Any,
        *,
        endpoint_url: str | None = None,
        options: S3Options | None = None,
        storage_options: dict[str, Any] | None = None,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        need_pyarrow()
        check_policy(on_error, max_errors)
        self.datapipe = as_pipe(datapipe)
        self.endpoint_url = endpoint_url
        self.options = options
        self.storage_options = storage_options
        self.on_error = on_error
        self.max_errors = max_errors
        self._opener = SeekableOpener(endpoint_url, options, storage_options)

    def names(self, root: Any) -> Iterator[RowGroup]:
        """The units of one file."""
        if not isinstance(root, str | os.PathLike):
            raise TypeError(f"names of Parquet files are needed, not {type(root).__name__}: {root!r:.80}")
        with self._opener(root) as file:
            reader = ParquetReader(file, os.fspath(root))
            rows = [reader.rows_of(group) for group in range(reader.groups)]
        name = root if isinstance(root, str) else os.fspath(root)
        return (RowGroup(name, group, count) for group, count in enumerate(rows))

    def identity(self, unit: RowGroup) -> Identity:
        """What must not change about a unit while a saved state refers to it."""
        return "\0".join(map(str, unit)), ""


def _names(names: Sequence[str] | None, what: str = "columns") -> list[str] | None:
    if isinstance(names, str):
        raise ValueError(f"{what}={names!r}: a list of names is needed; did you mean [{names!r}]?")
    return None if names is None else list(names)
