"""Streams that close themselves, and the shared check of `(path, stream)` elements."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO, IOBase
from typing import Any, ClassVar

__all__ = ["MemoryStream", "StreamWrapper", "janitor", "validate_pathname_binary_tuple"]

_MAX_DEPTH = 10


class StreamWrapper:
    """A file-like object that is closed when the last reference to it goes.

    >>> import io
    >>> stream = StreamWrapper(io.BytesIO(b"abc"), name="a.txt")
    >>> stream
    StreamWrapper<a.txt,<_io.BytesIO object at ...>>
    >>> stream.read(), stream.seek(1), stream.read()
    (b'abc', 1, b'bc')
    >>> stream.close(); stream.closed
    True

    All attributes that are not its own are those of the wrapped object. A child names the stream it reads from as
    `parent_stream`; after `parent.autoclose()` the parent closes with its last child. With
    `StreamWrapper.debug_unclosed_streams = True`, `StreamWrapper.session_streams` holds every stream that was opened
    and not closed since. Pickling pickles the wrapped object, and fails where that fails.

    Raises:
        RuntimeError: `parent_stream` is not a `StreamWrapper`.
    """

    session_streams: ClassVar[dict[StreamWrapper, int]] = {}
    debug_unclosed_streams: ClassVar[bool] = False

    # Class-level defaults keep the constructor, which runs once an archive member, down to two assignments.
    name: str | None = None
    parent_stream: StreamWrapper | None = None
    child_counter: int = 0
    close_on_last_child: bool = False
    _closed: bool = False

    def __init__(self, file_obj: Any, parent_stream: object = None, name: str | None = None) -> None:
        self.file_obj = file_obj
        if name is not None:
            self.name = name
        if parent_stream is not None:
            if not isinstance(parent_stream, StreamWrapper):
                raise RuntimeError(f"Parent stream should be StreamWrapper, {type(parent_stream)} was given")
            parent_stream.child_counter += 1
            self.parent_stream = parent_stream
        if StreamWrapper.debug_unclosed_streams:
            StreamWrapper.session_streams[self] = 1

    @classmethod
    def close_streams(cls, v: Any, depth: int = 0) -> None:
        """Close every stream inside nested dicts, lists and tuples, down to ten levels.

        >>> import io
        >>> streams = {"a": [StreamWrapper(io.BytesIO())]}
        >>> StreamWrapper.close_streams(streams); streams["a"][0].closed
        True
        """
        if depth > _MAX_DEPTH:
            return
        if isinstance(v, StreamWrapper):
            v.close()
        elif isinstance(v, dict):
            for value in v.values():
                cls.close_streams(value, depth + 1)
        elif isinstance(v, list | tuple):
            for value in v:
                cls.close_streams(value, depth + 1)

    @property
    def closed(self) -> bool:
        return self._closed or bool(getattr(self.file_obj, "closed", False))

    def close(self) -> None:
        """Close the wrapped object once; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if StreamWrapper.debug_unclosed_streams:
            StreamWrapper.session_streams.pop(self, None)
        try:
            close = getattr(self.file_obj, "close", None)
            if close is not None:
                close()
        finally:
            parent = self.parent_stream
            if parent is not None:
                parent.child_counter -= 1
                if parent.child_counter == 0 and parent.close_on_last_child:
                    parent.close()

    def autoclose(self) -> None:
        """Close as soon as no child is open: now, when there is none."""
        self.close_on_last_child = True
        if self.child_counter == 0:
            self.close()

    def read(self, *args: Any) -> Any:
        return self.file_obj.read(*args)

    def __getattr__(self, name: str) -> Any:
        if name == "file_obj":  # only while half built: asking the wrapped object for itself would never end
            raise AttributeError(name)
        return getattr(self.file_obj, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.file_obj)})

    def __iter__(self) -> Iterator[Any]:
        yield from self.file_obj  # a generator holds `self`, so a temporary wrapper is not closed under the loop

    def __next__(self) -> Any:
        return next(self.file_obj)

    def __enter__(self) -> StreamWrapper:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and "file_obj" in self.__dict__:
            self.close()

    def __repr__(self) -> str:
        if self.name is None:
            return f"StreamWrapper<{self.file_obj!r}>"
        return f"StreamWrapper<{self.name},{self.file_obj!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamWrapper, (self.file_obj, None, self.name)


class MemoryStream(StreamWrapper):
    """A `StreamWrapper` over bytes in memory, which has nothing to close when it is dropped.

    >>> MemoryStream(b"abc", "a.tar/b.txt").read()
    b'abc'

    An archive gives one for each member, so it is made in a third of the time; the bytes are not copied.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.file_obj = BytesIO(data)
        self.name = name

    def __del__(self) -> None:
        pass


def janitor(obj: Any) -> None:
    """Close every stream inside `obj` (see `StreamWrapper.close_streams`).

    >>> import io
    >>> sample = {"jpg": StreamWrapper(io.BytesIO(b"..."))}
    >>> janitor(sample); sample["jpg"].closed
    True
    """
    StreamWrapper.close_streams(obj)


def validate_pathname_binary_tuple(data: Any) -> None:
    """Check that an element is `(path, stream)`, as the archive and table readers take it.

    >>> import io
    >>> validate_pathname_binary_tuple(("a.tar", io.BytesIO()))

    Raises:
        TypeError: it is not a tuple of two, the first not a str, or the second not a stream.
    """
    if not isinstance(data, tuple):
        raise TypeError(f"pathname binary data should be tuple type, but it is type {type(data)}")
    if len(data) != 2:
        raise TypeError(f"pathname binary stream tuple length should be 2, but got {len(data)}")
    if not isinstance(data[0], str):
        raise TypeError(f"pathname within the tuple should have string type pathname, but it is type {type(data[0])}")
    if not isinstance(data[1], IOBase | StreamWrapper) and not callable(getattr(data[1], "read", None)):
        raise TypeError(
            f"binary stream within the tuple should have IOBase or its subclasses as type, but it is {type(data[1])}"
        )
