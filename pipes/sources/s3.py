"""Objects of an S3 store: `.list_files_by_s3` gives names, `.load_files_by_s3` opens, `.save_to_s3` writes."""

from __future__ import annotations

import fnmatch
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipes.arguments import whole, whole_or_none
from pipes.context import Context
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, no_length
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.errors import StoreNotFoundError
from pipes.run import Run
from pipes.sources.listing import Identity, ListingRun, OpenerPipe, OpeningRun, RootsRun
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_fetch import LEAST_READ_AHEAD
from pipes.sources.s3_loading import ReadAheadRun
from pipes.sources.s3_names import S3Url, split_s3_url
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_upload import PARTS_AT_ONCE, checked_parts_at_once
from pipes.sources.saving import SaverPipe, checked_mode, path_and_data, write_data
from pipes.stages.wrapping import as_pipe
from pipes.utils import StreamWrapper

__all__ = ["S3FileLister", "S3FileLoader", "S3FileSaver"]


@functional_datapipe("list_files_by_s3")
class S3FileLister(IterDataPipe[S3Url]):
    """Give the names `s3://bucket/key` of the objects whose name begins with a prefix, in the store's order.

    Args:
        source_datapipe: a prefix `s3://bucket/any/beginning`, a list of them, or a pipe of them. It is the plain
            beginning of a name and no folder: `s3://b/in` also finds `s3://b/input/x`.
        length: what `len()` says; -1 is unknown.
        request_timeout_ms: longest wait for a connection or for the next bytes, in milliseconds; -1 leaves it to
            `options`.
        region: of the bucket; "" leaves it to `options`.
        masks: a pattern or patterns of `fnmatch` for the whole name; "" gives all.
        keep_markers: also give folder markers, keys that end in "/".
        strict: raise StoreNotFoundError for a prefix under which nothing is found, instead of giving nothing.
        page_size: keys a request, 1 to 1000.
        endpoint_url: of a store other than Amazon's; None leaves it to `options` and the environment.
        options: everything else about the store, see `S3Options`.

    The names carry the `size` and `etag` that were listed; a loader refuses an object that was replaced since. All is
    listed once an epoch, when the first name is wanted; a DataLoader2 lists once for all its epochs, workers and ranks,
    at its first `iter`. A resume lists again and is refused, with ChangedDataError, when names, sizes or tags differ.
    Raises ValueError for a prefix that is no S3 name, ModuleNotFoundError without boto3; while iterating, the Store
    errors of `pipes.errors`.

    >>> shards = S3FileLister("s3://bkt/train/", masks="*.tar", endpoint_url="http://127.0.0.1:9000")
    >>> shards.roots(), shards.masks
    (['s3://bkt/train/'], '*.tar')
    """

    def __init__(
        self,
        source_datapipe: Any,
        length: int = -1,
        request_timeout_ms: int = -1,
        region: str = "",
        masks: str | Sequence[str] = "",
        *,
        keep_markers: bool = False,
        strict: bool = False,
        page_size: int = 1000,
        endpoint_url: str | None = None,
        options: S3Options | None = None,
    ) -> None:
        is_constant = isinstance(source_datapipe, str | list | tuple)
        self.source_datapipe = source_datapipe if is_constant else as_pipe(source_datapipe)
        self.length = whole("length", length)
        self.request_timeout_ms = whole("request_timeout_ms", request_timeout_ms)
        self.region = region
        self.masks = masks
        self.keep_markers = keep_markers
        self.strict = strict
        self.page_size = whole("page_size", page_size)
        self.endpoint_url = endpoint_url
        self.options = options
        self._store = _store(options, self.request_timeout_ms, region, endpoint_url)
        if not isinstance(self.source_datapipe, IterDataPipe):
            for prefix in self.roots():
                self._store.list(prefix, self.page_size)

    def _make_run(self, context: Context, stage: str) -> Run:
        return (RootsRun if isinstance(self.source_datapipe, IterDataPipe) else ListingRun)(self, context, stage)

    @property
    def clients_in_use(self) -> tuple[str, ...]:
        """The clients that this pipe used in this process: "boto3" once it has listed."""
        return self._store.clients_in_use

    def roots(self) -> list[str]:
        """The constant prefixes, as a list."""
        return [self.source_datapipe] if isinstance(self.source_datapipe, str) else list(self.source_datapipe)

    def names(self, root: str) -> Iterator[S3Url]:
        """The names under one prefix."""
        masks = [self.masks] if isinstance(self.masks, str) else list(self.masks)
        masked = any(masks)
        found = False
        for item in self._store.list(root, self.page_size):
            if item.key.endswith("/") and not self.keep_markers:
                continue
            url = item.url
            if not masked or any(fnmatch.fnmatchcase(url, mask) for mask in masks):
                found = True
                yield url
        if self.strict and not found:
            bucket, prefix = split_s3_url(root, prefix=True)
            raise StoreNotFoundError(
                f"{root}: nothing is listed under this prefix{f' that fits {masks}' if masked else ''}. Check the "
                "prefix, or drop strict=True to read nothing.",
                bucket=bucket,
                key=prefix,
            )

    def identity(self, name: S3Url) -> Identity:
        """What must not change about a name while a saved state refers to it."""
        return f"{name}\0{name.size}\0{name.etag}", ""

    def _length(self, shard: Shard) -> int:
        if self.length < 0:
            raise no_length(self, "pass length= if you know how many objects there are")
        return self.length


