"""Rows of comma- or tab-separated text out of byte chunks of any size.

Source: RFC 4180, read by the standard library's `csv` with its dialect parameters. A quoted field may hold line breaks,
which stay as they are (CR LF stays CR LF); a byte-order mark is dropped.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

from pipes.errors import DataError
from pipes.formats.chunks import whole_lines

__all__ = ["DelimitedRows"]

_BOM = b"\xef\xbb\xbf"


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
        self._encoding, self._errors = encoding, errors
        self._line = line
        self._on_bad = on_bad
        # Why a line of the row at hand is not in the encoding; only kept when `on_bad` is there to be told.
        self._undecodable: UnicodeDecodeError | None = None
        # The block that the csv module reads at present: its first byte, its size, its lines, and the lines before it.
        self._base, self._size, self._lines, self._before = position, 0, list[bytes](), 0
        # Of these lines, how many were counted for `position`, and their length.
        self._counted = self._length = 0
        self._reader = csv.reader(chain.from_iterable(self._blocks(chunks)), **fmtparams)
        self._rows = self._read()

    def __iter__(self) -> Iterator[list[str]]:
        return self._rows

    @property
    def line(self) -> int:
        return self._line + self._reader.line_num

    @property
    def position(self) -> int:
        # Counted only when asked, and on from the last time: for every row it would cost a fifth of the parsing.
        read = self._reader.line_num - self._before
        self._length += sum(map(len, self._lines[self._counted : read]))
        self._counted = read
        return self._base + self._length

    def _read(self) -> Iterator[list[str]]:
        if self._on_bad is not None:
            yield from self._read_on(self._on_bad)
            return
        try:
            yield from self._reader
        except (csv.Error, UnicodeDecodeError) as error:
            raise self._bad(error) from error

    def _read_on(self, on_bad: Callable[[Exception], Any]) -> Iterator[list[str]]:
        while True:
            try:
                row = next(self._reader, None)
                error: Exception | None = self._undecodable
            except csv.Error as refused:
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
        return DataError(f"{self.name}: line {self.line} (around byte {self.position}) is not valid: {error}{hint}")

    def _decoded(self, line: bytes) -> str:
        try:
            return line.decode(self._encoding, self._errors)
        except UnicodeDecodeError as error:
            # The row must be read to its end before it can be left out: its line breaks may be quoted.
            self._undecodable = error
            return line.decode("latin-1")

    def _blocks(self, chunks: Iterable[bytes]) -> Iterator[Iterable[str]]:
        """The text in blocks of whole lines, each an iterable of lines with their ends."""
        for block in whole_lines(chunks, lone_cr=True):
            self._base += self._size
            self._size, self._before = len(block), self._reader.line_num
            self._counted = self._length = 0
            # Of bytes, unlike of str, this splits at LF, CR and CR LF alone.
            self._lines = lines = block.splitlines(keepends=True)
            if self._base == 0 and self._encoding == "utf-8" and block.startswith(_BOM):
                first = lines[0][len(_BOM) :]
                lines = [first, *lines[1:]] if first else []
            if self._on_bad is not None:
                yield map(self._decoded, lines)
            elif self._encoding == "utf-8" and (self._errors == "strict" or block.isascii()):
                yield map(bytes.decode, lines)  # its defaults are a third faster than the same said
            else:
                yield map(bytes.decode, lines, repeat(self._encoding), repeat(self._errors))
