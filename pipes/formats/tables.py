"""Stages over text that holds records: `.parse_csv`, `.parse_csv_as_dict`, `.parse_jsonl`, `.parse_json_files`.

Streams may be binary or text, and binary ones compressed (gz, bz2, xz, zst), which their first bytes tell. The position
inside a stream is the byte after the last record, in its decompressed text, so a resume parses nothing again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, ClassVar

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.formats.chunks import CHUNK, chunks_from, drop
from pipes.formats.delimited import DelimitedRows
from pipes.formats.jsonl import JsonLines
from pipes.formats.records import RecordsRun, is_text
from pipes.stages.mapping import AppliedPipe, AppliedRun
from pipes.stages.wrapping import as_pipe
from pipes.state import count_from, damaged
from pipes.utils import StreamWrapper, validate_pathname_binary_tuple

__all__ = ["CSVDictParser", "CSVParser", "JsonLinesParser", "JsonParser"]


def _content(stream: Any, path: str, offset: int) -> tuple[Iterator[bytes], str | None]:
    """The stream's bytes from `offset` on, and their encoding when the stream gave text."""
    if is_text(stream):
        encoded = (part.encode("utf-8", "surrogatepass") for part in iter(lambda: stream.read(CHUNK), ""))
        return drop(encoded, offset), "utf-8"
    return chunks_from(stream, path, offset), None


def _without_lines(chunks: Iterator[bytes], count: int) -> tuple[Iterator[bytes], int]:
    """The chunks after their first `count` lines, and how many bytes these were."""
    skipped = 0
    for chunk in chunks:
        at = 0
        while count and (end := chunk.find(b"\n", at) + 1):
            at, count = end, count - 1
        if not count:
            return chain((chunk[at:],), chunks), skipped + at
        skipped += len(chunk)
    return iter(()), skipped


class _DelimitedRun(RecordsRun):
    counts_records = True
    reads_parts = True
    fields: ClassVar[tuple[str, ...]] = ("offset", "line")

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        return map(self._shaper(path), self._rows(path, stream, at))

    def _rows(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Iterator[list[str]]]:
        pipe = self.pipe
        offset, line = at.get("offset", 0), at.get("line", 0)
        chunks, encoding = _content(stream, path, offset)
        if encoding is None and not pipe.decode:
            raise TypeError(f"{path}: decode=False reads text, but the stream gives bytes; open it with mode='r'")
        if not at:
            chunks, offset = _without_lines(chunks, pipe.skip_lines)
            line = pipe.skip_lines
        self.rows = DelimitedRows(
            chunks,
            path,
            encoding=encoding or pipe.encoding,
            errors="surrogatepass" if encoding else pipe.errors,
            position=offset,
            line=line,
            on_bad=self.bad_record(path),
            **pipe.fmtparams,
        )
        return self.rows.parts()

    def _shaper(self, path: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """What makes of rows that which the stage gives."""
        as_tuple, return_path = self.pipe.as_tuple, self.pipe.return_path

        def shaped(rows: Iterator[Any]) -> Iterator[Any]:
            rows = map(tuple, rows) if as_tuple else rows
            return zip(repeat(path), rows) if return_path else rows

        return shaped

    def end_part(self) -> None:
        self.rows.close()

    def where(self) -> tuple[Any, ...]:
        return self.rows.position, self.rows.line


@functional_datapipe("parse_csv")
class CSVParser(IterDataPipe[Any]):
    """Give the rows of each delimited text as lists of str.

    Args:
        source_datapipe: gives `(path, stream)`; binary streams keep line breaks inside quotes as they are.
        skip_lines: lines to pass over at the beginning of each text.
        decode: bytes are decoded; False refuses them.
        encoding, errors: of bytes; "ignore", torchdata's default, drops undecodable bytes without a word, "strict"
            makes them an error.
        return_path: give `(path, row)`.
        as_tuple: give tuples.
        on_error, max_errors: "skip" leaves out bad rows, and the rest of bad texts, up to so many; see the page on
            errors.
        fmtparams: as in `csv.reader`: `delimiter="\\t"`, `quotechar`, `strict`, …

    A byte-order mark is dropped; an empty line is an empty row. Raises, while iterating, DataError for a text that is
    not what these say, with its name, line and byte; at construction ValueError for a negative `skip_lines`.

    >>> import io
    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([("a.csv", io.BytesIO(b'id,text\\r\\n1,"a, b"\\r\\n'))]).parse_csv())
    [['id', 'text'], ['1', 'a, b']]
    """

    run_class = _DelimitedRun

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        skip_lines: int = 0,
        decode: bool = True,
        encoding: str = "utf-8",
        errors: str = "ignore",
        return_path: bool = False,
        as_tuple: bool = False,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
        **fmtparams: Any,
    ) -> None:
        skip_lines = whole("skip_lines", skip_lines)
        if skip_lines < 0:
            raise ValueError(f"skip_lines={skip_lines}: must be 0 or more")
        check_policy(on_error, max_errors)
        self.source_datapipe = as_pipe(source_datapipe)
        self.skip_lines = skip_lines
        self.decode = decode
        self.encoding = encoding
        self.errors = errors
        self.return_path = return_path
        self.as_tuple = as_tuple
        self.fmtparams = fmtparams
        self.on_error = on_error
        self.max_errors = max_errors


