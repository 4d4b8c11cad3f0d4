"""A local file as a stream that is whole: one that is cut or rewritten while it is read is an error, no short data."""

from __future__ import annotations

import io
import os
import stat
from typing import Any

from pipes.errors import ChangedDataError

__all__ = ["LocalFile", "kind_of", "open_local"]

_BUFFER = 128 * 1024
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """What a file's `st_mode` says that it is, "" for regular files and folders.

    >>> import os
    >>> kind_of(os.stat("/dev/null").st_mode)
    'a device'
    """
    return next((kind for fits, kind in _KINDS if fits(mode)), "")


class LocalFile(io.FileIO):
    """The bytes of a regular file, which must keep its size and its time of change until its end was read.

    A file that another replaces (a rename onto its name) stays readable as it was when it was opened. Changes that
    leave size and time as they were cannot be seen.

    Raises:
        ChangedDataError: at the end of the file, which was cut, continued or rewritten since it was opened.
        OSError: the name is a FIFO, a socket or a device, which might never end, or cannot be opened.
    """

    def __init__(self, name: str) -> None:
        if kind := kind_of(os.stat(name).st_mode):
            raise OSError(f"{name!r} is {kind}, no file: only regular files are read; take it out of the names")
        super().__init__(name, "rb", opener=_open)
        self._opened = self._known()

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if count is None or count < memoryview(buffer).nbytes:
            self._check()
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self._check()
        return data or b""

    def __del__(self) -> None:
        # Streams of pipes close when they are dropped. In a cycle this may come before the wrapper that says so.
        self.close()

    def _dealloc_warn(self, source: Any) -> None:
        """Called by the buffer above, which would tell of a file that its user did not close."""

    def _known(self) -> tuple[int, int]:
        status = os.fstat(self.fileno())
        return status.st_size, status.st_mtime_ns

    def _check(self) -> None:
        if (now := self._known()) != self._opened:
            (before, _), (size, _) = self._opened, now
            how = f"from {before} to {size} bytes" if size != before else f"at the same size of {size} bytes"
            raise ChangedDataError(
                f"{self.name!r} changed while it was read, {how}: what was read may be of both versions. Write to "
                "another name and rename it when it is complete, then read again"
            )


def _open(name: str, flags: int) -> int:
    # A FIFO that took the file's place since it was looked at must not be waited for.
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def open_local(name: str, *, text: bool = False, **textual: Any) -> Any:
    """Open a regular file for reading, as `open` does, but whole or an error; `textual` is encoding, errors, newline.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"abc"), file.flush()
    ...     with open_local(file.name) as stream:
    ...         stream.read()
    b'abc'
    """
    buffered = io.BufferedReader(LocalFile(name), _BUFFER)
    if not text:
        return buffered
    wrapped: Any = io.TextIOWrapper(buffered, **textual)
    wrapped.mode = "r"
    return wrapped
