"""An S3 object as a binary stream that is either whole or an error.

Contract
- Bytes come in order, each once. A stream never ends early: the end is reached when as many bytes arrived as the
  store said the object has, and not when a connection closes.
- What breaks is resumed at the byte it broke at, by `Range` with `If-Match`, within the attempts and the deadline of
  the options. A replaced object (another ETag or size, or status 412) raises ChangedDataError.
- In a bucket that keeps versions, an object that is replaced or deleted while it is read is read on: the version that
  the first answer named is asked for by its id, which needs a right of its own and is done only then.
- At most one answer is open at a time; `close` (or dropping the stream) gives its connection back or ends it.
- A stream that finds itself in a forked child opens a connection of its own at its position.
- With `checksum` in the options, an object read from its first byte to its last is compared with the checksum that the
  store keeps. If they differ it is read once more: what was not handed over yet is mended, and the rest must be equal.
- With `stop` it is about the bytes before that offset only: it asks for no others and ends there.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipes.errors import ChangedDataError, add_note
from pipes.sources.s3_boto import S3Body
from pipes.sources.s3_buffers import Buffers
from pipes.sources.s3_checksum import Checksum
from pipes.sources.s3_retry import Attempts, S3Failure

if TYPE_CHECKING:
    from pipes.sources.s3_client import S3Store
    from pipes.sources.s3_ranges import RangedFile

__all__ = ["S3Stream"]

_CHUNK = 1 << 20
_SKIP_BY_READING = 256 << 10
_NOTHING = memoryview(b"")
_inherited: list[Any] = []


class S3Stream(io.BufferedIOBase):
    """A readable binary stream over one object; not seekable, but `skip` goes forward cheaply.

    Made by `S3Store.open`. `size` is the object's in bytes, `etag` its tag, `version` its id in a bucket that keeps
    versions, `position` the offset of the next byte.
    Without `at_once` the store is not asked before the first read.
    """

    def __init__(
        self,
        store: S3Store,
        bucket: str,
        key: str,
        *,
        etag: str | None = None,
        size: int | None = None,
        version: str | None = None,
        offset: int = 0,
        chunk: int | None = None,
        stop: int | None = None,
        wait: Callable[[float], None] = time.sleep,
        at_once: bool = True,
        buffers: Buffers | None = None,
    ) -> None:
        # First, for `close`: it runs also where this raises.
        self._body: S3Body | None = None
        if offset < 0:
            raise ValueError(f"offset={offset}: an object begins at byte 0")
        self._store, self._bucket, self._key = store, bucket, key
        self._attempts = Attempts(store.options, bucket, key, wait)
        self._pid = os.getpid()
        self._chunk = _NOTHING
        self._receive_size = chunk or _CHUNK
        self._buffers = buffers
        self._arrived = offset
        self.etag, self._size, self.version = etag, size, version
        self._replaced = False
        self.stop = stop
        #: What the store said about the whole object.
        self.checksum: Checksum | None = None
        self._sum: Checksum | None = None
        self._verify = store.options.checksum and not offset and stop is None
        if offset and size is None:
            # Beginning a range at the end of an object is an error to the store, so its size has to be known.
            self._size, found, self.version = self._attempts.run(lambda _: store.head(bucket, key))
            if etag and found and found != etag:
                raise store.changed(bucket, key, f"ETag {etag}", f"ETag {found}")
            self.etag = etag or found
        if at_once and (offset == 0 or offset < self.size):
            self._open()

    @property
    def name(self) -> str:
        """The object's `s3://` name."""
        return f"s3://{self._bucket}/{self._key}"

    @property
    def size(self) -> int:
        """Of the whole object, in bytes."""
        if self._size is None:
            self._open()
        assert self._size is not None
        return self._size

    @property
    def position(self) -> int:
        """Offset in the object of the next byte that a read gives."""
        return self._arrived - len(self._chunk)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def read(self, size: int | None = -1, /) -> bytes:
        """Exactly `size` bytes, fewer only at the object's end; everything left without `size`."""
        self._check_open()
        left = self._end() - self.position
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted <= len(self._chunk):
            return self._take(wanted)
        parts: list[bytes | memoryview] = [self._take(len(self._chunk))] if self._chunk else []
        wanted -= len(parts[0]) if parts else 0
        while wanted:
            data = self._receive(max(wanted, self._receive_size))
            if len(data) > wanted:
                self._chunk = memoryview(data)
                data = self._take(wanted)
            parts.append(data)
            wanted -= len(data)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def read1(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes with at most one receive."""
        self._check_open()
        if size == 0:
            return b""
        if not self._chunk:
            self._chunk = memoryview(self._receive(self._receive_size))
        return self._take(len(self._chunk) if size < 0 else min(size, len(self._chunk)))

    def peek(self, size: int = 0, /) -> bytes:
        """What has arrived and was not read yet, at least one byte before the end; reading it stays possible."""
        self._check_open()
        if not self._chunk:
            self._chunk = memoryview(self._receive(self._receive_size))
        return bytes(self._chunk[: size or 8192])

    def receive(self) -> bytes | memoryview:
        """The next bytes as they arrive, not copied once more; empty at the end."""
        self._check_open()
        return self._take(len(self._chunk)) if self._chunk else self._receive(self._receive_size)

    def skip(self, count: int) -> int:
        """Go forward by `count` bytes, at most to the end: over a long way by a new ranged request; how many it was."""
        self._check_open()
        if count < 0:
            raise ValueError(f"skip({count}): an S3 stream goes forward only")
        count = min(count, self._end() - self.position)
        ahead = count - len(self._chunk)
        if ahead <= 0:
            self._chunk = self._chunk[count:]
        elif ahead <= _SKIP_BY_READING:
            self.read(count)
        else:
            self._chunk = _NOTHING
            self._go_to(self._arrived + ahead)
        return count

    def ranged(self) -> RangedFile:
        """The same version of the same object as a file that seeks, at its beginning; this stream's request ends."""
        from pipes.sources.s3_ranges import RangedFile

        self._drop_body()
        return RangedFile(self._store, self.name, etag=self.etag, size=self.size, version=self.version)

    def close(self) -> None:
        if not self.closed:
            self._drop_body()
            self._chunk = _NOTHING
        super().close()

    def __repr__(self) -> str:
        return f"<S3Stream {self.name} at {self.position} of {self._size}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: send its name and open it where it is read")

    def _take(self, count: int) -> bytes:
        chunk = self._chunk
        self._chunk = chunk[count:] if count < len(chunk) else _NOTHING  # an empty view would keep its memory
        return bytes(chunk[:count])

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"read from a closed stream: {self.name}")

    def _go_to(self, offset: int) -> None:
        self._verify = False
        self._drop_body()
        self._arrived = offset

    def _end(self) -> int:
        """The offset at which this stream ends."""
        return self.size if self.stop is None else min(self.stop, self.size)

    def _receive(self, limit: int) -> bytes | memoryview:
        """The next bytes of the stream, at least one before its end, empty at it."""
        if not self._verify:
            return self._bring(limit)
        given, data = self._arrived, self._bring(limit)
        if not data:
            return data
        if self._sum is None:
            self._sum = self.checksum or self._ask_for_checksum()
            if self._sum is None:
                self._verify = False
                return data
        found = self._sum.found
        self._sum.update(data)
        if self._arrived == self.size and not self._sum.matches():
            data = self._read_again(given, found)
        return data

    def _ask_for_checksum(self) -> Checksum | None:
        asked = self.version if self._replaced else None
        etag, checksum = self._attempts.run(lambda _: self._store.checksum(self._bucket, self._key, asked))
        if self.etag and etag and etag != self.etag:
            if self.version and not self._replaced:
                self._replaced = True
                return self._ask_for_checksum()
            raise self._store.changed(self._bucket, self._key, f"ETag {self.etag}", f"ETag {etag}")
        return checksum

    def _read_again(self, given: int, found: str) -> bytes:
        """The bytes after the first `given`, which have the checksum `found`, from a second reading of the object."""
        assert self._sum is not None
        wrong = self._wrong(self._sum)
        self._sum, parts = self._sum.begun_again(), list[bytes | memoryview]()
        self._drop_body()
        self._arrived = 0
        try:
            while self._arrived < self.size:
                data = S3Stream._bring(self, min(given - self._arrived, _CHUNK) if self._arrived < given else _CHUNK)
                self._sum.update(data)
                if self._arrived > given:
                    parts.append(data)
                elif self._arrived == given and self._sum.found != found:
                    raise self._attempts.error(wrong, "a second reading begins with other bytes than were handed over")
            if not self._sum.matches():
                raise self._attempts.error(self._wrong(self._sum), "so it was when it was read again")
        except BaseException:
            self._drop_body()
            self._arrived = given
            raise
        return b"".join(parts)

    def _wrong(self, checksum: Checksum) -> S3Failure:
        self._attempts.failures += 1
        what = f"its {checksum.name} is {checksum.expected} in the store, and {checksum.found} in the bytes received"
        return S3Failure("corrupt", what)

    def _bring(self, limit: int) -> bytes | memoryview:
        """The next bytes from the store, at least one before the end of the stream, empty at it."""
        if self._pid != os.getpid():
            _inherited.append(self._body)
            self._body, self._pid = None, os.getpid()
        while (left := self._end() - self._arrived) > 0:
            if self._body is None:
                self._open()
            assert self._body is not None
            began = time.monotonic()
            try:
                data = self._body.read(min(limit, left), self._buffers)
                if not data:
                    raise S3Failure("cut", "the connection was closed")
                if len(data) > left:
                    if self.stop is None:
                        raise S3Failure("refused", f"the store sent {len(data) - left} bytes too many")
                    data = data[:left]  # it does not know ranges
            except S3Failure as failure:
                self._drop_body()
                failure.what += f" after {self._arrived} of {self.size} bytes were received"
                self._attempts.failed(failure, began)
                continue
            except BaseException:
                self._drop_body()  # what an interrupt left half-read is asked for again
                raise
            self._arrived += len(data)
            self._attempts.progress(len(data))
            if len(data) == left:
                self._drop_body()
            return data
        return b""

    def _open(self) -> None:
        """Ask for the object from `_arrived` on, until there is an answer about the object that is pinned."""
        self._body = self._attempts.run(self._request)

    def _request(self, attempt: int) -> S3Body:
        if not self._replaced:
            try:
                return self._ask(attempt)
            except ChangedDataError:
                if self.version is None:
                    raise
            except S3Failure as failure:
                if failure.kind == "changed" and self.etag and self.version is None:
                    raise self._changed() from failure
                if failure.kind not in ("changed", "missing") or self.version is None:
                    raise
            self._replaced = True
        try:
            return self._ask(attempt, self.version)
        except S3Failure as failure:
            if failure.kind not in ("changed", "missing", "denied", "refused"):
                raise
            error = self._changed()
            add_note(error, f"its version {self.version} cannot be read: {failure.what}")
            raise error from failure

    def _changed(self) -> ChangedDataError:
        return self._store.changed(self._bucket, self._key, f"ETag {self.etag}", None)

    def _ask(self, attempt: int, version: str | None = None) -> S3Body:
        """One answer about the object that is pinned, from its right byte on."""
        store, size, stop = self._store, self._size, self._asked()
        try:
            body = store.request(self._bucket, self._key, self._arrived, self.etag, size, attempt, stop, version)
        except S3Failure as failure:
            if failure.status == 416 and size is None:
                what = f"byte {self._arrived} is beyond the end of the object"
                raise S3Failure("refused", what, status=416) from failure
            raise
        try:
            self._check_same(body)
            self._align(body)
        except BaseException:
            body.close()
            raise
        return body

    def _asked(self) -> int | None:
        """The end of the range to ask for; None where it is the end of the object.

        Of an object that may be empty all is asked for, because a store refuses every range of an empty one.
        """
        if self.stop is None or (self._size is None and not self._arrived):
            return None
        return None if self._size is not None and self.stop >= self._size else self.stop

    def _check_same(self, body: S3Body) -> None:
        if self.etag and body.etag and body.etag != self.etag:
            found = f"ETag {body.etag}"
            raise self._store.changed(self._bucket, self._key, f"ETag {self.etag}", found)
        if self._size is not None and body.size != self._size:
            raise self._store.changed(self._bucket, self._key, f"{self._size} bytes", f"{body.size} bytes")
        self.etag, self._size, self.version = self.etag or body.etag, body.size, self.version or body.version
        self.checksum = self.checksum or body.checksum

    def _align(self, body: S3Body) -> None:
        """Read over what a store sends that does not know ranges."""
        if body.start > self._arrived:
            raise S3Failure("refused", f"byte {self._arrived} was asked for and byte {body.start} came")
        surplus = self._arrived - body.start
        while surplus:
            data = body.read(min(surplus, _CHUNK))
            if not data or len(data) > surplus:
                raise S3Failure("cut", "the connection was closed")
            surplus -= len(data)

    def _drop_body(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()
