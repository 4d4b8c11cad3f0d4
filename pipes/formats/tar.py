"""Read tar archives as streams: members in order, each once, from any binary stream.

    >>> import io, tarfile
    >>> buffer = io.BytesIO()
    >>> with tarfile.open(fileobj=buffer, mode="w") as archive:
    ...     member = tarfile.TarInfo("a/0001.txt"); member.size = 2
    ...     archive.addfile(member, io.BytesIO(b"hi"))
    >>> for member in TarReader(io.BytesIO(buffer.getvalue()), "a.tar"):
    ...     print(member.name, member.data, member.offset)
    a/0001.txt b'hi' 0

Understood: V7, POSIX ustar and pax (path and size records, global headers), GNU long names and base-256 numbers;
inside gzip, bzip2, xz or zstd. Refused with a clear error: sparse members and parts of multi-volume archives.
Sources: see `pipes.formats.tar_headers`.

What counts as whole. POSIX ends an archive with two blocks of 512 zero bytes, and GNU tar, BSD tar, Go's archive/tar
and Python's tarfile all write them; so an archive without both was cut, even when it ends between two members, and
is an error after its complete members. What follows the two blocks (padding to 10,240 bytes, or anything else) is
not looked at, except inside a compression, whose own checksum stands at the very end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, NoReturn
from zlib import adler32

from pipes.errors import DataError, TruncatedError
from pipes.formats.chunks import CHUNK, COMPRESSIONS, expand, read_chunks, reader_of, sniff
from pipes.formats.tar_headers import (
    BLOCK,
    GNU_MAGIC,
    KINDS,
    checksum_matches,
    expected_sum,
    parse_number,
    parse_pax,
    text,
    unpack,
    unpack_start,
)

__all__ = ["TarMember", "TarReader", "check_mode"]

# No name or set of records is longer than this; a larger size is damage, and believing it would fill the memory.
_MAX_HEADER = 1 << 24
# A member's size may be a lie too: this is the most that is asked for at once.
_PIECE = 1 << 24
# Kinds that have no data after their header, whatever its size field says.
_BARE = frozenset(("hard link", "symbolic link", "character device", "block device", "directory", "fifo"))
_ZEROS = bytes(BLOCK)


class TarMember(NamedTuple):
    """A regular file of an archive; `offset` is the byte of its first header in the (decompressed) archive."""

    name: str
    data: bytes
    size: int
    offset: int


class TarReader:
    """The regular files of a tar archive, in order, read once from a stream.

    Args:
        stream: anything with `read(n)` or `readinto`; short reads are fine and `seek` is not needed. The archive
            begins where the stream stands.
        name: what errors call the archive.
        mode: as in `tarfile`: "r:*" and "r|*" find out the compression, "r:" is none, "r:gz", "r:bz2", "r:xz" and
            "r:zst" are that one. With "|" the stream is never asked to seek.
        offset: where to begin: a `position` of an earlier reader. Reached by `seek` or the stream's own `skip(n)`,
            else by reading up to it.
        records: the `records` of that earlier reader (global pax headers reach over all that follows).
        select: whether a member of this name is wanted; the data of others are sought over, or read and dropped.
        concatenated: go on after an end mark with the next archive in the same stream.
        max_member_bytes: the largest member that is read into memory, in bytes; None for no limit.
        on_skip: told the kind of each member that is not given.

    Attributes:
        position: the byte of the next member's first header.
        records: the global pax records in force.
        skipped: how many members were not given, by kind: "directory", "symbolic link", …, "not selected".

    Raises:
        TruncatedError: the archive is empty or cut, after all complete members; says at which byte.
        DataError: it is no tar archive, is damaged, has sparse or multi-volume members, or a wanted one is larger than
            `max_member_bytes`.
        ValueError: unknown `mode`.
    """

    def __init__(
        self,
        stream: Any,
        name: str,
        *,
        mode: str = "r:*",
        offset: int = 0,
        records: Mapping[str, str] | None = None,
        select: Callable[[str], bool] | None = None,
        concatenated: bool = False,
        max_member_bytes: int | None = None,
        on_skip: Callable[[str], object] | None = None,
    ) -> None:
        self.name = name
        self.position = offset
        self.records = dict(records or {})
        self.skipped: dict[str, int] = {}
        self._stream = stream
        self._read = reader_of(stream, name)
        self._compression = check_mode(mode)
        self._select = select
        self._on_skip = on_skip
        self._concatenated = concatenated
        self._limit = sys.maxsize if max_member_bytes is None else max_member_bytes
        self._seekable = "|" not in mode and bool(getattr(stream, "seekable", bool)())
        self._skipping = getattr(stream, "skip", None)
        # The window holds the archive's bytes from `_base` on; the next header begins at `_pos` in it, or beyond it.
        self._window = b""
        self._base = 0
        self._pos = offset
        self._members = self._walk()

    def __iter__(self) -> Iterator[TarMember]:
        return self._members

    def _walk(self) -> Iterator[TarMember]:
        self._open()
        new = tuple.__new__  # half the time of TarMember(...)
        window, pos, choosy, limit = self._window, self._pos, self._select is not None, self._limit
        while True:
            if pos + BLOCK > len(window):
                self._pos = pos
                self._require(BLOCK)
                window, pos = self._window, self._pos
            header = window[pos : pos + BLOCK]
            raw_name, raw_size, raw_sum, kind, prefixed = unpack_start(header)
            try:
                size = int(raw_size.rstrip(b"\0 "), 8)
            except ValueError:
                size = -1
            if (
                kind == b"0"
                and 0 <= size <= limit
                and prefixed == b"\0"
                and not (choosy or self.records)
                and adler32(header, 0) & 0xFFFF == expected_sum(raw_sum)
            ):
                # As `text`, without the call.
                end = raw_name.find(0)
                name = str(raw_name[:end] if end >= 0 else raw_name, "utf-8", "surrogateescape")
                first = self._base + pos
            else:
                self._pos = pos
                found = self._find()
                if found is None:
                    return
                name, size, first = found
                window, pos = self._window, self._pos
            start = pos + BLOCK
            stop = start + size
            if stop <= len(window):
                data = window[start:stop]
                pos = stop + (-size & 511)
            else:
                self._pos = pos
                data = self._data(size)
                window, pos = self._window, self._pos
            self.position = self._base + pos
            yield new(TarMember, (name, data, size, first))

    def _open(self) -> None:
        """Read the first bytes and put the decompressor between, when there is a compression."""
        kind, head = self._compression, b""
        if kind == "*":
            while len(head) < BLOCK and (chunk := self._read(CHUNK if self._pos == 0 else BLOCK)):
                head += chunk
            kind = sniff(head)
        self._compression = kind
        if kind:
            pieces = expand(chain((head,) if head else (), read_chunks(self._stream, self.name)), self.name, kind)
            self._read = lambda _size: next(pieces, b"")
            self._seekable, self._skipping = False, None
        else:
            self._window = head

    def _find(self) -> tuple[str, int, int] | None:
        """The next regular file's name, size and first header, with `_pos` at its own header; None at the end."""
        pending: dict[str, str] = {}
        first = self._base + self._pos
        while True:
            self._require(BLOCK)
            header = self._window[self._pos : self._pos + BLOCK]
            raw_name, raw_size, raw_sum, kind, magic, prefix = unpack(header)
            if adler32(header, 0) & 0xFFFF != expected_sum(raw_sum) and not checksum_matches(header):
                if pending and header == _ZEROS:
                    raise self._damaged("no member after the header that gives its name or size")
                if self._ended(header):
                    return None
                first, pending = self._base + self._pos, {}
                continue
            size = self._size(raw_size)
            if kind in (b"x", b"X", b"g", b"L", b"K"):
                self._extend(kind, size, pending)
                continue
            records = {key: value for key, value in {**self.records, **pending}.items() if value}
            name = records.get("path") or text(raw_name)
            # GNU's "ustar  " keeps times there; others fill the two bytes of the version as they like.
            if prefix[0] and magic[:5] == b"ustar" and magic != GNU_MAGIC and "path" not in records:
                name = f"{text(prefix)}/{name}"
            if "size" in records:
                size = self._size(records["size"].encode("utf-8", "surrogateescape"), base=10)
            what = self._what(kind, name, records)
            if what == "file" and (self._select is None or self._select(name)):
                if size > self._limit:
                    raise DataError(
                        f"{self.name}: {name!r} at byte {first} has {size} bytes, more than max_member_bytes="
                        f"{self._limit}; raise that if the archive is to be trusted"
                    )
                return name, size, first
            what = "not selected" if what == "file" else what
            self.skipped[what] = self.skipped.get(what, 0) + 1
            if self._on_skip is not None:
                self._on_skip(what)
            size = 0 if what in _BARE else size
            self._pos += BLOCK + size + (-size & 511)
            self.position = first = self._base + self._pos
            pending = {}

    def _extend(self, kind: bytes, size: int, pending: dict[str, str]) -> None:
        """Take in a header that says more about the next member (or, "g", about all that follow)."""
        if size > _MAX_HEADER:
            raise self._damaged(f"an extended header of {size} bytes")
        where = f"{self.name}, byte {self._base + self._pos}"
        body = self._data(size)
        if kind == b"L":
            pending.setdefault("path", text(body))
        elif kind == b"g":
            self.records.update(parse_pax(body, where))
        elif kind != b"K":
            pending.update(parse_pax(body, where))

    def _what(self, kind: bytes, name: str, records: dict[str, str]) -> str:
        if kind == b"S" or any(key.startswith("GNU.sparse.") for key in records):
            raise DataError(
                f"{self.name}: {name!r} at byte {self._base + self._pos} is stored as a sparse file, which is not "
                "supported; write the archive again without --sparse"
            )
        if kind == b"M":
            raise DataError(
                f"{self.name}: {name!r} at byte {self._base + self._pos} began on another volume; archives of several "
                "volumes are not supported"
            )
        if kind == b"\0" and name.endswith("/"):
            return "directory"  # as V7 tar wrote them
        return KINDS.get(kind, "other")

    def _size(self, field: bytes, base: int = 8) -> int:
        try:
            size = parse_number(field) if base == 8 else int(field)
        except ValueError:
            size = -1
        if size < 0:
            raise self._damaged(f"no size can be read from {field!r}")
        return size

    def _data(self, size: int) -> bytes:
        """The bytes after the header at `_pos`; moves on to the next header."""
        start = self._pos + BLOCK
        padded = size + (-size & 511)
        part: bytes | memoryview = self._window[start : start + size]
        parts, have = [part], len(part)
        self._pos = start + padded
        while have < size:
            self._base, self._pos = self._base + len(self._window), padded - have
            # Whole blocks keep the windows that follow aligned, so that no header is split between two.
            chunk = self._read(min(max(CHUNK, self._pos), _PIECE))
            if not chunk:
                self._cut(self._base, f"{size - have} of a member's {size} bytes are missing")
            part = chunk if len(chunk) <= size - have else memoryview(chunk)[: size - have]
            parts.append(part)
            have += len(part)
            self._window = chunk
        return b"".join(parts)

    def _require(self, size: int) -> None:
        """Have `size` bytes from `_pos` on in the window.

        Raises:
            TruncatedError: the stream ends before.
        """
        have = self._advance(size)
        if have < size:
            at = self._base + have
            if at == 0:
                raise TruncatedError(f"{self.name}: empty archive (0 bytes); a tar archive has at least 1024")
            what = "inside a header" if have else "the two zero blocks that end an archive are missing"
            self._cut(at, what)

    def _advance(self, size: int) -> int:
        """Slide the window to `_pos` and fill it up to `size` bytes; how many it has, fewer at the stream's end."""
        window, over = self._window, self._pos - len(self._window)
        if over <= -size:
            return size
        rest = self._skip(over) if over > 0 else window[self._pos :]
        parts, have = ([rest] if rest else []), len(rest)
        self._base, self._pos = self._base + self._pos, 0
        while have < size and (chunk := self._read(CHUNK)):
            parts.append(chunk)
            have += len(chunk)
        self._window = parts[0] if len(parts) == 1 else b"".join(parts)
        return have

    def _skip(self, size: int) -> bytes:
        """Pass over `size` bytes of the stream, from the window's end; what was read beyond them."""
        at = self._base + len(self._window)
        if self._seekable and size >= BLOCK:
            here = self._stream.tell()
            there = self._stream.seek(0, 2)
            if there < here + size:  # seeking beyond the end would succeed
                self._cut(at + there - here, f"{here + size - there} bytes were to follow")
            self._stream.seek(here + size)
        elif self._skipping is not None:
            passed = self._skipping(size)
            if passed is not None and passed < size:
                self._cut(at + passed, f"{size - passed} bytes were to follow")
        else:
            while size > 0:
                chunk = self._read(CHUNK)
                if not chunk:
                    self._cut(at, f"{size} bytes were to follow")
                at += len(chunk)
                size -= len(chunk)
            return chunk[size:] if size else b""  # `size` is now minus what was read too much
        return b""

    def _ended(self, header: bytes) -> bool:
        """Whether the archive ends at this block, which is no header; False when another archive follows."""
        if header != _ZEROS:
            raise self._damaged("no tar header")
        zeros = 1
        self._pos += BLOCK
        while zeros < 2 or self._concatenated:
            have = self._advance(BLOCK)
            if have == 0 and zeros > 1:
                break
            if have < BLOCK:
                self._cut(self._base + have, "inside the two zero blocks that end an archive")
            if self._window[self._pos : self._pos + BLOCK] != _ZEROS:
                if zeros < 2:
                    raise self._damaged("not the second of the two zero blocks that end an archive")
                return False
            zeros += 1
            self._pos += BLOCK
        if self._compression:
            while self._read(CHUNK):  # up to the compression's own checksum
                pass
        return True

    def _damaged(self, found: str) -> DataError:
        at = self._base + self._pos
        if at == 0:
            return DataError(f"{self.name}: not a tar archive: found {found} at its beginning")
        return DataError(
            f"{self.name}: damaged at byte {at}: found {found}; the members before it are whole. When reading began at "
            "a saved position, check that the archive is still the same"
        )

    def _cut(self, at: int, what: str) -> NoReturn:
        raise TruncatedError(
            f"{self.name}: the archive was cut at byte {at}: {what}; the members before it are whole. "
            "Fetch or write it again"
        )


def check_mode(mode: str) -> str:
    """The compression that `mode` asks for: one of `COMPRESSIONS`, "" for none, "*" to find it out."""
    if mode in ("r", "r:*", "r|*"):
        return "*"
    if mode[:2] in ("r:", "r|") and mode[2:] in ("", *COMPRESSIONS):
        return mode[2:]
    raise ValueError(f"mode {mode!r} is not one of 'r:*', 'r|*', 'r:' and {', '.join(f'r:{c}' for c in COMPRESSIONS)}")
