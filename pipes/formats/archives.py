"""Stages over archives: `.load_from_tar` and `.load_from_zip`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, no_length
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.formats.decompressing import ArchiveFile
from pipes.formats.records import RecordsRun
from pipes.formats.tar import TarReader, check_mode
from pipes.formats.zip import MAX_MEMBER_BYTES, ZipReader
from pipes.stages.wrapping import as_pipe
from pipes.state import count_from, damaged
from pipes.utils import MemoryStream, StreamWrapper

__all__ = ["TarArchiveLoader", "ZipArchiveLoader", "member_path"]


def member_path(archive: str, member: str) -> str:
    """Return "archive/member" in normal form, always below the archive, whatever the member is called.

    >>> member_path("data/../a.tar", "./x//y.txt"), member_path("s3://b/a.tar", "../../etc/passwd")
    ('a.tar/x/y.txt', 's3://b/a.tar/etc/passwd')
    """
    return _folder_of(archive) + _inside(member)


def _folder_of(archive: str) -> str:
    # In a URL "//" and ".." are part of the key.
    return f"{archive if '://' in archive else os.path.normpath(archive)}/"


def _inside(member: str) -> str:
    if "//" in member or "./" in member or member[:1] == "/" or member[-1:] == ".":
        return os.path.normpath("/" + member.lstrip("/")).lstrip("/")
    return member


def _checked_limit(max_member_bytes: int | None) -> int | None:
    most = whole_or_none("max_member_bytes", max_member_bytes)
    if most is not None and most < 0:
        raise ValueError(f"max_member_bytes={most}: bytes, at least 0, or None for no limit")
    return most


def _members(folder: str, reader: TarReader | ZipReader) -> Iterator[tuple[str, StreamWrapper]]:
    for name, data, _, _ in reader:
        path = folder + _inside(name)
        yield path, MemoryStream(data, path)


def _packed(path: str, stream: Any) -> tuple[str, Any]:
    """The path, and the archive's own stream where `decompress` opened it."""
    inner = stream.file_obj if isinstance(stream, StreamWrapper) else stream
    return path, inner.packed if isinstance(inner, ArchiveFile) else stream


class _TarRun(RecordsRun):
    leaves_out = True
    fields: ClassVar[tuple[str, ...]] = ("offset", "records")

    def check_inside(self, inside: dict[str, Any]) -> None:
        count_from(inside, "offset", self.stage)
        records = inside.get("records") or {}
        if not isinstance(records, dict) or not all(isinstance(value, str) for value in records.values()):
            raise damaged(f"'records' of stage {self.stage} are not texts")

    def opened_element(self, element: Any) -> tuple[str, Any]:
        return _packed(*super().opened_element(element))

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        pipe, records = self.pipe, at.get("records") or {}
        self.reader = TarReader(
            stream,
            path,
            mode=pipe.mode,
            offset=at.get("offset", 0),
            records=records,
            select=pipe.select,
            concatenated=pipe.concatenated,
            max_member_bytes=pipe.max_member_bytes,
            on_skip=None if self.tally is None else self.tally.leave_out,
        )
        return _members(_folder_of(path), self.reader)

    def where(self) -> tuple[Any, ...]:
        reader = self.reader
        return reader.position, dict(reader.records) if reader.records else None


