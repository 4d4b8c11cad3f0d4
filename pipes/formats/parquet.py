"""Record batches out of a Parquet file, one row group at a time.

Source: https://parquet.apache.org/docs/file-format, decoded by pyarrow. Only the footer and the selected columns of the
row groups that are wanted are read. At most one row group is in memory in its compressed form, beside the batch that is
being decoded; for files that are not local, the columns of a row group are fetched together.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from pipes.errors import ChangedDataError, DataError, PipesError, StateError, TruncatedError
from pipes.formats.chunks import read_up_to

__all__ = ["ParquetReader", "need_pyarrow"]

# Two columns with a smaller gap between them are one range: a request costs more than reading over it.
_GAP = 256 << 10
# pyarrow makes room for a batch's rows before it reads them, and the footer may say any number.
_MOST_ROWS = 1 << 20
_MAGIC = b"PAR1"


def need_pyarrow() -> None:
    """Raise ModuleNotFoundError, with what to install, without pyarrow."""
    try:
        import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('Parquet needs pyarrow: pip install "pipes[arrow]"', name="pyarrow") from error


class ParquetReader:
    """The record batches of one Parquet file.

    >>> import io, pyarrow, pyarrow.parquet
    >>> stream = io.BytesIO()
    >>> table = pyarrow.table({"id": [1, 2, 3], "text": ["a", "b", None]})
    >>> pyarrow.parquet.write_table(table, stream, row_group_size=2)
    >>> reader = ParquetReader(stream, "a.parquet", columns=["text"])
    >>> for batch in reader:
    ...     print(batch.to_pydict(), reader.group, reader.row)
    {'text': ['a', 'b']} 0 2
    {'text': [None]} 1 1

    Args:
        stream: a binary file that seeks.
        name: what errors call it.
        columns: names to read, a nested one as "a.b" or its parent; None reads all. They come in the order asked for.
        batch_size: rows of a batch at most; a batch never reaches over a row group's end. None: whole row groups, those
            of more than 2**20 rows in several batches.
        group, row: where to begin; by default at the first row that is to be read.
        only: the one row group to read.
        use_threads: decode columns side by side.
        dictionaries: names of columns of texts or bytes to give as Arrow dictionaries, as they mostly are in the file.

    Attributes:
        groups: how many row groups the file has.
        group, row: where the reader stands: row number `row` of row group `group` comes next.

    Raises:
        TruncatedError: the file is empty or cut. DataError: it is no Parquet file, damaged, or lacks a column. Both
            name it, and the row group where it is inside one.
        StateError: it has no such row group or row.
        ModuleNotFoundError: pyarrow is not installed.
    """

    def __init__(
        self,
        stream: Any,
        name: str,
        *,
        columns: Sequence[str] | None = None,
        batch_size: int | None = 1024,
        group: int | None = None,
        row: int = 0,
        only: int | None = None,
        use_threads: bool = False,
        dictionaries: Sequence[str] | None = None,
    ) -> None:
        need_pyarrow()
        self.name = name
        self.group, self.row = (only or 0) if group is None else group, row
        self._columns = None if columns is None else list(columns)
        self._batch_size = batch_size
        self._use_threads = use_threads
        self._dictionaries = list(dictionaries or ())
        self._coded: list[int] | None = None
        self._file = _Gathered(stream)
        self._parquet = self._opened()
        self._check_dictionaries()
        self._metadata = self._parquet.metadata
        self.groups: int = self._metadata.num_row_groups
        if self.group > self.groups or (only is not None and only >= self.groups):
            raise StateError(
                f"{name}: row group {self.group} is wanted, and there are {self.groups}; the data changed: list the "
                "row groups again, or start the epoch afresh"
            )
        self._end = self.groups if only is None else only + 1
        self._check_rows()
        self._check_columns()

    @property
    def schema(self) -> Any:
        """The file's pyarrow schema."""
        return self._parquet.schema_arrow

    def rows_of(self, group: int) -> int:
        """How many rows a row group has, by the footer."""
        rows = int(self._metadata.row_group(group).num_rows)
        if rows < 0:
            raise DataError(f"{self.name}: damaged footer: row group {group} of {self.groups} has {rows} rows")
        return rows

    def expect(self, group: int, rows: int) -> None:
        """Raise ChangedDataError unless row group `group` has `rows` rows."""
        if self.rows_of(group) != rows:
            raise ChangedDataError(
                f"{self.name}: row group {group} was listed with {rows} rows and has {self.rows_of(group)} now; "
                "list it again"
            )

    def __iter__(self) -> Iterator[Any]:
        while self.group < self._end:
            group, rows = self.group, self.rows_of(self.group)
            if self.row > rows:
                raise StateError(
                    f"{self.name}: the state stands at row {self.row} of row group {group}, which has {rows}; the data "
                    "changed: start the epoch afresh"
                )
            if self.row < rows:
                yield from self._batches(group, rows)
            self.group, self.row = group + 1, 0

    def _batches(self, group: int, rows: int) -> Iterator[Any]:
        start, at = self.row, 0
        try:
            if not self._file.direct:
                self._file.gather(self._ranges(group))
            for batch in self._decoded(group, min(self._batch_size or rows, rows, _MOST_ROWS), self._use_threads):
                at += batch.num_rows
                if at <= start:
                    continue
                if at - batch.num_rows < start:
                    batch = batch.slice(start - (at - batch.num_rows))
                self._check_codes(batch)
                self.row = at
                yield batch
        except Exception as error:
            raise self._told(error, f"row group {group} of {self.groups} is damaged")  # noqa: B904 - it has its cause
        finally:
            self._file.gather([])
        if at != rows:
            raise DataError(f"{self.name}: row group {group} has {at} rows, and the footer says {rows}")

    def _check_codes(self, batch: Any) -> None:
        """Refuse codes that are in no dictionary: pyarrow gives a dictionary's column without a look at them."""
        if self._coded is None:
            self._coded = [number for number, field in enumerate(batch.schema) if "dictionary<" in str(field.type)]
        for number in self._coded:
            batch.column(number).validate(full=True)

    def _decoded(self, group: int, rows: int, use_threads: bool) -> Iterator[Any]:
        batches: Iterator[Any] = self._parquet.iter_batches(
            rows, row_groups=[group], columns=self._columns, use_threads=use_threads
        )
        return batches

    def _ranges(self, group: int) -> list[tuple[int, int]]:
        """The byte ranges of the selected columns of a row group, those close together as one.

        They are what pyarrow asks for: it reads all columns before it decodes any. Its `metadata` has them too, but
        ends the process when the footer says nonsense about a column.
        """
        ranges: list[tuple[int, int]] = []
        for start, stop in sorted(self._file.asked(lambda: next(self._decoded(group, 1, False)))):
            if ranges and start - ranges[-1][1] <= _GAP:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            else:
                ranges.append((start, stop))
        return ranges

    def _opened(self) -> Any:
        from pyarrow.parquet import ParquetFile

        size = 0
        try:
            size = self._file.seek(0, io.SEEK_END)
            if not size:
                raise TruncatedError(f"{self.name}: empty file, expected Parquet")
            return ParquetFile(
                self._file, pre_buffer=False, page_checksum_verification=True, read_dictionary=self._dictionaries
            )
        except KeyError as error:
            raise DataError(
                f"{self.name}: one of {self._dictionaries} is no column that can be a dictionary"
            ) from error
        except Exception as error:
            told = self._told(error, "no Parquet file, or damaged")
            if type(told) is DataError and self._begins_well(size):
                where = f"{self.name}: cut at byte {size}, before its footer's end"
                raise TruncatedError(f"{where}; fetch or write it again") from error
            raise told  # noqa: B904 - it has its cause

    def _check_dictionaries(self) -> None:
        """Refuse columns that pyarrow reads as they are, without a word."""
        types = {field.name: field.type for field in self.schema}
        for name in self._dictionaries:
            if not hasattr(types[name], "value_type") or not hasattr(types[name], "index_type"):
                raise DataError(
                    f"{self.name}: column {name!r} is {types[name]}, and only texts and bytes are dictionaries"
                )

    def _begins_well(self, size: int) -> bool:
        self._file.seek(0)
        head = bytes(self._file.read(4))
        self._file.seek(max(size - 4, 0))
        return head == _MAGIC and (size < 12 or bytes(self._file.read(4)) != _MAGIC)

    def _told(self, error: Exception, what: str) -> Exception:
        """The public error for one of pyarrow's; those of the file below come through it as they were."""
        from pyarrow import ArrowException

        foreign = isinstance(error, UnicodeDecodeError) or (isinstance(error, OSError) and error.errno is None)
        if isinstance(error, PipesError | MemoryError) or not (foreign or isinstance(error, ArrowException)):
            return error
        told = DataError(f"{self.name}: {what}: {str(error).rstrip('.')}")
        told.__cause__ = error
        return told

    def _check_rows(self) -> None:
        """Refuse a footer that has lost row groups, or rows of them."""
        rows = sum(self.rows_of(group) for group in range(self.groups))
        if rows != self._metadata.num_rows:
            raise DataError(
                f"{self.name}: damaged footer: the file has {self._metadata.num_rows} rows, and its {self.groups} row "
                f"groups {rows}"
            )

    def _check_columns(self) -> None:
        """Refuse names that are not there; pyarrow passes over them without a word."""
        schema = self._parquet.schema
        paths = [schema.column(number).path for number in range(len(schema))]
        missing = [
            name
            for name in self._columns or ()
            if not any(path == name or path.startswith(f"{name}.") for path in paths)
        ]
        if missing:
            there = ", ".join(self.schema.names[:20])
            raise DataError(f"{self.name}: no column {', '.join(map(repr, missing))}; it has {there}")


