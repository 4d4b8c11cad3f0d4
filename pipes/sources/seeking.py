"""Files that seek, for formats with a directory at their end: by name from anywhere, or out of an open stream."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options
from pipes.utils import StreamWrapper

__all__ = ["SeekableOpener", "seekable"]

_COPY = 1 << 20


def seekable(stream: Any, name: str) -> Any:
    """The stream itself when it seeks; an S3 stream's object by ranges; else a copy of the rest in a temporary file.

    The copy closes when it is dropped.

    >>> import io
    >>> stream = io.BytesIO(b"abc")
    >>> seekable(stream, "a.bin") is stream
    True

    Raises:
        TypeError: the stream is in text mode.
    """
    inner = stream
    while isinstance(inner, StreamWrapper):
        inner = inner.file_obj
    ranged = getattr(inner, "ranged", None)
    if ranged is not None:
        return ranged()
    try:
        if inner.seekable():
            return inner
    except AttributeError:
        pass
    copy = StreamWrapper(tempfile.TemporaryFile(), name=name)  # noqa: SIM115 - the wrapper closes it
    while data := inner.read(_COPY):
        if isinstance(data, str):
            raise TypeError(f"{name}: the stream gives str; open it in binary mode, `mode='rb'`")
        copy.write(data)
    copy.seek(0)
    return copy


class SeekableOpener:
    """Opens local paths, `s3://` names and the URLs of fsspec as binary files that seek.

    `endpoint_url` and `options` (`S3Options`) are for `s3://`; `storage_options` are fsspec's for all other URLs.

    Raises, at a call, what opening raises: FileNotFoundError, PermissionError, a StoreError, and ModuleNotFoundError
    for a URL without fsspec, or an S3 name without boto3.
    """

    def __init__(
        self,
        endpoint_url: str | None = None,
        options: S3Options | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.endpoint_url, self.options, self.storage_options = endpoint_url, options, storage_options
        self._store: S3Store | None = None

    def __call__(self, name: str | os.PathLike[str]) -> Any:
        path = os.fspath(name)
        if path.startswith("s3://"):
            if self._store is None:
                self._store = S3Store(_with_endpoint(self.options, self.endpoint_url))
            return self._store.ranged(path)
        if "://" not in path:
            return open(path, "rb")
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f'{path}: reading this URL needs fsspec: pip install "pipes[s3]"', name="fsspec"
            ) from error
        return fsspec.open(path, "rb", **(self.storage_options or {})).open()


def _with_endpoint(options: S3Options | None, endpoint_url: str | None) -> S3Options:
    given = options or S3Options()
    return given if endpoint_url is None else replace(given, endpoint_url=endpoint_url)
