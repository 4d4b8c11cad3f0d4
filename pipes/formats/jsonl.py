"""JSON lines out of byte chunks of any size.

Source: https://jsonlines.org: UTF-8, one value a line, LF between lines; CR before LF is white space to JSON. Only LF
ends a line: U+2028 and U+0085 inside a string do not, as they would for `str.splitlines`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipes.errors import DataError

__all__ = ["JsonLines", "split_lines"]

_BOM = b"\xef\xbb\xbf"


def split_lines(chunks: Iterable[bytes]) -> Iterator[tuple[list[bytes], int]]:
    """The lines of the chunks in lists, without the LF, and how many bytes ended each: 1, or 0 at the very end.

    >>> list(split_lines([b"a\\nb", b"c\\n\\nd"]))
    [([b'a'], 1), ([b'bc', b''], 1), ([b'd'], 0)]
    """
    parts: list[bytes] = []
    for chunk in chunks:
        lines = chunk.split(b"\n")
        parts.append(lines.pop())
        if lines:
            # Joined only when a line ends, so that a line of many chunks is copied once.
            rest = parts.pop()
            parts.append(lines[0])
            lines[0] = b"".join(parts)
            parts = [rest]
            yield lines, 1
    rest = b"".join(parts)
    if rest:
        yield [rest], 0


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
        loads: what makes a value of a line's text.

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
        loads: Callable[[str], Any] = json.loads,
    ) -> None:
        self.name = name
        self.position = position
        self.line = line
        self._loads = loads
        self._values = self._read(chunks)

    def __iter__(self) -> Iterator[Any]:
        return self._values

    def _read(self, chunks: Iterable[bytes]) -> Iterator[Any]:
        loads = self._loads
        for lines, end in split_lines(chunks):
            for line in lines:
                start = self.position
                self.position += len(line) + end
                self.line += 1
                if start == 0 and line.startswith(_BOM):
                    line = line[3:]
                try:
                    value = loads(str(line, "utf-8"))
                except ValueError as error:
                    if not line.strip():
                        continue
                    raise DataError(
                        f"{self.name}: line {self.line}, which begins at byte {start}, is not JSON: {error}"
                    ) from error
                yield value