@functional_datapipe("load_files_by_s3")
class S3FileLoader(OpenerPipe):
    """Open each S3 object and give `(name, stream)`: a binary stream that is whole or raises, and closes when dropped.

    Args:
        source_datapipe: a pipe or list of names `s3://bucket/key`, taken literally; those of `list_files_by_s3`
            carry the size and the ETag to expect.
        request_timeout_ms: longest wait for a connection or for the next bytes, in milliseconds; -1 leaves it to
            `options`.
        region: of the bucket; "" leaves it to `options`.
        buffer_size: bytes to receive at a time, by default 1 MiB.
        multi_part_download: accepted for code written against torchdata; an object is one stream either way.
        endpoint_url: of a store other than Amazon's; None leaves it to `options` and the environment.
        options: everything else about the store, see `S3Options`.
        concurrency: requests at a time.
        read_ahead: bytes that are fetched before they are read, by default 64 MiB; 0 fetches nothing ahead.
        on_error, max_errors: "skip" leaves out objects that cannot be opened, up to so many; see the page on errors.

    The next objects, and the next parts of a large one, are fetched by threads while one is read; the objects come in
    the order of their names. `read_ahead` bounds what they hold together, for each iteration of the pipe; what was
    fetched ahead is no part of a saved state.

    Connections that break are resumed at the byte they broke at. A stream cannot seek; `skip(n)` goes forward.
    Raises ModuleNotFoundError without boto3; while iterating, ValueError for a name that is no S3 name, and the Store
    errors and ChangedDataError of `pipes.errors`. ValueError for a number that makes no sense.

    >>> shards = S3FileLoader(["s3://bkt/train/000.tar"], endpoint_url="http://127.0.0.1:9000")
    >>> len(shards)
    1
    """

    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: Any,
        request_timeout_ms: int = -1,
        region: str = "",
        buffer_size: int | None = None,
        multi_part_download: bool | None = None,
        *,
        endpoint_url: str | None = None,
        options: S3Options | None = None,
        concurrency: int = 16,
        read_ahead: int = 64 << 20,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        buffer_size = whole_or_none("buffer_size", buffer_size)
        concurrency, read_ahead = whole("concurrency", concurrency), whole("read_ahead", read_ahead)
        if buffer_size is not None and buffer_size < 0:
            raise ValueError(f"buffer_size={buffer_size}: a number of bytes is needed")
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: at least one request at a time has to be made")
        if read_ahead and read_ahead < LEAST_READ_AHEAD:
            raise ValueError(f"read_ahead={read_ahead}: a number of bytes, 0 or at least {LEAST_READ_AHEAD}")
        super().__init__(source_datapipe, on_error, max_errors)
        self.request_timeout_ms = whole("request_timeout_ms", request_timeout_ms)
        self.region = region
        self.buffer_size = buffer_size
        self.multi_part_download = multi_part_download
        self.endpoint_url = endpoint_url
        self.options = options
        self.concurrency = concurrency
        self.read_ahead = read_ahead
        self._store = _store(options, self.request_timeout_ms, region, endpoint_url)

    def _make_run(self, context: Context, stage: str) -> Run:
        return (ReadAheadRun if self.read_ahead else OpeningRun)(self, context, stage)

    @property
    def clients_in_use(self) -> tuple[str, ...]:
        """The clients that read for this pipe in this process so far: "boto3", "obstore", both or none.

        Worker processes log theirs, at level INFO, to the logger "pipes".
        """
        return self._store.clients_in_use

    def opened(self, url: Any) -> tuple[str, StreamWrapper]:
        """Open one object."""
        return url, StreamWrapper(self._store.open(url, chunk=self.buffer_size or None), name=url)