class _DictRun(_DelimitedRun):
    """The header is part of the position, so that a resume need not go back to it."""

    fields: ClassVar[tuple[str, ...]] = ("offset", "line", "header")

    def check_inside(self, inside: dict[str, Any]) -> None:
        for field in ("offset", "line"):
            count_from(inside, field, self.stage)
        header = inside.get("header")
        if not isinstance(header, list) or not all(isinstance(name, str) for name in header):
            raise damaged(f"'header' of stage {self.stage} is no list of names")

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        header = at.get("header", self.pipe.fieldnames)
        self.header: list[str] | None = header
        parts = self._rows(path, stream, at)
        if header is None:
            for part in parts:
                header = next(part, None)
                if header is not None:
                    parts = chain((part,), parts)
                    break
            self.header = header = header or []
        shaped, names = self._shaper(path), header
        return (shaped(self._dicts(part, names)) for part in parts)

    def bad_record(self, path: str) -> Callable[[Exception], Any] | None:
        handle = super().bad_record(path)

        def unless_header(error: Exception) -> Any:
            # Without its names, no row of the text can be read.
            if handle is None or self.header is None:
                raise error
            return handle(error)

        return None if handle is None else unless_header

    def _dicts(self, rows: Iterator[list[str]], header: list[str]) -> Iterator[Any]:
        width, restkey, restval = len(header), self.pipe.restkey, self.pipe.restval
        for row in rows:
            if row and len(row) == width:
                yield dict(zip(header, row, strict=True))
            elif row:  # an empty line is passed over, also below an empty header
                named: dict[Any, Any] = dict.fromkeys(header, restval)
                named.update(zip(header, row, strict=False))
                if len(row) > width:
                    named[restkey] = row[width:]
                yield named

    def where(self) -> tuple[Any, ...]:
        return *super().where(), self.header


@functional_datapipe("parse_csv_as_dict")
class CSVDictParser(IterDataPipe[Any]):
    """Give the rows of each delimited text as dicts; its first row (after `skip_lines`) names the fields.

    Arguments and errors are those of `CSVParser`. As with `csv.DictReader`, empty lines are passed over, fields that
    are missing are `restval`, those too many are a list under `restkey`, and with `fieldnames` the first row is data.

    >>> import io
    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([("a.tsv", io.BytesIO(b"id\\ttext\\n1\\tabc\\n"))]).parse_csv_as_dict(delimiter="\\t"))
    [{'id': '1', 'text': 'abc'}]
    """

    run_class = _DictRun
    as_tuple = False

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        skip_lines: int = 0,
        decode: bool = True,
        encoding: str = "utf-8",
        errors: str = "ignore",
        return_path: bool = False,
        fieldnames: Sequence[str] | None = None,
        restkey: Any = None,
        restval: Any = None,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
        **fmtparams: Any,
    ) -> None:
        skip_lines = whole("skip_lines", skip_lines)
        if skip_lines < 0:
            raise ValueError(f"skip_lines={skip_lines}: must be 0 or more")
        check_policy(on_error, max_errors)
        self.source_datapipe = as_pipe(source_datapipe)
        self.skip_lines = skip_lines
        self.decode = decode
        self.encoding = encoding
        self.errors = errors
        self.return_path = return_path
        self.fieldnames = None if fieldnames is None else list(fieldnames)
        self.restkey = restkey
        self.restval = restval
        self.fmtparams = fmtparams
        self.on_error = on_error
        self.max_errors = max_errors


class _JsonLinesRun(RecordsRun):
    counts_records = True
    fields: ClassVar[tuple[str, ...]] = ("offset", "line")

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        offset, line = at.get("offset", 0), at.get("line", 0)
        chunks, _ = _content(stream, path, offset)
        self.values = JsonLines(chunks, path, position=offset, line=line, on_bad=self.bad_record(path))
        return ((path, value) for value in self.values) if self.pipe.return_path else iter(self.values)

    def where(self) -> tuple[Any, ...]:
        return self.values.position, self.values.line


@functional_datapipe("parse_jsonl")
class JsonLinesParser(IterDataPipe[Any]):
    """Give the value of each line of JSON-lines texts; empty lines are passed over.

    `on_error="skip"` leaves out bad lines, and the rest of bad texts, up to `max_errors`; see the page on errors.
    Only LF ends a line (U+2028 does not). With `return_path`, gives `(path, value)`. Raises, while iterating,
    DataError for a line that is not JSON, with the text's name, the line's number and its first byte.

    >>> import io
    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([("a.jsonl", io.BytesIO(b'{"a": 1}\\n[2]\\n'))]).parse_jsonl())
    [{'a': 1}, [2]]
    """

    run_class = _JsonLinesRun

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        *,
        return_path: bool = False,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        self.datapipe = as_pipe(datapipe)
        self.return_path = return_path
        self.on_error = on_error
        self.max_errors = max_errors


class _JsonRun(AppliedRun):
    """One stream, one value; a restore parses only those that are still wanted."""

    def function(self) -> Callable[..., Any]:
        return self._parsed

    def subject(self, element: Any) -> Any:
        return element[0] if isinstance(element, tuple) and element else element

    def _parsed(self, element: Any) -> tuple[str, Any]:
        validate_pathname_binary_tuple(element)
        path, stream = element
        try:
            return path, json.loads(stream.read(), **self.pipe.kwargs)
        finally:
            if isinstance(stream, StreamWrapper):
                stream.close()


@functional_datapipe("parse_json_files")
class JsonParser(AppliedPipe[tuple[str, Any]]):
    """Give `(path, value)` for each `(path, stream)` whose whole content is one JSON value.

    `kwargs` go to `json.loads`; `on_error="skip"` leaves out bad texts, up to `max_errors`.
    Raises json.JSONDecodeError, while iterating, for what is no JSON, an empty file too.

    >>> import io
    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([("a.json", io.BytesIO(b'{"a": [1]}'))]).parse_json_files())
    [('a.json', {'a': [1]})]
    """

    run_class = _JsonRun

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
        **kwargs: Any,
    ) -> None:
        super().__init__(source_datapipe, on_error, max_errors)
        self.kwargs = kwargs
