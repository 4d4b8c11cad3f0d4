"""What `.load_files_by_s3` runs: names are taken ahead, their objects fetched by threads, and given in their order.

Contract
- Results come in the order of the names, whatever arrives first. An object is given once the store has answered about
  it; one that cannot be opened raises, or is skipped and counted, at its place, as does an error of what is upstream.
- Names are taken ahead in the thread that iterates: at first one a request, then two for each given, up to `_NAMES` or
  as many as make `read_ahead` bytes. How many depends on the names and sizes only, never on time.
- The position is that of the last object given. It holds no data: what was fetched ahead is fetched again. A resume
  opens no object before the position (with `on_error`, those that a stage below takes again).
- A stream that was given belongs to its reader: it stays readable when the iteration has ended, in another thread, and
  in a forked child, where it receives by itself.
- Threads belong to one iteration and start when it asks for its first object. They end with it; see `s3_fetch`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipes.run import Run
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_fetch import ReadAhead
from pipes.sources.s3_parts import Fetch
from pipes.sources.s3_stream import S3Stream
from pipes.state import Capture, Captures, Position, anchor_of, damaged, table_of
from pipes.utils import StreamWrapper

__all__ = ["FetchedStream", "ReadAheadRun"]

_NAMES = 256


class FetchedStream(S3Stream):
    """A stream whose bytes others fetch; where they do not, it receives by itself."""

    def __init__(self, store: S3Store, fetch: Fetch, ahead: ReadAhead, chunk: int | None) -> None:
        super().__init__(store, fetch.bucket, fetch.key, etag=fetch.etag, size=fetch.size, chunk=chunk, at_once=False)
        self._fetch: Fetch | None = fetch
        self._ahead = ahead

    def wait(self) -> None:
        """Wait for the store's answer about the object; raises its error."""
        fetch = self._fetch
        if fetch is not None and self._ahead.here() and self._ahead.answer(fetch):
            self.etag, self._size, self.version = fetch.etag, fetch.size, fetch.version
            return
        self._leave()
        # Not an open connection: the reader may come much later.
        self._size, found, self.version = self._attempts.run(lambda _: self._store.head(self._bucket, self._key))
        if self.etag and found and found != self.etag:
            raise self._store.changed(self._bucket, self._key, f"ETag {self.etag}", f"ETag {found}")
        self.etag = self.etag or found

    def _bring(self, limit: int) -> bytes | memoryview:
        while (fetch := self._fetch) is not None:
            if not self._ahead.here():
                self._fetch, self.version = None, self.version or fetch.version
                break
            try:
                came = self._ahead.receive(fetch)
            except Exception:
                self._leave()  # a reader that goes on in spite of the error asks again
                raise
            if came is None:
                self._leave()
                break
            offset, data = came
            self.checksum = self.checksum or fetch.checksum
            if not data:
                return b""
            before, self._arrived = self._arrived, max(self._arrived, offset + len(data))
            if self._arrived > before:  # else it was skipped over
                return data[before - offset :] if before > offset else data
        return super()._bring(limit)

    def _go_to(self, offset: int) -> None:
        super()._go_to(offset)
        if self._fetch is not None and self._ahead.here():
            self._ahead.skip(self._fetch, offset)

    def _read_again(self, given: int, found: str) -> bytes:
        self._leave()
        return super()._read_again(given, found)

    def _leave(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self.version = self.version or fetch.version
            self._ahead.drop(fetch)

    def close(self) -> None:
        if not self.closed:
            self._leave()
        super().close()


class _Next(NamedTuple):
    """A name that was taken ahead, and where what is upstream stood behind it; or the error that came in its place."""

    name: Any
    fetch: Fetch | None
    error: Exception | None
    captured: Captures


class ReadAheadRun(Run):
    """Takes names ahead; its position is the number of names behind it and where upstream stood at that one."""

    stateful = True
    anchored = True
    count_fields = ("taken",)

    def check(self, position: Position) -> None:
        super().check(position)
        if anchor_of(position, self.stage)["taken"] > position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        self.taken = 0
        self.ahead: ReadAhead | None = None
        self.queue: deque[_Next] = deque()
        self.bytes = 0
        self.over = False
        if position is not None:
            self.taken = position["taken"]
            self.inputs[0].replay(self.taken - position["anchor"]["taken"], [])
        self.captured = self._upstream()

    def _upstream(self) -> Captures:
        return tuple([run.capture() for run in self.upstream])

    def capture(self) -> Capture:
        return self.taken, self.captured

    def describe(self, captured: Capture) -> Position:
        taken, upstream = captured
        return {"taken": taken, "anchor": {"taken": taken, "table": table_of(self.upstream, upstream)}}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if self.tolerant is not None:  # outputs no longer tell inputs
            return super().replay(count, wanted)
        names = self.inputs[0].replay(count, wanted)
        self.taken, self.captured = self.taken + count, self._upstream()
        pairs: list[Any] = []
        for name in names:
            try:
                # The first may be an archive in whose middle its reader will go on.
                fetch = self._fetcher().add(name, asleep=not pairs)
                pairs.append(self._opened(name, fetch, wait=not fetch.asleep and fetch.etag is None))
            except BaseException as error:
                self.note(error, name)
                raise
        return pairs

    def elements(self) -> Iterator[Any]:
        source, tally = iter(self.inputs[0]), self.tolerant
        try:
            self._take(source, self.pipe.concurrency)
            while self.queue:
                name, fetch, error, self.captured = self._pop()
                self._take(source, 2)
                if fetch is None and name is None:
                    assert error is not None
                    raise error
                self.taken += 1
                if tally is not None:
                    tally.take()
                try:
                    if error is not None:
                        raise error
                    assert fetch is not None
                    result: Any = self._opened(name, fetch, wait=True)
                except BaseException as raised:
                    if tally is None:
                        self.note(raised, name)
                        raise
                    result = tally.handle(raised, name)
                    if result is None:
                        continue
                yield result
                del result
            if self.ahead is not None:
                self.ahead.finish()
        except BaseException:
            if self.ahead is not None:
                self.ahead.close()
            raise

    def _take(self, source: Iterator[Any], count: int) -> None:
        """Take up to `count` names ahead, and at least one where none is."""
        pipe, queue = self.pipe, self.queue
        while not self.over and count > 0 and len(queue) < _NAMES and self.bytes < pipe.read_ahead:
            count -= 1
            try:
                name = next(source)
            except StopIteration:
                self.over = True
                return
            except Exception as error:
                self.over = True
                queue.append(_Next(None, None, error, self._upstream()))
                return
            captured = self._upstream()
            self.bytes += self._size(name)
            try:
                queue.append(_Next(name, self._fetcher().add(name), None, captured))
            except Exception as error:
                queue.append(_Next(name, None, error, captured))

    def _pop(self) -> _Next:
        if self.ahead is not None and not self.ahead.here():
            # A forked child: what the parent's threads brought so far is theirs.
            self.ahead = None
            for place, item in enumerate(self.queue):
                if item.fetch is not None:
                    self.queue[place] = item._replace(fetch=self._fetcher().add(item.name))
        item = self.queue.popleft()
        self.bytes -= self._size(item.name)
        return item

    def _size(self, name: Any) -> int:
        """What `name` counts of `read_ahead`; names that come from no listing share it evenly."""
        size = getattr(name, "size", None)
        return size if isinstance(size, int) else self.pipe.read_ahead // (2 * self.pipe.concurrency)

    def _fetcher(self) -> ReadAhead:
        if self.ahead is None:
            pipe = self.pipe
            self.ahead = ReadAhead(
                pipe._store, concurrency=pipe.concurrency, read_ahead=pipe.read_ahead, chunk=pipe.buffer_size or None
            )
            # An iteration that is dropped and not closed.
            weakref.finalize(self, ReadAhead.close, self.ahead, wait=False).atexit = False
        return self.ahead

    def _opened(self, name: Any, fetch: Fetch, *, wait: bool) -> tuple[Any, StreamWrapper]:
        stream = FetchedStream(self.pipe._store, fetch, self._fetcher(), self.pipe.buffer_size or None)
        if wait:
            try:
                stream.wait()
            except BaseException:
                stream.close()
                raise
        return name, StreamWrapper(stream, name=name)

    def close(self) -> None:
        super().close()
        if self.ahead is not None:
            self.ahead.close()
