"""Objects fetched ahead by a few threads, in order, within a number of bytes.

Contract
- Order. Objects are asked for in the order in which they were added, a large one in parts, each by a request of its
  own. A reader gets each object's bytes in order, whoever fetched them when.
- Memory. A part is asked for only when there is room for it in `read_ahead`, which counts bytes that are asked for,
  that arrived, and that a reader was handed last. Threads never wait for a reader, only for the store.
- Progress. A reader whose next bytes were not asked for, and for which there is no room, gets None and reads them by
  itself, a receive at a time: streams may be kept unread, interleaved, or read by many threads, and none waits for
  another. Such receives are the only bytes that do not count.
- Failure. An error is kept where it happened and raised to the reader that comes there. Every part is read by an
  `S3Stream`, so it is retried, resumed, pinned to one version and complete, or an error.
- Stop. After `close` nothing is asked for and what arrives is thrown away; the threads end with their receive, at the
  latest after `read_timeout` of a silent store. Threads are daemons, started when there is work for one more; they end
  when all is fetched, and at the interpreter's exit. A reader goes on by itself.
- Fork. A child has no threads: there every call says so (`here`), without touching the lock.
- A reader may be dropped by the garbage collector in any thread, also one that holds the lock: hence an RLock, and
  no loop over what `drop` changes.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipes.errors import ChangedDataError, StoreNotFoundError
from pipes.sources.s3_buffers import Buffers
from pipes.sources.s3_parts import Fetch, Part
from pipes.sources.s3_stream import S3Stream

if TYPE_CHECKING:
    from pipes.sources.s3_client import S3Store

__all__ = ["LEAST_READ_AHEAD", "ReadAhead"]

#: Bytes; below, parts would be so small that reading directly is faster.
LEAST_READ_AHEAD = 256 << 10
# A quarter of `read_ahead`, so that several connections bring one large object, but not more: each costs a request.
_LARGEST_PART = 16 << 20
_CHUNK = 1 << 20
_KEEP_GOING = 256 << 10
_SECONDS_TO_END = 1.0


class _Stopped(BaseException):
    """Nobody wants the part any more."""


class ReadAhead:
    """Fetches the objects that are added to it; see the contract."""

    def __init__(self, store: S3Store, *, concurrency: int, read_ahead: int, chunk: int | None = None) -> None:
        self._store = store
        self._concurrency, self._room = concurrency, read_ahead
        self._part = min(read_ahead // 4, _LARGEST_PART)
        self._chunk = min(chunk or _CHUNK, self._part)
        self._buffers = Buffers(self._chunk, read_ahead // self._chunk)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._work, self._news = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: dict[Fetch, None] = {}
        self._urgent: deque[tuple[Fetch, Part]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._typical: int | None = None
        self._last = 0
        self._finished, self._closing = False, threading.Event()
        #: Bytes asked for or held now.
        self.used = 0
        _live.add(self)

    def here(self) -> bool:
        """Whether this is the process that the threads belong to."""
        return self._pid == os.getpid()

    def add(self, url: str, *, asleep: bool = False) -> Fetch:
        """Queue an object; raises ValueError for what is no S3 name."""
        fetch = Fetch(url, asleep)
        with self._lock:
            if not self._closing.is_set():
                self._queue[fetch] = None
                self._wake()
        return fetch

    def finish(self) -> None:
        """Say that nothing will be added: the threads end when all is fetched."""
        with self._lock:
            self._finished = True
            self._work.notify_all()

    def answer(self, fetch: Fetch) -> bool:
        """Wait until the store answered about the object; False when its reader has to ask by itself."""
        with self._lock:
            while not fetch.answered:
                if not self._is_coming(fetch):
                    return False
                if fetch.parts[0].error is not None:
                    self._fail(fetch, fetch.parts[0])
                self._wait(fetch)
        return True

    def receive(self, fetch: Fetch) -> tuple[int, bytes | memoryview] | None:
        """The next bytes with their offset, empty at the object's end; None: the reader has to receive by itself."""
        with self._lock:
            self._take_back(fetch)
            fetch.asleep = fetch.asleep and not fetch.next
            while True:
                if fetch.parts and fetch.parts[0].chunks:
                    return self._lend(fetch, fetch.parts[0])
                if fetch.parts and fetch.parts[0].done:
                    part = fetch.parts.popleft()
                    if part.error is not None:
                        self._fail(fetch, part)
                    self._discard(part)
                elif not fetch.parts and fetch.ended():
                    return fetch.next, b""
                elif not self._is_coming(fetch):
                    self.drop(fetch)
                    return None
                else:
                    self._wait(fetch)

    def skip(self, fetch: Fetch, offset: int) -> None:
        """Forget what lies before `offset`; parts that were not asked for yet will begin there."""
        with self._lock:
            self._take_back(fetch)
            fetch.asleep = False
            while fetch.parts and fetch.parts[0].stop <= offset:
                self._discard(fetch.parts.popleft())
            if len(fetch.parts) == 1 and fetch.parts[0].active and fetch.answered:
                part = fetch.parts[0]
                arrived = part.given + sum(map(len, part.chunks))
                if offset - arrived > _KEEP_GOING:
                    self._discard(fetch.parts.popleft())
                    fetch.next = offset
                    self._queue[fetch] = None
            if not fetch.parts:
                fetch.next = max(fetch.next, offset)
            self._wake()

    def drop(self, fetch: Fetch) -> None:
        """Forget an object that nobody reads any more."""
        if not self.here():
            return
        with self._lock:
            fetch.dropped = True
            self._queue.pop(fetch, None)
            while fetch.parts:
                self._discard(fetch.parts.popleft())
            self._take_back(fetch)
            self._wake()

    def close(self, *, wait: bool = True) -> None:
        """Stop fetching; with `wait`, until the threads have ended, but for at most a second."""
        if not self.here():
            return
        with self._lock:
            self._closing.set()
            self._queue.clear()
            self._work.notify_all()
            self._news.notify_all()
            threads = [each for each in self._threads if each is not threading.current_thread()]
        if wait:
            _join(threads, _SECONDS_TO_END)

    def _is_coming(self, fetch: Fetch) -> bool:
        """Whether the next bytes of an object are on their way; asks for them at once if there is room."""
        if self._closing.is_set() or fetch.dropped:
            return bool(fetch.parts) and fetch.parts[0].done
        if fetch.parts:
            return True
        part = self._next_part(fetch, at_least=_KEEP_GOING)
        if part is None:
            return False
        self._urgent.append((fetch, part))
        self._wake()
        return not self._closing.is_set()

    def _wait(self, fetch: Fetch) -> None:
        fetch.waited = True
        try:
            self._news.wait()
        finally:
            fetch.waited = False

    def _lend(self, fetch: Fetch, part: Part) -> tuple[int, bytes | memoryview]:
        data, offset = part.chunks.popleft(), part.given
        part.given += len(data)
        part.reserved -= len(data)
        fetch.lent = data
        return offset, data

    def _take_back(self, fetch: Fetch) -> None:
        lent, fetch.lent = fetch.lent, b""
        self.used -= len(lent)
        if lent:
            self._buffers.give(lent)
            self._wake()

    def _fail(self, fetch: Fetch, part: Part) -> None:
        error = part.error
        assert error is not None
        self._discard(part)
        self.drop(fetch)
        raise error

    def _discard(self, part: Part) -> None:
        """Give the room of a part back: now, or when the thread that works on it lets go."""
        part.dropped = True
        part.chunks.clear()
        if not part.active:
            reserved, part.reserved = part.reserved, 0
            self.used -= reserved

    def _next_part(self, fetch: Fetch, at_least: int = 0) -> Part | None:
        """Take the next part of an object out of what is to be asked for; None when there is no room for it.

        It may be shorter, down to `at_least` bytes.
        """
        size, start = fetch.size, fetch.next
        if size is None:
            asked = self._part
            count = asked if self._typical is None else min(asked, max(2 * self._typical, _KEEP_GOING))
        else:
            # No small rest for a request of its own.
            count = size - start if size - start <= self._part * 5 // 4 else self._part
            count = min(count, _KEEP_GOING) if fetch.asleep else count
            asked = start + count
        if self.used and self.used + count > self._room:
            if not at_least or self._room - self.used < at_least:
                return None
            count = min(count, self._room - self.used)
            asked = asked if size is None else start + count
        self._last = count
        part = Part(start, start + count, asked)
        fetch.parts.append(part)
        fetch.next = part.stop
        part.reserved = count
        self.used += count
        if size is not None and fetch.next >= size:
            self._queue.pop(fetch, None)
        return part

    def _job(self) -> tuple[Fetch, Part] | None:
        if self._urgent:
            return self._urgent.popleft()
        for fetch in list(self._queue):
            if fetch.holds_up():
                continue
            part = self._next_part(fetch)
            return None if part is None else (fetch, part)
        return None

    def _wake(self) -> None:
        """Have one more thread look for work, if there may be some."""
        if self._closing.is_set() or not (self._urgent or self._queue):
            return
        if self._idle:
            self._work.notify()
        elif len(self._threads) < self._concurrency:
            thread = threading.Thread(target=self._run, name="pipes S3 fetch", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more, or the interpreter is ending
                self._threads.discard(thread)
                if not self._threads:
                    self.close(wait=False)

    def _run(self) -> None:
        """What a thread does."""
        try:
            while True:
                with self._lock:
                    while (job := None if self._closing.is_set() else self._job()) is None:
                        if self._closing.is_set() or (self._finished and not self._queue):
                            return
                        self._idle += 1
                        self._work.wait()
                        self._idle -= 1
                    if self.used + self._last <= self._room:
                        self._wake()
                self._fetch(*job)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                self._work.notify_all()

    def _fetch(self, fetch: Fetch, part: Part) -> None:
        """Bring one part, chunk by chunk."""
        stream, error = None, None

        def pause(seconds: float) -> None:
            if self._closing.wait(seconds) or part.dropped:
                raise _Stopped

        try:
            stream = self._stream(fetch, part, pause)
            if fetch.size is None:
                self._learn(fetch, part, stream)
            while self._put(fetch, part, stream, stream.receive()):
                pass
        except _Stopped:
            pass
        except BaseException as raised:
            error = raised
        finally:
            if stream is not None:
                stream.close()
            self._end(fetch, part, error)

    def _stream(self, fetch: Fetch, part: Part, pause: Callable[[float], None]) -> S3Stream:
        """Open one part, of the version that the first one proved to have."""
        version, span = fetch.version, {"offset": part.start, "stop": part.asked}
        known: Any = {"etag": fetch.etag, "size": fetch.size, "version": version, **span}
        try:
            return S3Stream(
                self._store, fetch.bucket, fetch.key, chunk=self._chunk, buffers=self._buffers, wait=pause, **known
            )
        except (ChangedDataError, StoreNotFoundError):
            if fetch.version == version:
                raise
            return self._stream(fetch, part, pause)  # it was not known yet

    def _learn(self, fetch: Fetch, part: Part, stream: S3Stream) -> None:
        """Fit a part that was asked for before the object's size was known."""
        with self._lock:
            self._typical = stream.size
            stop = min(stream.size, part.asked)
            more = stop - part.stop
            if more > 0 and self.used + more > self._room:
                more, stop = 0, part.stop
            if not part.dropped:
                part.stop = fetch.next = stop
                part.reserved += more
                self.used += more
            stream.stop = stop

    def _put(self, fetch: Fetch, part: Part, stream: S3Stream, data: bytes | memoryview) -> bool:
        """Take in what arrived; whether more is wanted."""
        with self._lock:
            if not fetch.answered and fetch.parts and fetch.parts[0] is part:
                fetch.answered, fetch.size, fetch.etag = True, stream.size, stream.etag
                fetch.checksum, fetch.version = stream.checksum, stream.version
                if fetch.next >= stream.size:
                    self._queue.pop(fetch, None)
                else:
                    self._wake()
            if data and not part.dropped:
                part.chunks.append(data)
            if isinstance(data, bytes):
                self._buffers.make_room(len(data))
            if fetch.waited:
                self._news.notify_all()
            return bool(data) and not part.dropped and not self._closing.is_set() and stream.position < part.stop

    def _end(self, fetch: Fetch, part: Part, error: BaseException | None) -> None:
        with self._lock:
            part.active = False
            if part.dropped:
                self._discard(part)
            elif not self._closing.is_set() or error is not None or self._is_whole(part):
                part.error, part.done = error, True
            if error is not None:
                self._queue.pop(fetch, None)
            if fetch.waited:
                self._news.notify_all()

    @staticmethod
    def _is_whole(part: Part) -> bool:
        return part.given + sum(map(len, part.chunks)) >= part.stop


def _join(threads: list[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


_live: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


def _end_all() -> None:
    """Stop all threads before the interpreter goes: one that came back from the store later would crash it."""
    for ahead in list(_live):
        ahead.close(wait=False)
    for ahead in list(_live):
        if ahead.here():
            _join(list(ahead._threads), ahead._store.options.read_timeout + _SECONDS_TO_END)


atexit.register(_end_all)
