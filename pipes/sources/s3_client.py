"""One S3 store as the pipes see it: which client does what, in which process.

Contract
- A store holds settings only. Clients are made at first use in each process, under that process's own lock, and are
  never used by another process: two processes on one socket read each other's answers.
- Stores with equal settings, under equal AWS variables, share their clients within a process, for as long as one of
  them is in use.
- A forked child leaves what it inherited alone (neither used nor closed) and makes its own. Where obstore had been
  used before the fork, the child reads through boto3 and says so once.
- boto3 lists, resumes, and reads what is large or oddly named; obstore reads small objects. Under moto's `mock_aws`,
  or with a boto3 client that the user passed, everything goes through boto3.
- Stores are safe to share between threads; a stream belongs to one thread at a time.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import IO, Any

from pipes.errors import ChangedDataError
from pipes.sources.s3_boto import BotoTransport, S3Body, S3Head, make_boto_client, make_boto_session, need_boto3
from pipes.sources.s3_checksum import Checksum
from pipes.sources.s3_names import S3Object, quoted, split_s3_url
from pipes.sources.s3_obstore import ObstoreTransport, can_name, can_run
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_ranges import RangedFile
from pipes.sources.s3_retry import Attempts, S3Failure
from pipes.sources.s3_stream import S3Stream
from pipes.sources.s3_upload import PARTS_AT_ONCE, checked_parts_at_once, upload

__all__ = ["S3Store"]

# By CPU time against nginx on loopback: up to 2 MiB obstore needs half of what boto3 does, from 4 MiB on
# more, at 64 MiB twice as much.
_SMALL = 2 << 20
# Clients inherited by a fork: kept, because closing them here would disturb the parent's or hang.
_inherited: list[Any] = []

_log = logging.getLogger("pipes")


class S3Store:
    """Lists, reads and writes the objects of an S3 store.

    >>> store = S3Store(S3Options(endpoint_url="http://127.0.0.1:9000", region="us-east-1"))
    >>> store
    S3Store(S3Options(endpoint_url='http://127.0.0.1:9000', region='us-east-1'))

    Errors are the Store errors of `pipes.errors`: StoreNotFoundError (a FileNotFoundError) for a bucket or object that
    is not there, StorePermissionError, StoreTimeoutError, StoreConnectionError, each with `bucket`, `key`, `status`,
    `attempts` and `request_id`; ChangedDataError for an object that was replaced between listing, opening and reading;
    ValueError for a name that is none, or an AWS_MAX_ATTEMPTS that is no count. ModuleNotFoundError without boto3.
    """

    def __init__(self, options: S3Options | None = None) -> None:
        need_boto3()
        self.options = options or S3Options()
        self.options.resolved_attempts()
        if self.options.client == "obstore" and importlib.util.find_spec("obstore") is None:
            raise ModuleNotFoundError('client="obstore" needs obstore: pip install "pipes[s3]"', name="obstore")
        self._held: tuple[int, _Clients] | None = None
        self._used: set[tuple[int, str]] = set()
        self._last_size: int | None = None

    def __repr__(self) -> str:
        return f"S3Store({self.options!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Store, (self.options,)

    def __deepcopy__(self, memo: Any) -> S3Store:
        return self

    @property
    def clients_in_use(self) -> tuple[str, ...]:
        """The clients that listed or read through this object in this process so far: "boto3", "obstore", both, none.

        >>> S3Store().clients_in_use
        ()
        """
        return tuple(sorted(client for pid, client in tuple(self._used) if pid == os.getpid()))

    def list(self, prefix: str, page_size: int = 1000) -> Iterator[S3Object]:
        """Yield the objects whose URL starts with `prefix` (`s3://bucket/any/beginning`), in the store's order.

        S3 orders keys by their UTF-8 bytes. The prefix is a plain beginning of the key, not a folder. Folder markers
        (keys that end in `/`) are among the results. A page of up to `page_size` keys (1 to 1000) is held at a time.
        """
        bucket, key = split_s3_url(prefix, prefix=True)
        if not 1 <= page_size <= 1000:
            raise ValueError(f"page_size={page_size}: the store accepts 1 to 1000 keys a page")
        return self._pages(bucket, key, page_size)

    def _pages(self, bucket: str, prefix: str, page_size: int) -> Iterator[S3Object]:
        place: dict[str, str] = {}
        firsts = set[str]()
        while True:
            here, attempts = place, Attempts(self.options, bucket, prefix)

            def request(_: int, here: dict[str, str] = here) -> tuple[list[S3Object], dict[str, str]]:
                return self._boto(bucket).page(bucket, prefix, page_size, here)

            objects, place = attempts.run(request)
            if (place and place == here) or (objects and objects[0].key in firsts):
                what = f"the listing does not go on after {here}: it comes to the same keys again"
                raise attempts.error(S3Failure("refused", what))
            yield from objects
            if not place:
                return
            firsts.update(item.key for item in objects[:1])

    def open(
        self,
        url: str,
        etag: str | None = None,
        size: int | None = None,
        offset: int = 0,
        chunk: int | None = None,
    ) -> S3Stream:
        """Open an object as a binary stream that begins at byte `offset` and receives `chunk` bytes at a time (1 MiB).

        `etag` and `size` (bytes), where known from a listing, pin the object: a replaced one is refused. They default
        to what `url` carries, if it comes from a listing.
        """
        bucket, key = split_s3_url(url)
        etag = getattr(url, "etag", None) if etag is None else etag
        size = getattr(url, "size", None) if size is None else size
        return S3Stream(self, bucket, key, etag=quoted(etag), size=size, offset=offset, chunk=chunk)

    def ranged(self, url: str, etag: str | None = None, size: int | None = None) -> RangedFile:
        """An object as a file that seeks, read by ranges of one version; `etag` and `size` as for `open`."""
        return RangedFile(self, url, etag=quoted(etag), size=size)

    def get(self, url: str, etag: str | None = None) -> bytes:
        """The whole object as bytes."""
        with self.open(url, etag=etag) as stream:
            return stream.read()

    def put(
        self, url: str, data: bytes | bytearray | memoryview | IO[bytes], *, concurrency: int = PARTS_AT_ONCE
    ) -> str | None:
        """Write `data`, or what is left of an open binary file, as the object `url`; return its ETag.

        The object is there whole or not at all, and replaces one of that name. Over 16 MiB it is a multipart upload of
        parts of 16 MiB (larger ones beyond 31 GiB), of which up to `concurrency` are sent at once and at most two more
        are in memory. Raises ValueError for a concurrency under 1.
        """
        bucket, key = split_s3_url(url)
        return upload(self, bucket, key, data, checked_parts_at_once(concurrency))

    def request(
        self,
        bucket: str,
        key: str,
        start: int,
        etag: str | None,
        size: int | None,
        attempt: int,
        stop: int | None = None,
        version: str | None = None,
    ) -> S3Body:
        """One GET from byte `start` to before `stop`; raises S3Failure. For streams: they own the attempts.

        A version is asked for by its id only where `version` is given: that needs a right of its own.
        """
        expected = self._last_size if size is None else size
        if expected is not None and stop is not None:
            expected = min(expected, stop - start)
        if attempt == 0 and version is None and self._use_obstore(bucket, key, expected):
            clients = self._clients()
            transport = clients.obstore(bucket)
            self._note(clients, bucket, "obstore")
            try:
                body = transport.open(bucket, key, start, etag, stop)
            except S3Failure as failure:
                clients.after_failure(bucket, failure, transport)
                raise
        else:
            body = self._boto(bucket).open(bucket, key, start, etag, stop, version)
        self._last_size = body.size
        return body

    def head(self, bucket: str, key: str) -> S3Head:
        """What the object is now; raises S3Failure."""
        return self._clients().boto().head(bucket, key)

    def checksum(self, bucket: str, key: str, version: str | None = None) -> tuple[str | None, Checksum | None]:
        """The ETag of the object, or of a version of it, and the checksum that the store keeps; raises S3Failure."""
        return self._clients().boto().checksum(bucket, key, version)

    def uploads(self) -> BotoTransport:
        """What sends single requests of an upload; they raise S3Failure."""
        return self._clients().boto()

    def changed(self, bucket: str, key: str, pinned: str, found: str | None) -> ChangedDataError:
        """The error for an object that is no longer the one that was listed or opened."""
        if found is None:
            try:
                found = f"ETag {self.head(bucket, key).etag}"
            except S3Failure:
                found = "another ETag"
        return ChangedDataError(
            f"s3://{bucket}/{key}: the object was replaced while it was in use: {pinned} before, {found} now. "
            "Finish writing a data set before reading it, or list it again."
        )

    def _use_obstore(self, bucket: str, key: str, expected: int | None) -> bool:
        choice = self.options.client
        if (
            choice not in ("auto", "obstore")
            or self.options.boto3_only
            or mock_is_active()
            or not can_name(bucket, key)
        ):
            return False
        if choice == "auto" and (expected is None or expected > _SMALL or not _has_obstore()):
            return False
        return can_run()

    def _boto(self, bucket: str) -> BotoTransport:
        clients = self._clients()
        transport = clients.boto()
        self._note(clients, bucket, "boto3")
        return transport

    def _note(self, clients: _Clients, bucket: str, client: str) -> None:
        self._used.add((os.getpid(), client))
        if (bucket, client) not in clients.told:
            clients.told.add((bucket, client))
            _log.info("s3://%s: %s is in use in process %d", bucket, client, os.getpid())

    def _clients(self) -> _Clients:
        pid, held = os.getpid(), self._held
        if held is not None and held[0] == pid:
            return held[1]
        if held is not None:
            _inherited.append(held)
        clients = _shared.setdefault((pid, self.options, _environment()), _Clients(self.options))
        self._held = (pid, clients)
        return clients


class _Clients:
    """The clients of one store in one process."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._session: Any = None
        self._boto: dict[bool, BotoTransport] = {}
        self._obstore: dict[str, ObstoreTransport] = {}
        #: Buckets with the clients that were logged for them.
        self.told: set[tuple[str, str]] = set()

    def boto(self) -> BotoTransport:
        mocked = mock_is_active()
        transport = self._boto.get(mocked)
        if transport is None:
            with self._lock:
                transport = self._boto.get(mocked) or self._make_boto()
                self._boto[mocked] = transport
        return transport

    def obstore(self, bucket: str) -> ObstoreTransport:
        transport, boto = self._obstore.get(bucket), self.boto()
        if transport is None or transport.boto_client is not boto.client:
            with self._lock:
                transport = self._obstore.get(bucket)
                if transport is None or transport.boto_client is not boto.client:
                    transport = ObstoreTransport(self._session, boto.client, self._options, bucket)
                    self._obstore[bucket] = transport
        return transport

    def _make_boto(self) -> BotoTransport:
        client = self._options.own_client
        if client is not None:
            return BotoTransport(client, self._options)
        return BotoTransport(self._new_client(), self._options, None if self._options.access_key else self._renew)

    def _new_client(self) -> Any:
        self._session = make_boto_session(self._options)
        return make_boto_client(self._session, self._options)

    def _renew(self, transport: BotoTransport, used: Any) -> None:
        with self._lock:
            if transport.client is used:
                transport.client = self._new_client()

    def after_failure(self, bucket: str, failure: S3Failure, transport: ObstoreTransport) -> None:
        """Let obstore begin anew where boto3 learns better: new credentials, or the region that the bucket is in."""
        if failure.kind == "expired":
            self.boto().renew(transport.boto_client)
        if failure.kind == "unclear":
            self._obstore.pop(bucket, None)


_Environment = frozenset[tuple[str, str]]
_shared: weakref.WeakValueDictionary[tuple[int, S3Options, _Environment], _Clients] = weakref.WeakValueDictionary()


def _environment() -> _Environment:
    """What clients are made from beside the options."""
    return frozenset(item for item in os.environ.items() if item[0].upper().startswith(("AWS_", "S3_")))


def mock_is_active() -> bool:
    """Whether moto's in-process mock is on: it reaches boto3 alone."""
    models = sys.modules.get("moto.core.models")
    return models is not None and bool(getattr(getattr(models, "botocore_stubber", None), "enabled", False))


def _has_obstore() -> bool:
    return "obstore" in sys.modules or importlib.util.find_spec("obstore") is not None
