"""Rows of comma- or tab-separated text out of byte chunks of any size.

Source: RFC 4180, read by the standard library's `csv` with its dialect parameters. A quoted field may hold line breaks,
which stay as they are (CR LF stays CR LF); a byte-order mark is dropped.

Many rows are made at a time, so that none costs a step of Python; where each of them ends is counted when that is
asked. A block of UTF-8 text without quotes is cut at line ends and delimiters, in half the time that `csv` takes.
"""

from __future__ import annotations

import codecs
import csv
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice, repeat
from typing import Any

from pipes.errors import DataError, PipesError
from pipes.formats.chunks import whole_lines

__all__ = ["DelimitedRows"]

_BOM = b"\xef\xbb\xbf"
# So many rows the csv module parses, at most, before the first of them is given.
_AHEAD = 256
_PLAIN_QUOTING = (csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONE)


def _is_of_row(error: Exception) -> bool:
    """Whether it is a row that is bad (numbers of QUOTE_NONNUMERIC give ValueError), and not the stream."""
    return isinstance(error, csv.Error | ValueError) and not isinstance(error, PipesError)


class DelimitedRows:
    """The rows of a delimited text, as lists of str.

    >>> rows = DelimitedRows([b'id,text\\r\\n1,"two\\r\\nli', b'nes"\\r\\n'], "a.csv")
    >>> for row in rows:
    ...     print(row, rows.position)
    ['id', 'text'] 9
    ['1', 'two\\r\\nlines'] 25

    Args:
        chunks: bytes from `position` on (`pipes.formats.chunks.read_chunks`, `decompress`).
        name: what errors call the text.
        encoding: any that keeps ASCII's line ends, so UTF-8, Latin-1, Shift-JIS, but not UTF-16.
        errors: as in `bytes.decode`.
        position, line: where the chunks begin, as an earlier reader told.
        on_bad: gets the error of a bad row and returns the row to give instead, or None to go on without. After a row
            that the dialect refuses, reading goes on at the next line.
        fmtparams: as in `csv.reader`: `delimiter`, `quotechar`, `strict`, …

    Attributes:
        position: the byte after the last row given.
        line: how many lines (not rows) have been read.

    Raises:
        DataError: a row is not what the dialect says, or not in the encoding; names the text, the line and the byte.
        ValueError: the encoding does not keep ASCII's line ends.
    """

    def __init__(
        self,
        chunks: Iterable[bytes],
        name: str,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        position: int = 0,
        line: int = 0,
        on_bad: Callable[[Exception], Any] | None = None,
        **fmtparams: Any,
    ) -> None:
        encoding = codecs.lookup(encoding).name.removesuffix("-sig")
        if "\r\n".encode(encoding) != b"\r\n":
            raise ValueError(f"{name}: encoding {encoding!r} has line ends of its own; convert the text to UTF-8 first")
        self.name = name
        self._encoding, self._errors, self._fmtparams = encoding, errors, fmtparams
        self._on_bad = on_bad
        # Why a line of the row at hand is not in the encoding; only kept when `on_bad` is there to be told.
        self._undecodable: UnicodeDecodeError | None = None
        self._blocks = self._without_mark(whole_lines(chunks, lone_cr=True))
        # The lines held, or the block that was not yet cut into them; the first one's byte, how many lines of the text
        # lie before it, and how many the csv module had read by then.
        self._lines, self._uncut = list[bytes](), b""
        self._base, self._line, self._before = position, line, 0
        self._text: Iterable[str] | None = None
        # The rows at hand: the lines where they start and end, their number, and an iterator over those not yet given.
        self._start = self._end = self._count = 0
        self._rest: Any = iter(())
        # A second parser over the rows at hand, and how many of them it has read; see `_given`.
        self._second: Any = None
        self._seconds = 0
        # Of the lines held, how many were counted for `position`, and their length.
        self._counted = self._length = 0
        self._reader = csv.reader(chain.from_iterable(self._texts()), **fmtparams)
        self._marks = self._marks_of(self._reader.dialect)
        self._parts = self._strict() if on_bad is None else self._tolerant(on_bad)

    def __iter__(self) -> Iterator[list[str]]:
        return chain.from_iterable(self._parts)

    def parts(self) -> Iterator[Iterator[list[str]]]:
        """Return the rows as iterators over some of them each; without `on_bad`, none of these ever raises."""
        return self._parts

    def close(self) -> None:
        """Give no more rows, not even those that are parsed already."""
        with suppress(ValueError):  # it is executing
            self._parts.close()
        deque(self._rest, maxlen=0)

    @property
    def line(self) -> int:
        return self._line + self._given()

    @property
    def position(self) -> int:
        if self._uncut:
            self._lines, self._uncut = self._uncut.splitlines(keepends=True), b""
        # Counted only when asked, and on from the last time: for every row it would cost a fifth of the parsing.
        given = self._given()
        if given < self._counted:
            self._counted = self._length = 0
        self._length += sum(map(len, self._lines[self._counted : given]))
        self._counted = given
        return self._base + self._length

    def _given(self) -> int:
        """How many of the lines held are those of rows that were given."""
        if self._on_bad is not None:
            return self._read()
        left = self._rest.__length_hint__()
        if not left:
            return self._end
        given = self._count - int(left)
        if self._end - self._start == self._count:  # one line each
            return self._start + given
        # There are line breaks inside quotes: these rows are parsed again, but once only however often it is asked.
        if self._second is None:
            self._second = csv.reader(self._decoded(self._lines[self._start : self._end]), **self._fmtparams)
            self._seconds = 0
        deque(islice(self._second, given - self._seconds), maxlen=0)
        self._seconds = given
        return self._start + int(self._second.line_num)

    def _read(self) -> int:
        """How many of the lines held the csv module has read."""
        return int(self._reader.line_num) - self._before

    def _strict(self) -> Generator[Iterator[list[str]], None, None]:
        for block in self._blocks:
            plain = self._plain(block)
            if plain is not None:
                yield plain
                continue
            self._start = self._end
            self._text = self._hold(block)
            while self._end < len(self._lines):
                error = self._parse()
                yield self._rest
                if error is not None and not _is_of_row(error):
                    raise error
                if error is not None:
                    raise self._bad(error) from error

    def _plain(self, block: bytes) -> Iterator[list[str]] | None:
        """The rows of a block when there is one in each of its lines, without quotes or escapes."""
        if self._marks is None or any(mark in block for mark in self._marks):
            return None
        window = max(csv.field_size_limit() // 2, 1)
        if any(block.find(b"\n", at, at + window) < 0 for at in range(0, len(block) - window, window)):
            return None  # perhaps longer than the csv module allows
        end = "\r\n" if b"\r" in block else "\n"
        try:
            text = block.decode("utf-8", self._errors)
        except UnicodeDecodeError:
            return None
        lines = text.split(end)
        ends = len(lines) - 1
        # Counted in the bytes: dropping what does not decode may bring a CR and a LF together.
        if end == "\r\n" and not block.count(b"\r") == block.count(b"\n") == block.count(b"\r\n") == ends:
            return None
        if not lines[-1] and block.endswith(b"\n"):
            lines.pop()
        # An empty line (of bytes that `errors` drops, too) is an empty row, where a cut would give an empty field.
        if "" in lines:
            return None
        self._start = self._end
        self._hold(b"")
        self._uncut, self._count, self._end = block, len(lines), len(lines)
        self._before = self._reader.line_num - self._end  # the csv module never sees them
        self._rest = rest = iter(lines)
        return map(str.split, rest, repeat(self._reader.dialect.delimiter))

    def _parse(self) -> Exception | None:
        """Parse the next rows, fewer towards the block's end; return the error that came after them."""
        failed: Exception | None = None
        rows: list[list[str]] = []
        self._start, self._second = self._end, None
        try:
            rows.extend(islice(self._reader, min(_AHEAD, 1 + (len(self._lines) - self._start) // 2)))
        except Exception as error:
            failed = error
        self._count, self._end = len(rows), self._read()
        if failed is not None:
            # A state saved after the last good row comes upon the error again.
            good = csv.reader(self._decoded(self._lines[self._start : self._end]), **self._fmtparams)
            deque(islice(good, self._count), maxlen=0)
            self._end = self._start + good.line_num
        self._rest = iter(rows)
        return failed

    def _tolerant(self, on_bad: Callable[[Exception], Any]) -> Generator[Iterator[list[str]], None, None]:
        yield self._read_on(on_bad)

    def _read_on(self, on_bad: Callable[[Exception], Any]) -> Iterator[list[str]]:
        while True:
            try:
                row = next(self._reader, None)
                error: Exception | None = self._undecodable
            except Exception as refused:
                if not _is_of_row(refused):
                    raise
                row, error = [], refused
            if row is None:
                return
            if error is not None:
                self._undecodable = None
                bad = self._bad(error)
                bad.__cause__ = error
                row = on_bad(bad)
                if row is None:
                    continue
            yield row

    def _bad(self, error: Exception) -> DataError:
        hint = "; csv.field_size_limit(n) raises the limit" if "field limit" in str(error) else ""
        read = self._read()
        byte = self._base + sum(map(len, self._lines[:read]))
        return DataError(f"{self.name}: line {self._line + read} (around byte {byte}) is not valid: {error}{hint}")

    def _marks_of(self, dialect: Any) -> list[bytes] | None:
        """The bytes whose absence makes a block plain; None when no block is."""
        if self._encoding != "utf-8" or dialect.quoting not in _PLAIN_QUOTING or dialect.skipinitialspace:
            return None
        marks = [mark for mark in (dialect.quotechar, dialect.escapechar) if mark]
        return [mark.encode("utf-8", "surrogatepass") for mark in marks]

    def _without_mark(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        first = next(blocks, b"")
        if self._base == 0 and self._encoding == "utf-8" and first.startswith(_BOM):
            first, self._base = first[len(_BOM) :], len(_BOM)
        if first:
            yield first
            yield from blocks

    def _hold(self, block: bytes) -> Iterable[str]:
        """Let go of the lines before `_start` and hold those of the block as well; return its text, line by line."""
        gone = self._start
        self._base += len(self._uncut) if self._uncut else sum(map(len, self._lines[:gone]))
        self._line += gone
        self._before += gone
        self._start, self._end = 0, self._end - gone
        self._counted = self._length = 0
        # Of bytes, unlike of str, this splits at LF, CR and CR LF alone.
        lines = block.splitlines(keepends=True)
        self._lines, self._uncut = self._lines[gone:] + lines, b""
        return self._decoded(lines, block.isascii())

    def _texts(self) -> Iterator[Iterable[str]]:
        """What the csv module reads: the block at hand, and the next one where a row goes on into it."""
        while True:
            text, self._text = self._text, None
            if text is None:
                block = next(self._blocks, None)
                if block is None:
                    return
                if self._on_bad is not None:
                    self._start = self._end = len(self._lines)
                text = self._hold(block)
            yield text

    def _decoded(self, lines: list[bytes], ascii: bool = False) -> Iterable[str]:
        if self._on_bad is not None:
            return map(self._decoded_or_told, lines)
        if self._encoding == "utf-8" and (self._errors == "strict" or ascii):
            return map(bytes.decode, lines)  # its defaults are a third faster than the same said
        return map(bytes.decode, lines, repeat(self._encoding), repeat(self._errors))

    def _decoded_or_told(self, line: bytes) -> str:
        try:
            return line.decode(self._encoding, self._errors)
        except UnicodeDecodeError as error:
            # The row must be read to its end before it can be left out: its line breaks may be quoted.
            self._undecodable = error
            return line.decode("latin-1")
