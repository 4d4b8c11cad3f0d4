"""Descriptors handed from process to process: over sockets, and as unnamed files in memory."""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import tempfile

__all__ = ["PIDFD", "is_ready", "open_pidfd", "receive", "send", "unnamed_file"]

#: Linux 5.3 and later; macOS has none.
PIDFD = hasattr(os, "pidfd_open")

_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None where the system has none.

    >>> descriptor = open_pidfd(os.getpid())
    >>> if descriptor is not None: os.close(descriptor)
    """
    if not PIDFD:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        # An old kernel, a sandbox that forbids it, or the process is gone already.
        return None


def is_ready(descriptor: int, seconds: float = 0.0) -> bool:
    """Wait up to `seconds` until `descriptor` can be read, or its other side is gone."""
    poll = select.poll()  # select.select() takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def send(sock: socket.socket, data: bytes, descriptors: list[int]) -> None:
    """Send `data` with `descriptors` attached to its first byte."""
    socket.send_fds(sock, [data], descriptors)


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive up to `size` bytes and `most` descriptors; the descriptors do not survive an exec.

    `b""` means that the other side is gone.
    """
    item = array.array("i").itemsize
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(most * item), _CLOSE_ON_EXEC)
    found = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % item])
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return data, list(found)


def unnamed_file(content: bytes = b"", *, append: bool = False) -> int:
    """Return a descriptor of a file without a name; with `append` every write goes to its end.

    >>> descriptor = unnamed_file(b"abc")
    >>> os.pread(descriptor, 10, 0)
    b'abc'
    >>> os.close(descriptor)
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pipes", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        if append:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
