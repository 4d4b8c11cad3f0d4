"""Write the members of an archive below a folder, and nowhere else.

    >>> import io, tempfile, zipfile
    >>> buffer = io.BytesIO()
    >>> with zipfile.ZipFile(buffer, "w") as archive:
    ...     archive.writestr("a/0001.txt", b"hi")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.removeprefix(folder) for path in extract_archive("a.zip", folder, stream=buffer)]
    ['/a/0001.txt']

Contract
- Nothing is written outside the folder, whatever members are called and whatever links stand in it already: each
  folder on the way is opened without following links, and files are made relative to it.
- Only regular files are written, with the permissions of new files; a link, device or fifo is an error.
- A file has its name only when it is whole. What breaks off leaves the files before it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from pipes.errors import DataError
from pipes.formats.tar import TarReader
from pipes.formats.zip import MAX_MEMBER_BYTES, ZipReader

__all__ = ["extract_archive"]

# A member, the end of an archive without members, the mark before those once split.
_ZIP = (b"PK\3\4", b"PK\5\6", b"PK\7\x08")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def extract_archive(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    stream: Any = None,
    select: Callable[[str], bool] | None = None,
    max_member_bytes: int | None = MAX_MEMBER_BYTES,
    max_bytes: int | None = None,
) -> Iterator[str]:
    """Write the regular files of a tar (in any compression) or zip archive below `folder`; yield their paths.

    Args:
        path: of the archive; with `stream`, only what errors call it.
        folder: where to write; made where needed.
        stream: a seekable binary stream to read instead of `path`.
        select: which members to write, by their name in the archive.
        max_member_bytes: the largest member that is written, in bytes; None for no limit.
        max_bytes: the most that is written altogether; None for no limit.

    Raises:
        DataError: a member's name is absolute, has "..", or is empty; it is a link, device or fifo; a limit is
            exceeded; the folder has a link where a member needs a folder; or what the readers of both formats raise.
        OSError: something cannot be read or written.
    """
    name = os.fspath(path)
    if stream is None:
        with open(path, "rb") as opened:
            yield from extract_archive(
                name, folder, stream=opened, select=select, max_member_bytes=max_member_bytes, max_bytes=max_bytes
            )
        return
    os.makedirs(folder, exist_ok=True)
    top, left = os.path.abspath(folder), max_bytes
    for member, data in _members(stream, name, select, max_member_bytes):
        parts = _parts(name, member)
        if left is not None:
            left -= len(data)
            if left < 0:
                raise DataError(f"{name}: {member!r} exceeds max_bytes={max_bytes} of all that is written")
        _write(name, top, parts, data)
        yield os.path.join(top, *parts)


def _members(
    stream: Any, name: str, select: Callable[[str], bool] | None, limit: int | None
) -> Iterator[tuple[str, bytes]]:
    stream.seek(0)
    # A tar archive may begin with a member called "PKG-INFO".
    kind = ZipReader if stream.read(4) in _ZIP else TarReader
    stream.seek(0)

    def refuse(what: str) -> None:
        if what not in ("directory", "not selected"):
            raise DataError(f"{name}: a {what} at byte {reader.position} is refused; only regular files are written")

    reader = kind(stream, name, select=select, max_member_bytes=limit, on_skip=refuse)
    for member in reader:
        yield member.name, member.data


def _parts(name: str, member: str) -> list[str]:
    """The member's path below the folder, part by part."""
    parts = [part for part in member.split("/") if part not in ("", ".")]
    if member[:1] == "/" or ".." in parts or "\0" in member or not parts:
        raise DataError(f"{name}: {member!r} is refused: it is no path below the folder")
    return parts


def _write(name: str, top: str, parts: list[str], data: bytes) -> None:
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=here)
            try:
                inner = os.open(part, _FOLDER, dir_fd=here)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                where = os.path.join(top, *parts)
                raise DataError(f"{name}: {where!r} is refused: {part!r} on the way is a link or no folder") from error
            os.close(here)
            here = inner
        part = f".{os.getpid()}-{threading.get_ident()}.part"
        try:
            with open(part, "wb", opener=lambda path, _: os.open(path, _FILE, 0o666, dir_fd=here)) as file:
                file.write(data)
            os.replace(part, parts[-1], src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=here)
            raise
    finally:
        os.close(here)
