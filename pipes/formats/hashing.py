"""Files compared with the hashes that they should have: `.check_hash`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.error_policy import BUDGET, MaxErrors, OnError
from pipes.errors import HashError
from pipes.formats.chunks import read_chunks
from pipes.stages.mapping import AppliedPipe, AppliedRun

__all__ = ["HashChecker"]

T = TypeVar("T")

_TYPES = ("sha256", "md5")


class _HashCheckerRun(AppliedRun):
    def function(self) -> Callable[..., Any]:
        return self.pipe.checked  # type: ignore[no-any-return]

    def subject(self, element: Any) -> Any:
        return element[0] if isinstance(element, tuple) and element else element


@functional_datapipe("check_hash")
class HashChecker(AppliedPipe[T]):
    """Pass on each `(name, data)` whose data has the hash that `hash_dict` tells for the name.

    Args:
        source_datapipe: gives `(name, data)`; data is bytes, a str (hashed as UTF-8) or a binary stream.
        hash_dict: by name, the hash in hexadecimal digits, upper or lower case.
        hash_type: "sha256" or "md5".
        rewind: go back, after its hash is computed, to where a stream stood; False leaves it at its end.
        on_error, max_errors: "skip" leaves out what has another hash, up to so many; see the page on errors.

    A stream is read a piece at a time. Raises ValueError for another `hash_type`, TypeError for a `hash_dict` that is
    none; while iterating, HashError for another hash or a name without one, TypeError for what is no `(name, data)`,
    ValueError for a stream that goes forward only, unless `rewind=False`.

    >>> import hashlib
    >>> from pipes.iter import IterableWrapper
    >>> hashes = {"a.txt": hashlib.sha256(b"hello").hexdigest()}
    >>> list(IterableWrapper([("a.txt", b"hello")]).check_hash(hashes))
    [('a.txt', b'hello')]
    """

    run_class = _HashCheckerRun
    _input = "source_datapipe"

    def __init__(
        self,
        source_datapipe: IterDataPipe[T],
        hash_dict: Mapping[str, str],
        hash_type: str = "sha256",
        rewind: bool = True,
        *,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        if hash_type not in _TYPES:
            raise ValueError(f"hash_type={hash_type!r} is none of {', '.join(map(repr, _TYPES))}")
        if not isinstance(hash_dict, Mapping):
            raise TypeError(f"hash_dict must be a dict of names and hashes, not a {type(hash_dict).__name__}")
        super().__init__(source_datapipe, on_error, max_errors)
        self.hash_dict = dict(hash_dict)
        self.hash_type = hash_type
        self.rewind = rewind

    def checked(self, element: Any) -> Any:
        """Return one element as it is; raise HashError if its data has another hash."""
        if not isinstance(element, tuple) or len(element) != 2:
            raise TypeError(f"check_hash takes pairs (name, data), not {type(element).__name__}")
        name, data = element
        if name not in self.hash_dict:
            raise HashError(f"Unspecified hash for file {name}: hash_dict has no such name; add it, or leave it out")
        expected, found = self.hash_dict[name], self._hash_of(name, data)
        if found != expected.lower():
            raise HashError(
                f"{name}: its {self.hash_type} hash {found} does not match the expected {expected}: it was damaged or "
                "replaced; fetch it again, or correct hash_dict"
            )
        return element

    def _hash_of(self, name: str, data: Any) -> str:
        digest = hashlib.new(self.hash_type, usedforsecurity=False)
        if isinstance(data, str):
            digest.update(data.encode())
        elif isinstance(data, bytes | bytearray | memoryview):
            digest.update(data)
        elif not callable(getattr(data, "read", None)):
            raise TypeError(f"{name}: its data is bytes, a str or a binary stream, not {type(data).__name__}")
        else:
            start = self._place_of(name, data) if self.rewind else None
            for chunk in read_chunks(data, name):
                digest.update(chunk)
            if start is not None:
                data.seek(start)
        return digest.hexdigest()

    @staticmethod
    def _place_of(name: str, stream: Any) -> Any:
        if not getattr(stream, "seekable", lambda: hasattr(stream, "seek"))():
            raise ValueError(
                f"{name}: its stream goes forward only, so nothing would be left of it: take its bytes with "
                ".read_from_stream() before, or pass rewind=False where nobody reads it afterwards"
            )
        return stream.tell()