class _Gathered(io.RawIOBase):
    """What pyarrow reads from: the file, or the ranges of it that were fetched together before."""

    def __init__(self, file: Any) -> None:
        self._inner = file
        # On a local file, one read for each column is as good, and holds less.
        self.direct = _is_local(file)
        self._held: list[tuple[int, bytes]] = []
        self._asked: list[tuple[int, int]] | None = None
        self._zeros = memoryview(b"")
        self._at = 0

    def asked(self, read: Callable[[], object]) -> list[tuple[int, int]]:
        """The ranges that `read` asks for until it fails, for it gets zeros; the file is not touched."""
        asked: list[tuple[int, int]] = []
        self._asked = asked
        try:
            with suppress(Exception):
                read()
        finally:
            self._asked, self._zeros = None, memoryview(b"")
        return asked

    def gather(self, ranges: list[tuple[int, int]]) -> None:
        """Let go of what was fetched and fetch these."""
        self._held = []
        for start, stop in ranges:
            self._inner.seek(start)
            self._held.append((start, read_up_to(self._inner.read, stop - start)))

    def read(self, size: int = -1, /) -> Any:
        if size is None or size < 0:
            size = self.seek(0, io.SEEK_END) - self._at
        at = self._at
        if self._asked is None:
            data = self._part(at, size)
        else:
            self._asked.append((at, at + size))
            data = self._blank(size)
        self._at += len(data)
        return data

    def _part(self, at: int, size: int) -> bytes | memoryview:
        for start, held in self._held:
            if start <= at and at + size <= start + len(held):
                return memoryview(held)[at - start : at - start + size]
        self._inner.seek(at)
        return read_up_to(self._inner.read, size)

    def _blank(self, size: int) -> memoryview:
        # Pages that are never written to take no memory.
        if size > len(self._zeros):
            self._zeros = memoryview(bytes(size))
        return self._zeros[:size]

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            self._at = self._inner.seek(offset, whence)
        else:
            self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _is_local(file: Any) -> bool:
    try:
        file.fileno()
    except (AttributeError, OSError, ValueError):
        return isinstance(file, io.BytesIO)
    return True
