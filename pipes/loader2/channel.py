"""One duplex Unix socket between the main process and a worker: framed messages and file descriptors.

Contract.
Success: messages arrive whole, once, in the order in which they were sent, each with exactly its own descriptors.
    `send` returns when the kernel has taken the message; `post` returns at once and keeps what did not fit for `flush`
    or `wait`. `feed` returns what has arrived whole and never waits for the rest of a message.
Failure: when the other side is gone, everything that arrived whole is still handed over; then `feed` and `recv` raise
    `ChannelClosed`. Half a message is dropped. `send` raises `ChannelClosed`; `post` and `flush` stay silent, because
    reading is what reports a death. A channel whose read or write was torn by an exception (Ctrl-C) counts as closed.
Stop: `close` is idempotent and closes the socket and every descriptor that was queued or not yet handed over.
Descriptors: `send` and `post` own the descriptors given to them and close them on every path. Those that came with a
    message belong to whoever took the message. All are close-on-exec.
Threads: one thread at a time, except for `close`.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from pipes.errors import ChannelClosed
from pipes.loader2 import fault_points

__all__ = ["Channel", "Message", "close_descriptors", "wait"]

_HEADER = struct.Struct("<HBBQ")
_MAGIC = 0x9D5E
_CHUNK = 1 << 16
# Linux refuses more than 253 descriptors in one sendmsg.
_MAX_DESCRIPTORS = 253
_ANCILLARY = socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
_MAX_VECTOR = 512
_RECV_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# Without it a write to a dead peer is a signal on the platforms where Python does not ignore SIGPIPE.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)

# What the calls say when the other side, or this socket, is gone.
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN)

Bytes = bytes | bytearray | memoryview


class Message(NamedTuple):
    """A whole message; its descriptors belong to whoever takes it.

    >>> Message(3, b"body", [])
    Message(kind=3, body=b'body', fds=[])
    """

    kind: int
    body: bytes | bytearray
    fds: list[int]


class _Outgoing:
    """A message on its way out: the buffers that are left and the descriptors that have not left yet."""

    __slots__ = ("buffers", "fds")

    def __init__(self, kind: int, parts: Iterable[Bytes], fds: Sequence[int]) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        header = _HEADER.pack(_MAGIC, kind, len(fds), sum(view.nbytes for view in views))
        self.buffers = deque([memoryview(header), *(view for view in views if view.nbytes)])
        self.fds = list(fds)

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.buffers)

    def advance(self, count: int) -> None:
        while count:
            first = self.buffers[0]
            if count < first.nbytes:
                self.buffers[0] = first[count:]
                return
            count -= first.nbytes
            self.buffers.popleft()


class Channel:
    """One end of a duplex socket that carries framed messages and descriptors.

    >>> main, worker = Channel.pair()
    >>> worker.send(1, [b"hello ", b"main"])
    >>> main.feed()
    [Message(kind=1, body=b'hello main', fds=[])]
    >>> main.feed()
    []
    >>> worker.close()
    >>> main.feed()
    Traceback (most recent call last):
    pipes.errors.ChannelClosed: the other end of the channel is closed
    >>> main.close()
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outbox: deque[_Outgoing] = deque()
        self._tail = bytearray()
        self._head: tuple[int, int] = (0, 0)
        self._body: bytearray | None = None
        self._got = 0
        self._arrived: deque[int] = deque()
        self._inbox: deque[Message] = deque()
        self._ended = False
        self._torn = False
        self._unwritable = False

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected channels.

        >>> a, b = Channel.pair()
        >>> a.close(), b.close()
        (None, None)
        """
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    def fileno(self) -> int:
        """The socket's descriptor, -1 when closed; `multiprocessing.connection.wait` takes the channel itself."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return self._sock.fileno() < 0

    @property
    def torn(self) -> bool:
        """Whether an exception such as Ctrl-C cut a message in two, so that nothing after it can travel."""
        return self._torn

    @property
    def pending(self) -> int:
        """Bytes that were posted and that the kernel has not taken yet."""
        return sum(message.nbytes for message in self._outbox)

    def send(self, kind: int, parts: Iterable[Bytes] = (), fds: Sequence[int] = ()) -> None:
        """Send one message and wait until the kernel has all of it; raises `ChannelClosed`. Owns `fds`."""
        self._enqueue(kind, parts, fds)
        while not self.flush():
            fault_points.reach("in the middle of a message")
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll()
        if self._unwritable:
            raise ChannelClosed("the other end of the channel is closed")

    def post(self, kind: int, parts: Iterable[Bytes] = (), fds: Sequence[int] = ()) -> None:
        """Queue one message and write what fits now; never waits, and is silent about a dead peer. Owns `fds`.

        `parts` are kept until they are written, so they must not change meanwhile.
        """
        self._enqueue(kind, parts, fds)
        self.flush()

    def flush(self) -> bool:
        """Write what fits now; True when nothing is left to write."""
        if self._torn:
            self._drop_outbox()
        while self._outbox:
            try:
                # Whatever interrupts between here and the count has lost the place in the stream.
                self._torn = True
                self._write(self._outbox[0])
                self._torn = False
            except (BlockingIOError, InterruptedError):
                self._torn = False
                return False
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._torn = False
                self._drop_outbox()
            else:
                if not self._outbox[0].buffers:
                    self._outbox.popleft()
        return True

    def recv(self, timeout: float | None = None) -> Message:
        """Wait for one message; raises `ChannelClosed`, or TimeoutError after `timeout` seconds.

        >>> a, b = Channel.pair()
        >>> a.send(7)
        >>> b.recv(timeout=1.0)
        Message(kind=7, body=b'', fds=[])
        >>> a.close(), b.close()
        (None, None)
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._inbox:
            self._fill()
            if not self._inbox:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not wait([self], timeout=left):
                    raise TimeoutError(f"no message came within {timeout} s")
        return self._inbox.popleft()

    def feed(self) -> list[Message]:
        """The messages that have arrived whole, in order; never waits. Raises `ChannelClosed` when none can follow."""
        self._fill()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    @property
    def buffered(self) -> int:
        """Messages that `recv` left for the next `recv` or `feed`; `wait` counts such a channel as ready."""
        return len(self._inbox)

    def close(self) -> None:
        """Close the socket and all descriptors in the queues; may be called again, and from another thread."""
        self._sock.close()
        self._drop_outbox()
        while self._inbox:
            close_descriptors(self._inbox.popleft().fds)
        close_descriptors(self._arrived)
        self._arrived.clear()

    def __repr__(self) -> str:
        return f"Channel(fd={self.fileno()}, pending={self.pending})"

    def _enqueue(self, kind: int, parts: Iterable[Bytes], fds: Sequence[int]) -> None:
        if len(fds) > _MAX_DESCRIPTORS:
            close_descriptors(fds)
            raise ValueError(f"a message carries at most {_MAX_DESCRIPTORS} descriptors, not {len(fds)}")
        if self._unwritable or self._torn or self.closed:
            close_descriptors(fds)
            self._drop_outbox()
            return
        try:
            message = _Outgoing(kind, parts, fds)
        except BaseException:
            close_descriptors(fds)
            raise
        self._outbox.append(message)

    def _write(self, message: _Outgoing) -> None:
        vector = [message.buffers[i] for i in range(min(len(message.buffers), _MAX_VECTOR))]
        if message.fds:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(message.fds)}i", *message.fds))
            sent = self._sock.sendmsg(vector, [rights], _SEND_FLAGS)
            # The descriptors travel with the first bytes, so a partial send has taken them all.
            close_descriptors(message.fds)
            message.fds = []
        else:
            sent = self._sock.sendmsg(vector, (), _SEND_FLAGS)
        message.advance(sent)

    def _drop_outbox(self) -> None:
        self._unwritable = True
        while self._outbox:
            close_descriptors(self._outbox.popleft().fds)

    def _fill(self) -> None:
        """Move all that has arrived into the inbox; raises when it stays empty for ever."""
        self._ended = self._ended or self._torn
        while not self._ended:
            try:
                # Whatever interrupts between here and the parse has lost bytes: nothing after them can be trusted.
                self._torn = True
                drained = self._read()
                self._parse()
                self._torn = False
                if drained and self._inbox:
                    return
            except (BlockingIOError, InterruptedError):
                self._torn = False
                return
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._torn, self._ended = False, True
        if not self._inbox:
            raise ChannelClosed("the channel is closed" if self.closed else "the other end of the channel is closed")

    def _read(self) -> bool:
        """Read once; True when that certainly took all there was, which saves a call that fails."""
        if self._body is not None:
            view = memoryview(self._body)[self._got :]
            count, ancillary, flags, _ = self._sock.recvmsg_into([view], _ANCILLARY, _RECV_FLAGS)
            self._got += count
            drained = False
        else:
            data, ancillary, flags, _ = self._sock.recvmsg(_CHUNK, _ANCILLARY, _RECV_FLAGS)
            count = len(data)
            # A read stops behind data that came with descriptors.
            drained = 0 < count < _CHUNK and not ancillary
            self._tail += data
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._arrived.extend(struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise OSError(
                errno.EMFILE, "a worker's descriptor could not be taken, too many are open: raise `ulimit -n`"
            )
        if not count:
            self._ended = True
        return drained

    def _parse(self) -> None:
        while True:
            if self._body is not None:
                if self._got < len(self._body):
                    return
                body, self._body = self._body, None
                self._deliver(body)
            if len(self._tail) < _HEADER.size:
                return
            magic, kind, count, length = _HEADER.unpack_from(self._tail)
            if magic != _MAGIC:
                raise ChannelClosed("the channel is damaged: what arrived is not the start of a message")
            self._head = kind, count
            end = _HEADER.size + length
            if len(self._tail) >= end:
                small = bytes(memoryview(self._tail)[_HEADER.size : end])
                del self._tail[:end]
                self._deliver(small)
            else:
                self._got = len(self._tail) - _HEADER.size
                self._body = bytearray(length)
                self._body[: self._got] = self._tail[_HEADER.size :]
                self._tail.clear()

    def _deliver(self, body: bytes | bytearray) -> None:
        kind, count = self._head
        self._inbox.append(Message(kind, body, [self._arrived.popleft() for _ in range(count)]))


def close_descriptors(fds: Iterable[int]) -> None:
    """Close each descriptor, also when one of them is already closed.

    >>> close_descriptors([os.open(os.devnull, os.O_RDONLY)])
    """
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def wait(channels: Sequence[Channel], others: Sequence[int] = (), timeout: float | None = None) -> list[Channel | int]:
    """Wait until a channel can be read or one of the descriptors `others` is ready, writing queued posts meanwhile.

    Returns what is ready (closed and ended peers count as ready), or an empty list after `timeout` seconds. Unlike
    `multiprocessing.connection.wait` it also wakes when a peer makes room for what was posted to it, without which a
    full socket would be a deadlock.

    >>> a, b = Channel.pair()
    >>> wait([b], timeout=0)
    []
    >>> a.send(1)
    >>> wait([b]) == [b]
    True
    >>> a.close(), b.close()
    (None, None)
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        now: list[Channel | int] = [channel for channel in channels if channel.closed or channel.buffered]
        if now:
            return now
        poll = select.poll()
        names: dict[int, Channel | int] = {}
        for channel in channels:
            names[channel.fileno()] = channel
            poll.register(channel, select.POLLIN | (0 if channel.flush() else select.POLLOUT))
        for fd in others:
            names[fd] = fd
            poll.register(fd, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        events = poll.poll(None if left is None else left * 1000)
        ready = [names[fd] for fd, event in events if event != select.POLLOUT]
        if ready or (not events and deadline is not None):
            return ready
