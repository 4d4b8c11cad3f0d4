"""Stages over the plain content of streams: `.readlines`, `.read_from_stream`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.errors import DataError
from pipes.formats.chunks import CHUNK, go_to, read_chunks, reader_of, whole_lines
from pipes.formats.records import RecordsRun, is_text
from pipes.stages.wrapping import as_pipe

__all__ = ["LineReader", "StreamReader"]


class _LinesRun(RecordsRun):
    """Binary streams are resumed by the byte; text streams, whose bytes nobody sees, by the number of lines."""

    counts_records = True
    fields: ClassVar[tuple[str, ...]] = ("offset", "lines")

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        self.offset, self.lines = at.get("offset", 0), at.get("lines", 0)
        skip = 0 if at else self.pipe.skip_lines
        if is_text(stream):
            lines: Iterator[Any] = self._of_text(stream, skip)
        else:
            go_to(stream, path, self.offset)
            lines = islice(self._of_bytes(stream, path), skip, None)
        if self.pipe.decode:
            lines = self._decoded(lines, path)
        return ((path, line) for line in lines) if self.pipe.return_path else lines

    def _decoded(self, lines: Iterator[Any], path: str) -> Iterator[Any]:
        encoding, errors, on_bad = self.pipe.encoding, self.pipe.errors, self.bad_record(path)
        for line in lines:
            if not isinstance(line, bytes):
                yield line
                continue
            try:
                text = line.decode(encoding, errors)
            except UnicodeDecodeError as error:
                bad = DataError(f"{path}: the line that ends at byte {self.offset} is not valid: {error}")
                bad.__cause__ = error
                if on_bad is None:
                    raise bad from error
                text = on_bad(bad)
                if text is None:
                    continue
            yield text

    def _of_bytes(self, stream: Any, path: str) -> Iterator[bytes]:
        strip = self.pipe.strip_newline
        for block in whole_lines(read_chunks(stream, path)):
            lines = block.split(b"\n")
            last = lines.pop()
            for line in lines:
                self.offset += len(line) + 1
                yield line.rstrip(b"\r") if strip else line + b"\n"
            if last:
                self.offset += len(last)
                yield last.rstrip(b"\r") if strip else last

    def _of_text(self, stream: Any, skip: int) -> Iterator[str]:
        strip = self.pipe.strip_newline
        self.lines += skip
        for line in islice(stream, self.lines, None):
            self.lines += 1
            yield line.rstrip("\r\n") if strip else line

    def where(self) -> tuple[Any, ...]:
        return self.offset, self.lines


@functional_datapipe("readlines")
class LineReader(IterDataPipe[Any]):
    """Give `(path, line)` for each line of each stream, bytes from binary streams and str from text ones.

    Args:
        source_datapipe: gives `(path, stream)`; a `StreamWrapper` is closed after its last line.
        skip_lines: lines to pass over at the beginning of each stream.
        strip_newline: without the LF or CR LF at the end.
        decode: bytes become str, by `encoding` and `errors`; "ignore", torchdata's default, drops undecodable bytes.
        return_path: False gives the lines alone.
        on_error, max_errors: "skip" leaves out lines that do not decode, and the rest of streams that cannot be read,
            up to so many; see the page on errors.

    LF ends a line of bytes. Raises ValueError for a negative `skip_lines`; while iterating, DataError for a line that
    does not decode, with the text's name and the byte where the line ends.

    >>> import io
    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([("a.txt", io.BytesIO(b"one\\r\\ntwo"))]).readlines(decode=True))
    [('a.txt', 'one'), ('a.txt', 'two')]
    """

    run_class = _LinesRun

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        skip_lines: int = 0,
        strip_newline: bool = True,
        decode: bool = False,
        encoding: str = "utf-8",
        errors: str = "ignore",
        return_path: bool = True,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        skip_lines = whole("skip_lines", skip_lines)
        if skip_lines < 0:
            raise ValueError(f"skip_lines={skip_lines}: must be 0 or more")
        self.source_datapipe = as_pipe(source_datapipe)
        self.skip_lines = skip_lines
        self.strip_newline = strip_newline
        self.decode = decode
        self.encoding = encoding
        self.errors = errors
        self.return_path = return_path
        self.on_error = on_error
        self.max_errors = max_errors


class _StreamRun(RecordsRun):
    fields: ClassVar[tuple[str, ...]] = ("offset",)

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        self.offset = at.get("offset", 0)
        if is_text(stream):
            stream.read(self.offset)
        else:
            go_to(stream, path, self.offset)
        read, end = (stream.read, "") if is_text(stream) else (reader_of(stream, path), b"")
        pieces: Iterator[Any] = iter(partial(read, self.pipe.chunk or CHUNK), end)
        if self.pipe.chunk is None:
            whole = end.join(pieces)
            pieces = iter([whole] if whole else [])
        return self._counted(path, pieces)

    def _counted(self, path: str, pieces: Iterator[Any]) -> Iterator[tuple[str, Any]]:
        for piece in pieces:
            self.offset += len(piece)
            yield path, piece

    def where(self) -> tuple[Any, ...]:
        return (self.offset,)


@functional_datapipe("read_from_stream")
class StreamReader(IterDataPipe[tuple[str, Any]]):
    """Give `(path, content)` for each `(path, stream)`, the whole of it or `chunk` bytes (or characters) at a time.

    An empty stream gives nothing; a `StreamWrapper` is closed after its end. `on_error="skip"` leaves out the rest of
    streams that cannot be read, up to `max_errors`. Raises ValueError for a `chunk` below 1.

    >>> import io
    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper([("a.bin", io.BytesIO(b"abcde"))]).read_from_stream(2))
    [('a.bin', b'ab'), ('a.bin', b'cd'), ('a.bin', b'e')]
    """

    run_class = _StreamRun

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        chunk: int | None = None,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        chunk = whole_or_none("chunk", chunk)
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk}: must be 1 or more, or None for everything at once")
        self.datapipe = as_pipe(datapipe)
        self.chunk = chunk
        self.on_error = on_error
        self.max_errors = max_errors
