"""What zip archives are made of: the bytes by their place, header fields, and how members are packed.

Source: PKWARE's APPNOTE.TXT 6.3.10; section numbers are its.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from typing import Any, NamedTuple, Protocol

from pipes.errors import DataError, TruncatedError
from pipes.formats.chunks import CHUNK, reader_of

__all__ = ["METHODS", "Entry", "ForwardBytes", "inflate", "name_of", "sizes_of"]

# 4.4.5
METHODS = {0: "stored", 8: "deflate", 12: "bzip2", 14: "LZMA"}
# A size may be a lie: this is the most that is asked for at once.
_PIECE = 1 << 24
_UTF8 = 1 << 11


class Entry(NamedTuple):
    """A member as a header tells it; `mode` is its Unix file type and permissions, 0 where unknown."""

    name: str
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    offset: int
    mode: int


class ForwardBytes:
    """The bytes of a stream by their offset, mostly forward.

    `known` says that the archive's directory was read, so that what is asked for should be there. `position` is the
    offset behind the last byte taken.
    """

    def __init__(self, stream: Any, name: str, *, known: bool = False) -> None:
        self.known = known
        self.position = 0
        self._name = name
        self._stream = stream
        self._read = reader_of(stream, name)
        self._seekable = bool(getattr(stream, "seekable", bool)())
        if self._seekable:
            stream.seek(0)
        self._skip = getattr(stream, "skip", None)

    def take(self, offset: int, size: int, what: str) -> bytes:
        """The `size` bytes from `offset` on; `what` tells an error where the archive was cut.

        Raises:
            TruncatedError: the stream ends before.
        """
        if offset != self.position:
            self._go(offset, what)
        data = self._read(min(size, _PIECE)) if size else b""
        self.position += len(data)
        if len(data) == size:
            return data
        parts, left = [data], size - len(data)
        while left and parts[-1]:
            parts.append(self._read(min(left, _PIECE)))
            left -= len(parts[-1])
            self.position += len(parts[-1])
        if left:
            self._cut(what)
        return b"".join(parts)

    def _go(self, offset: int, what: str) -> None:
        if self._seekable:
            self.position = self._stream.seek(offset)
            return
        left = offset - self.position
        while left > 0:
            if self._skip is not None:
                passed = self._skip(left)
                passed = left if passed is None else passed
            else:
                passed = len(self._read(min(left, CHUNK)))
            self.position += passed
            left -= passed
            if not passed:
                self._cut(what)

    def _cut(self, what: str) -> None:
        if self.position == 0:
            raise TruncatedError(f"{self._name}: empty archive (0 bytes); a zip archive has at least 22")
        before = "" if self.known else "; the members before it are whole"
        raise TruncatedError(
            f"{self._name}: the archive was cut at byte {self.position}: {what}{before}. Fetch or write it again"
        )


def name_of(raw: bytes, flags: int) -> str:
    """A name in the encoding that bit 11 of the flags says (4.4.4, appendix D).

    >>> name_of("ü".encode(), 1 << 11), name_of(b"\\x81", 0)
    ('ü', 'ü')
    """
    return raw.decode("utf-8", "surrogateescape") if flags & _UTF8 else raw.decode("cp437")


def sizes_of(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The fields of a header, those that are too large for it from its zip64 extra (4.5.3).

    >>> sizes_of(b"\\1\\0\\x08\\0" + (5).to_bytes(8, "little"), 0xFFFFFFFF, 3, 0)
    (5, 3, 0)
    """
    values = [size, packed, offset]
    if 0xFFFFFFFF not in values:
        return size, packed, offset
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == 1:
            wide = extra[place + 4 : place + 4 + length]
            for number, value in enumerate(values):
                if value == 0xFFFFFFFF and len(wide) >= 8:
                    values[number], wide = int.from_bytes(wide[:8], "little"), wide[8:]
        place += 4 + length
    return values[0], values[1], values[2]


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def inflate(packed: bytes, entry: Entry, where: str) -> bytes:
    """The data of a member, never more than its header says.

    Raises:
        DataError: they do not unpack, or to another size than the header says.
    """
    if entry.method == 0:
        data = packed
    else:
        try:
            # One byte more than there should be, so that too much is noticed.
            data = _decompressor(entry, packed).decompress(_body(entry, packed), entry.size + 1)
        except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError, OverflowError, struct.error) as error:
            raise DataError(f"{where} is damaged: bad {METHODS[entry.method]} data: {error}") from error
    if len(data) != entry.size:
        more = "more than " if len(data) > entry.size and entry.method else ""
        found = entry.size if more else len(data)
        raise DataError(f"{where} is damaged: it unpacks to {more}{found} bytes, its header says {entry.size}")
    return data


def _body(entry: Entry, packed: bytes) -> bytes:
    return packed[4 + int.from_bytes(packed[2:4], "little") :] if entry.method == 14 else packed


def _decompressor(entry: Entry, packed: bytes) -> _Decompressor:
    if entry.method == 8:
        return zlib.decompressobj(-15)
    if entry.method == 12:
        return bz2.BZ2Decompressor()
    # 5.8.8: version, size of the properties, the properties; the dictionary need not be larger than the data.
    length, packing, dictionary = struct.unpack_from("<2xHBL", packed)
    if length != 5 or packing >= 225:
        raise lzma.LZMAError("unknown properties")
    rest, lc = divmod(packing, 9)
    pb, lp = divmod(rest, 5)
    filters = [
        {
            "id": lzma.FILTER_LZMA1,
            "dict_size": max(4096, min(dictionary, entry.size)),
            "lc": lc,
            "lp": lp,
            "pb": pb,
        }
    ]
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, None, filters)
