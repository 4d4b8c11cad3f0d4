"""JSON lines out of byte chunks of any size.

Source: https://jsonlines.org: UTF-8, one value a line, LF between lines; CR before LF is white space to JSON. Only LF
ends a line: U+2028 and U+0085 inside a string do not, as they would for `str.splitlines`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipes.errors import DataError
from pipes.formats.chunks import whole_lines

__all__ = ["JsonLines"]

_BOM = b"\xef\xbb\xbf"


_raw_decode = json.JSONDecoder().raw_decode


def _loads(text: str) -> Any:
    """As `json.loads`, without its two searches for white space around the value."""
    try:
        value, end = _raw_decode(text)
    except ValueError:
        return json.loads(text)  # white space before the value, or the error with its right words
    if end != len(text) and text[end:].strip(" \t\r"):
        return json.loads(text)
    return value


class JsonLines:
    """The values of a JSON-lines text, one a line; empty lines are passed over.

    >>> rows = JsonLines([b'{"a": 1}\\n\\n{"a"', b': 2}'], "a.jsonl")
    >>> for row in rows:
    ...     print(row, rows.line, rows.position)
    {'a': 1} 1 9
    {'a': 2} 3 18

    Args:
        chunks: bytes from `position` on (`pipes.formats.chunks.read_chunks`, `decompress`).
        name: what errors call the text.
        position, line: where the chunks begin, as an earlier reader told.
        loads: what makes a value of a line's text; by default, what `json.loads` would make, in less time.
        on_bad: gets the error of a bad line and returns the value to give instead, or None to go on without.

    Attributes:
        position: the byte after the last line given, its LF included.
        line: the number of the last line given, from 1.

    Raises:
        DataError: a line is not JSON or not UTF-8; names the text, the line and the byte where the line begins.
    """

    def __init__(
        self,
        chunks: Iterable[bytes],
        name: str,
        *,
        position: int = 0,
        line: int = 0,
        loads: Callable[[str], Any] | None = None,
        on_bad: Callable[[Exception], Any] | None = None,
    ) -> None:
        self.name = name
        self._loads = loads or _loads
        self._on_bad = on_bad
        # The block of lines at hand: its first byte, its size, its lines, an iterator over them, the lines before it.
        self._base, self._size, self._before = position, 0, line
        self._lines: list[bytes] = []
        self._rest: Any = iter(self._lines)
        # Of these lines, how many were counted for `position`, and their length.
        self._counted = self._length = 0
        self._values = self._read(chunks)

    def __iter__(self) -> Iterator[Any]:
        return self._values

    @property
    def line(self) -> int:
        left: int = self._rest.__length_hint__()
        return self._before + len(self._lines) - left

    @property
    def position(self) -> int:
        # Counted only when asked, and on from the last time.
        taken = self.line - self._before
        self._length += sum(map(len, self._lines[self._counted : taken])) + taken - self._counted
        self._counted = taken
        return self._base + min(self._length, self._size)

    def _read(self, chunks: Iterable[bytes]) -> Iterator[Any]:
        loads = self._loads
        for block in whole_lines(chunks):
            self._base += self._size
            self._before += len(self._lines)
            self._size, self._counted, self._length = len(block), 0, 0
            self._lines = lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            if self._base == 0 and block.startswith(_BOM):
                lines = [lines[0][len(_BOM) :], *lines[1:]]
            self._rest = iter(lines)
            for line in self._rest:
                try:
                    value = loads(line.decode())
                except (ValueError, RecursionError) as error:
                    if not line.strip():
                        continue
                    bad = self._bad(error)
                    if self._on_bad is None:
                        raise bad from error
                    bad.__cause__ = error
                    value = self._on_bad(bad)
                    if value is None:
                        continue
                yield value

    def _bad(self, error: Exception) -> DataError:
        start = self._base + sum(len(line) + 1 for line in self._lines[: self.line - self._before - 1])
        return DataError(f"{self.name}: line {self.line}, which begins at byte {start}, is not JSON: {error}")