@functional_datapipe("save_to_s3")
class S3FileSaver(SaverPipe):
    """Write each `(name, data)` as an S3 object and give the name `s3://bucket/key` written.

    Args:
        datapipe: a pipe or list of pairs; data is bytes, text, or an open file of them.
        mode: "wb", "b" for bytes, "w", "wt", "t" for text (UTF-8).
        filepath_fn: makes the object's name from the name; without it the name is the object's.
        request_timeout_ms: longest wait for a connection or an answer, in milliseconds; -1 leaves it to `options`.
        region: of the bucket; "" leaves it to `options`.
        endpoint_url: of a store other than Amazon's; None leaves it to `options` and the environment.
        options: everything else about the store, see `S3Options`.
        concurrency: parts of 16 MiB of one large object that are sent at once.
        on_error, max_errors: "skip" leaves out what cannot be saved, up to so many; see the page on errors.

    An object is there whole or not at all; objects of the name are replaced. Over 16 MiB it is a multipart upload,
    of which at most two parts more than are sent at once are in memory where a binary file is given. After a resume
    some objects may be written again, with the same content.
    Raises ValueError for another mode or a concurrency under 1, ModuleNotFoundError without boto3; while iterating,
    TypeError for data of the wrong kind, ValueError for a name that is no S3 name, or has ".." in it when there is no
    `filepath_fn`, and the Store errors of `pipes.errors`.

    >>> saver = S3FileSaver([("a.bin", b"0")], filepath_fn=lambda name: f"s3://bkt/out/{name}", region="eu-west-1")
    >>> len(saver)
    1
    """

    def __init__(
        self,
        datapipe: Any,
        mode: str = "wb",
        filepath_fn: Callable[[Any], Any] | None = None,
        request_timeout_ms: int = -1,
        region: str = "",
        *,
        endpoint_url: str | None = None,
        options: S3Options | None = None,
        concurrency: int = PARTS_AT_ONCE,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        super().__init__(datapipe, mode, filepath_fn, on_error, max_errors)
        self.request_timeout_ms = whole("request_timeout_ms", request_timeout_ms)
        self.region = region
        self.endpoint_url = endpoint_url
        self.options = options
        self.concurrency = checked_parts_at_once(concurrency)
        self._store = _store(options, self.request_timeout_ms, region, endpoint_url)

    def saved(self, element: Any) -> str:
        """Write one element."""
        path, data = path_and_data(element, self.filepath_fn)
        if "b" not in checked_mode(self.mode):
            text = io.StringIO(newline="")
            write_data(text, data, text=True)
            data = text.getvalue().encode()
        self._store.put(path, data, concurrency=self.concurrency)
        return str(path)


def _store(options: S3Options | None, request_timeout_ms: int, region: str, endpoint_url: str | None) -> S3Store:
    given: dict[str, Any] = {}
    if request_timeout_ms > 0:
        given["connect_timeout"] = given["read_timeout"] = request_timeout_ms / 1000
    if region:
        given["region"] = region
    if endpoint_url is not None:
        given["endpoint_url"] = endpoint_url
    return S3Store(replace(options or S3Options(), **given))
