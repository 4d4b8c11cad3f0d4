"""Read zip archives: members in the order they lie in the archive, each once, checked against their CRC.

    >>> import io, zipfile
    >>> buffer = io.BytesIO()
    >>> with zipfile.ZipFile(buffer, "w") as archive:
    ...     archive.writestr("a/0001.txt", b"hi")
    >>> for member in ZipReader(io.BytesIO(buffer.getvalue()), "a.zip"):
    ...     print(member.name, member.data, member.offset)
    a/0001.txt b'hi' 0

Two ways. A stream that can seek, or whose `ranged()` gives one that can (as S3 streams have), is read by the directory
at the archive's end, which knows all. Any other is read from its beginning by the header before each
member; the directory is compared with what came when it is reached. Understood: stored, deflate, bzip2, LZMA; zip64;
names in UTF-8 and code page 437. Source: PKWARE's APPNOTE.TXT 6.3.10; section numbers below are its.
"""

from __future__ import annotations

import errno
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from pipes.errors import DataError, PipesError, TruncatedError
from pipes.formats.chunks import read_up_to
from pipes.formats.zip_members import METHODS, Entry, ForwardBytes, inflate, name_of, sizes_of

__all__ = ["MAX_MEMBER_BYTES", "ReadsInFull", "ZipMember", "ZipReader"]

MAX_MEMBER_BYTES = 1 << 30
# The zip64 end record (4.3.14) is no longer than this.
_LONGEST = 1 << 16
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_ENCRYPTED, _DESCRIPTOR, _PATCH = 1, 8, 32


class ZipMember(NamedTuple):
    """A regular file of an archive; `offset` is the byte of its local header in the archive."""

    name: str
    data: bytes
    size: int
    offset: int