@functional_datapipe("load_from_tar")
class TarArchiveLoader(IterDataPipe[tuple[str, StreamWrapper]]):
    """Give every regular file of each tar archive, in order, as `(archive path/member name, stream)`.

    Args:
        datapipe: gives `(path, binary stream)`; the stream need not seek, and is closed after its archive when it is a
            `StreamWrapper`.
        mode: as in `tarfile`: "r:*" finds out the compression (gz, bz2, xz, zst); "r|*" also never seeks.
        length: what `len()` says; -1 is unknown.
        select: which members to give, by their name in the archive; the others are passed over without reading them
            where the stream can seek.
        concatenated: read on after an archive's end mark.
        max_member_bytes: the largest member that is read into memory, in bytes; None for no limit.
        on_error, max_errors: "skip" leaves out the rest of bad archives, up to so many; see the page on errors.

    A member's stream holds its bytes in memory, so it stays readable in a shuffle buffer. Directories, links and the
    like are left out and counted. The position inside an archive is a byte offset: a resume seeks there.

    Raises, while iterating, TruncatedError for an empty or cut archive after its complete members, DataError for bytes
    that are no archive; both name it. TypeError for elements that are not `(path, stream)`.

    >>> import io, tarfile
    >>> from pipes.iter import IterableWrapper
    >>> buffer = io.BytesIO()
    >>> with tarfile.open(fileobj=buffer, mode="w") as archive:
    ...     member = tarfile.TarInfo("0001.txt"); member.size = 2
    ...     archive.addfile(member, io.BytesIO(b"hi"))
    >>> pipe = IterableWrapper([("a.tar", io.BytesIO(buffer.getvalue()))]).load_from_tar()
    >>> [(path, stream.read()) for path, stream in pipe]
    [('a.tar/0001.txt', b'hi')]
    """

    run_class = _TarRun
    _calls = ("select",)

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        mode: str = "r:*",
        length: int = -1,
        *,
        select: Callable[[str], bool] | None = None,
        concatenated: bool = False,
        max_member_bytes: int | None = None,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        check_mode(mode)
        self.datapipe = as_pipe(datapipe)
        self.mode = mode
        self.length = whole("length", length)
        self.select = select
        self.concatenated = concatenated
        self.max_member_bytes = _checked_limit(max_member_bytes)
        self.on_error = on_error
        self.max_errors = max_errors

    def _length(self, shard: Shard) -> int:
        if self.length < 0:
            raise no_length(self, "pass length= if you know how many members there are")
        return self.length


class _ZipRun(RecordsRun):
    leaves_out = True
    fields: ClassVar[tuple[str, ...]] = ("offset",)

    def opened_element(self, element: Any) -> tuple[str, Any]:
        return _packed(*super().opened_element(element))

    def read(self, path: str, stream: Any, at: dict[str, Any]) -> Iterator[Any]:
        self.reader = ZipReader(
            stream,
            path,
            offset=at.get("offset", 0),
            select=self.pipe.select,
            max_member_bytes=self.pipe.max_member_bytes,
            on_skip=None if self.tally is None else self.tally.leave_out,
        )
        return _members(_folder_of(path), self.reader)

    def where(self) -> tuple[Any, ...]:
        return (self.reader.position,)


@functional_datapipe("load_from_zip")
class ZipArchiveLoader(IterDataPipe[tuple[str, StreamWrapper]]):
    """Give every regular file of each zip archive as `(archive path/member name, stream)`, by their place in it.

    Args:
        datapipe: gives `(path, binary stream)`, closed after its archive when it is a `StreamWrapper`. Files and S3
            objects are read by their directory; a stream that can neither seek nor give ranges from its beginning, as
            long as its headers tell the sizes.
        length: what `len()` says; -1 is unknown.
        select: which members to give, by their name in the archive; the others are passed over.
        max_member_bytes: the largest member that is unpacked, in bytes, so that a small archive cannot fill the memory;
            None for no limit.
        on_error, max_errors: "skip" leaves out the rest of bad archives, up to so many; see the page on errors.

    Members are stored or packed by deflate, bzip2 or LZMA. Each is checked against its CRC, and its stream holds its
    bytes in memory. Directories, and links where a directory tells them, are left out and counted. The position inside
    an archive is a byte offset: a resume goes there.

    Raises ValueError for a limit below zero; while iterating, TruncatedError for an empty or cut archive, DataError for
    one that is damaged, encrypted or over the limit; they name archive and member. TypeError for elements that are not
    `(path, stream)`.

    >>> import io, zipfile
    >>> from pipes.iter import IterableWrapper
    >>> buffer = io.BytesIO()
    >>> with zipfile.ZipFile(buffer, "w") as archive:
    ...     archive.writestr("0001.txt", b"hi")
    >>> pipe = IterableWrapper([("a.zip", io.BytesIO(buffer.getvalue()))]).load_from_zip()
    >>> [(path, stream.read()) for path, stream in pipe]
    [('a.zip/0001.txt', b'hi')]
    """

    run_class = _ZipRun
    _calls = ("select",)

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        length: int = -1,
        *,
        select: Callable[[str], bool] | None = None,
        max_member_bytes: int | None = MAX_MEMBER_BYTES,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_policy(on_error, max_errors)
        self.datapipe = as_pipe(datapipe)
        self.length = whole("length", length)
        self.select = select
        self.max_member_bytes = _checked_limit(max_member_bytes)
        self.on_error = on_error
        self.max_errors = max_errors

    def _length(self, shard: Shard) -> int:
        if self.length < 0:
            raise no_length(self, "pass length= if you know how many members there are")
        return self.length