class ZipReader:
    """The regular files of a zip archive, by the place of their data, read once from a stream.

    Args:
        stream: a binary stream whose byte 0 is the archive's; see above for those that cannot seek.
        name: what errors call the archive.
        offset: where to begin: a `position` of an earlier reader.
        select: whether a member of this name is wanted; the data of others are passed over.
        max_member_bytes: largest member that is unpacked, in bytes; None for no limit.
        on_skip: told the kind of each member that is not given.

    Attributes:
        position: the byte of the next member's local header.
        skipped: how many members were not given, by kind: "directory", "symbolic link", "not selected".

    Raises:
        TruncatedError: the archive is empty or cut; of a stream without seek, after all complete members.
        DataError: it is no zip archive, or is damaged (CRC, sizes, members that overlap, a directory that has data); a
            wanted member is encrypted, packed by another method or larger than `max_member_bytes`; or its size stands
            behind it (a data descriptor) and the stream cannot seek.
    """

    def __init__(
        self,
        stream: Any,
        name: str,
        *,
        offset: int = 0,
        select: Callable[[str], bool] | None = None,
        max_member_bytes: int | None = MAX_MEMBER_BYTES,
        on_skip: Callable[[str], object] | None = None,
    ) -> None:
        self.name = name
        self.position = offset
        self.skipped: dict[str, int] = {}
        self._stream = stream
        self._select = select
        self._limit = max_member_bytes
        self._on_skip = on_skip
        self._members = self._walk()

    def __iter__(self) -> Iterator[ZipMember]:
        return self._members

    def _walk(self) -> Iterator[ZipMember]:
        if getattr(self._stream, "seekable", bool)():
            yield from self._by_directory(self._stream)
        elif (ranged := getattr(self._stream, "ranged", None)) is not None:
            # The directory by ranges; the members, which lie in order, from the stream itself.
            with ranged() as seekable:
                yield from self._by_directory(seekable)
        else:
            yield from self._by_headers()

    def _by_directory(self, seekable: Any) -> Iterator[ZipMember]:
        entries, end = self._directory(seekable)
        source = ForwardBytes(self._stream, self.name, known=True)
        # Of two at one place, the second overlaps the first.
        entries.sort(key=lambda entry: entry.offset)
        if entries and entries[0].offset < 0:
            raise DataError(
                f"{self.name}: damaged: by its directory, {entries[0].name!r} lies before the archive's beginning"
            )
        for entry, stop in zip(entries, [*(entry.offset for entry in entries[1:]), end], strict=False):
            if entry.offset < self.position:
                continue
            if self._wanted(entry):
                member = self._member(source, entry, stop)
                self.position = stop
                yield member
            self.position = stop

    def _directory(self, seekable: Any) -> tuple[list[Entry], int]:
        """All entries of the directory, and the byte it begins at."""
        size = seekable.seek(0, 2)
        if not size:
            raise self._empty()
        try:
            file: Any = ReadsInFull(seekable)
            with zipfile.ZipFile(file) as archive:
                comment = len(archive.comment)
                seekable.seek(size - 22 - comment)
                tail = read_up_to(seekable.read, 22)
                entries = [
                    Entry(
                        info.orig_filename,
                        info.flag_bits,
                        info.compress_type,
                        info.CRC,
                        info.compress_size,
                        info.file_size,
                        info.header_offset,
                        info.external_attr >> 16,
                    )
                    for info in archive.infolist()
                ]
                end = archive.start_dir
        except (OSError, PipesError):
            raise
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
            hidden = error.__context__
            if isinstance(hidden, OSError) and hidden.errno != errno.EINVAL:  # else a seek before the beginning
                raise hidden from None
            seekable.seek(0)
            if read_up_to(seekable.read, 4) == b"PK\3\4":
                self._cut(size, "the directory at its end is missing or damaged", error)
            raise DataError(f"{self.name}: not a zip archive: {error}") from error
        if tail[:4] == b"PK\5\6" and comment < int.from_bytes(tail[20:], "little"):
            self._cut(size, "inside the comment at its end")
        return entries, end

    def _by_headers(self) -> Iterator[ZipMember]:
        source = ForwardBytes(self._stream, self.name)
        passed: list[int] = []
        while True:
            here = self.position
            mark = source.take(here, 4, "inside the header of a member" if here else "")
            if mark in (b"PK\1\2", b"PK\5\6", b"PK\6\6"):
                self._compare(source, passed, mark)
                return
            if mark != b"PK\3\4":
                at = "not a zip archive" if here == 0 else f"damaged at byte {here}"
                raise DataError(f"{self.name}: {at}: found no header of a member, but {mark!r}")
            passed.append(here)
            entry = self._local(source, here, mark)
            if self._wanted(entry):
                data = self._data(source, entry)
                self.position = source.position
                yield ZipMember(_shown(entry.name), data, len(data), here)
            else:
                self.position = source.position + entry.packed
                source.take(self.position, 0, f"{entry.name!r} was to end there")

    def _local(self, source: ForwardBytes, offset: int, mark: bytes = b"") -> Entry:
        """The entry that the local header (4.3.7) at `offset` tells; leaves `source` at the member's data."""
        rest = source.take(offset + len(mark), 30 - len(mark), "inside the header of a member")
        mark, _, flags, method, _, _, crc, packed, size, named, extras = _LOCAL.unpack(mark + rest)
        if mark != b"PK\3\4":
            raise DataError(f"{self.name}: damaged at byte {offset}: found {mark!r} for the header of a member")
        after = source.take(offset + 30, named + extras, "inside the header of a member")
        if not source.known and flags & _DESCRIPTOR:
            raise DataError(
                f"{self.name}: {name_of(after[:named], flags)!r} at byte {offset} has its size behind its data (a data "
                "descriptor), which a stream that cannot seek does not tell; open the archive as a file or by ranges, "
                "or write it to a file that can seek"
            )
        size, packed, _ = sizes_of(after[named:], size, packed, 0)
        return Entry(name_of(after[:named], flags), flags, method, crc, packed, size, offset, 0)

    def _member(self, source: ForwardBytes, entry: Entry, stop: int) -> ZipMember:
        """The member of an entry of the directory; `stop` is where the next begins."""
        local = self._local(source, entry.offset)
        if local.name != entry.name:
            raise DataError(
                f"{self.name}: damaged: the directory says {entry.name!r} and the header at byte {entry.offset} "
                f"{local.name!r}"
            )
        if source.position + entry.packed > stop:
            raise DataError(
                f"{self.name}: {entry.name!r} at byte {entry.offset} overlaps what follows at byte {stop}; an archive "
                "made so unpacks to far more than it holds, and is refused"
            )
        data = self._data(source, entry)
        return ZipMember(_shown(entry.name), data, len(data), entry.offset)

    def _data(self, source: ForwardBytes, entry: Entry) -> bytes:
        """The unpacked, checked data that stand where `source` is."""
        where = f"{self.name}: {entry.name!r} at byte {entry.offset}"
        if entry.method not in METHODS:
            raise DataError(f"{where} is packed by method {entry.method}; known are {', '.join(METHODS.values())}")
        # What does not shrink may grow by a little; a header that lies about the packed size does so by much.
        if self._limit is not None and max(entry.size, entry.packed - entry.packed // 8 - 1024) > self._limit:
            raise DataError(
                f"{where} has {max(entry.size, entry.packed)} bytes, more than max_member_bytes={self._limit}; "
                "raise that if the archive is to be trusted"
            )
        what = f"{entry.name!r} has {entry.packed} bytes"
        data = inflate(source.take(source.position, entry.packed, what), entry, where)
        if zlib.crc32(data) != entry.crc:
            raise DataError(f"{where} is damaged: its CRC is {zlib.crc32(data):08x}, and should be {entry.crc:08x}")
        return data

    def _wanted(self, entry: Entry) -> bool:
        if entry.name.endswith("/"):
            # It has no data (4.3.8), though those who pack it all the same have two bytes of deflate for nothing.
            if entry.size or entry.crc:
                raise DataError(
                    f"{self.name}: damaged: {entry.name!r} at byte {entry.offset} has the name of a directory and "
                    f"{entry.size} bytes (CRC {entry.crc:08x}) of data; fetch or write the archive again"
                )
            kind = "directory"
        elif stat.S_ISLNK(entry.mode):
            kind = "symbolic link"
        elif self._select is not None and not self._select(_shown(entry.name)):
            kind = "not selected"
        elif entry.flags & (_ENCRYPTED | _PATCH):
            what = "encrypted" if entry.flags & _ENCRYPTED else "a patch"
            raise DataError(
                f"{self.name}: {entry.name!r} at byte {entry.offset} is {what}, which is not supported; write the "
                "archive again without"
            )
        else:
            return True
        self.skipped[kind] = self.skipped.get(kind, 0) + 1
        if self._on_skip is not None:
            self._on_skip(kind)
        return False

    def _compare(self, source: ForwardBytes, passed: list[int], mark: bytes) -> None:
        """Read the directory (4.3.12) up to the end record, and check that it has the members that came."""
        listed, start, what = [], passed[0] if passed else self.position, "inside the directory at its end"
        while mark == b"PK\1\2":
            fields = _CENTRAL.unpack(mark + source.take(source.position, _CENTRAL.size - 4, what))
            packed, size, named, extras, comment, offset = *fields[8:13], fields[16]
            after = source.take(source.position, named + extras + comment, what)
            listed.append(sizes_of(after[named : named + extras], size, packed, offset)[2])
            mark = source.take(source.position, 4, what)
        if mark == b"PK\6\6":
            length = int.from_bytes(source.take(source.position, 8, what), "little")
            source.take(source.position, min(length, _LONGEST) + 20, what)
            mark = source.take(source.position, 4, what)
        if mark != b"PK\5\6":
            raise DataError(f"{self.name}: damaged at byte {source.position - 4}: found no end record, but {mark!r}")
        record = source.take(source.position, 18, what)
        source.take(source.position, int.from_bytes(record[16:], "little"), "inside the comment at its end")
        if sorted(offset for offset in listed if offset >= start) != passed:
            raise DataError(
                f"{self.name}: its directory does not list the members that came; some were deleted or are hidden. "
                "Open it as a file or by ranges, where the directory says what is there"
            )

    def _empty(self) -> TruncatedError:
        return TruncatedError(f"{self.name}: empty archive (0 bytes); a zip archive has at least 22")

    def _cut(self, at: int, what: str, cause: Exception | None = None) -> NoReturn:
        raise TruncatedError(
            f"{self.name}: the archive was cut at byte {at}: {what}. Fetch or write it again"
        ) from cause


class ReadsInFull:
    """A file as zipfile expects it: it reads in full, and a seek to before its beginning raises OSError."""

    def __init__(self, inner: Any) -> None:
        self.tell, self._read, self._seek = inner.tell, inner.read, inner.seek

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return bytes(self._read(size)) if size < 0 else read_up_to(self._read, size)

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return int(self._seek(offset, whence))
        except PipesError:
            raise
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from error


def _shown(name: str) -> str:
    """The name that users see: what follows a zero byte is no part of it."""
    return name.partition("\0")[0]
