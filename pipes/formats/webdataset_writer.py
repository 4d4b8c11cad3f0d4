"""Write samples into WebDataset shards: `.save_to_webdataset`.

Contract
- A shard has its final name only when it is whole: it is written under another name and renamed, or, for a store, into
  a temporary file and then put as one object. What breaks off leaves the shards before it and no part of the one that
  was begun.
- The stage gives a shard's name once it is there. Between two names it holds no sample, so its state is the number of
  shards given; a resume writes the shard that was begun afresh, with the same bytes.
- Equal samples give equal bytes, on every machine: members have no owner, time 0 and mode 0644.
- Each stream (worker of each rank) writes shards of its own, which carry its number.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import IO, Any

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, functional_datapipe
from pipes.errors import DataError
from pipes.formats.encode import encode
from pipes.formats.webdataset import split_path
from pipes.run import Run
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_names import split_s3_url
from pipes.sources.s3_options import S3Options
from pipes.stages.wrapping import as_pipe
from pipes.state import Capture, Position

__all__ = ["WebDatasetSaver", "members_of", "pack"]

_BLOCK = 512
# POSIX: an archive ends with two zero blocks, and tar writes records of 20 blocks.
_RECORD = 20 * _BLOCK


def members_of(sample: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """The sample's members as `(name, data)`, checked so that `.webdataset()` gives the same sample again.

    >>> members_of({"__key__": "a/0001", "cls": 3, ".json": {"k": 1}, "__url__": "left out"})
    [('a/0001.cls', b'3'), ('a/0001.json', b'{"k": 1}')]

    Raises:
        DataError: there is no key or no field, a name cannot stand in an archive, or a field does not encode.
    """
    key = sample.get("__key__")
    if not isinstance(key, str):
        raise DataError(f"a sample needs its key under '__key__', a str; this one has {key!r}")
    parts = key.split("/")
    if "" in parts or "." in parts or ".." in parts or "." in parts[-1] or "\0" in key:
        raise DataError(
            f"sample {key!r} cannot be written: a key is a relative path without empty parts, '.' or '..', and its "
            "last part has no dot, which would begin the field's name"
        )
    members: dict[str, bytes] = {}
    for field, data in encode(sample).items():
        if field[:2] == "__":
            continue
        name = f"{key}.{field.removeprefix('.')}"
        if "/" in field or "\0" in field or split_path(name) is None:
            raise DataError(f"sample {key!r}: field {field!r} cannot be written: it is empty, or has '/' in its name")
        if name in members:
            raise DataError(f"sample {key!r} has the field {field!r} twice, with and without its dot")
        members[name] = data
    if not members:
        raise DataError(f"sample {key!r} has no field to write")
    return list(members.items())


def pack(name: str, data: bytes) -> bytes:
    """One member of a tar archive, header and padding included, the same bytes at all times (pax format)."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % _BLOCK)


class _Shard:
    """The shard that is being written: a file beside its final place, or one without a name on its way to `store`."""

    def __init__(self, name: str, store: S3Store | None) -> None:
        self.name = name
        self.count = self.size = 0
        self._store = store
        folder, base = os.path.split(name)
        self._part = "" if store is not None else os.path.join(folder, f".{base}.part")
        if store is None:
            os.makedirs(folder, exist_ok=True)
        self._file: IO[bytes] = tempfile.TemporaryFile() if store is not None else open(self._part, "wb")  # noqa: SIM115

    def add(self, members: list[tuple[str, bytes]]) -> None:
        for name, data in members:
            self.size += self._file.write(pack(name, data))
        self.count += 1

    def finish(self) -> None:
        self._file.write(bytes(-(self.size + 2 * _BLOCK) % _RECORD + 2 * _BLOCK))
        self._file.flush()
        if self._store is not None:
            self._file.seek(0)
            self._store.put(self.name, self._file)
        else:
            os.fsync(self._file.fileno())
            os.replace(self._part, self.name)
        self._file.close()

    def drop(self) -> None:
        self._file.close()
        if self._store is None:
            os.unlink(self._part)


class _WebDatasetSaverRun(Run):
    stateful = True
    count_fields = ("shards",)

    def restore(self, position: Position) -> None:
        self.shards = 0 if position is None else position["shards"]

    def elements(self) -> Iterator[str]:
        pipe, source = self.pipe, iter(self.inputs[0])
        for first in source:
            name = pipe.shard_name(self.context.stream, self.shards)
            shard: _Shard = self._noting(name, _Shard, name, pipe.store())
            try:
                for sample in chain((first,), source):
                    shard.add(self._noting(sample, members_of, sample))
                    if shard.count >= pipe.maxcount or shard.size >= pipe.maxsize:
                        break
                self._noting(shard.name, shard.finish)
            except BaseException:
                shard.drop()
                raise
            self.shards += 1
            yield shard.name

    def _noting(self, subject: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(*arguments)`; an error gets the note that names stage and `subject`."""
        try:
            return function(*arguments)
        except BaseException as error:
            self.note(error, subject)
            raise

    def capture(self) -> Capture:
        return self.shards

    def describe(self, captured: Capture) -> Position:
        return {"shards": captured}


@functional_datapipe("save_to_webdataset")
class WebDatasetSaver(IterDataPipe[str]):
    """Write samples into tar shards and give the name of each as soon as it is there, whole.

    Args:
        datapipe: gives samples: dicts with a str under "__key__" and fields whose name is their extension. Values are
            bytes, streams, or what `pipes.formats.encode` knows.
        target: a folder (str or path), which is made where needed, or `s3://bucket/any/folder`.
        prefix: what the shards' names begin with: "train" gives `train-000-000000.tar`, `train-000-000001.tar`, …; the
            first number is that of the stream (worker of each rank), the second counts its shards.
        maxcount: samples in a shard.
        maxsize: bytes at which a shard ends; it exceeds them by less than one sample.
        options: of the store, see `S3Options`.

    Names that begin with "__" are not written. A shard that is there already is replaced; others are left alone, so
    write each data set into a folder of its own. Equal samples in equal order give equal bytes.

    Raises ValueError for settings that are wrong; while iterating, DataError for a sample that cannot be written, so
    that `.webdataset()` would give it back, OSError where files cannot be, the Store errors of a store.

    >>> import tempfile
    >>> from pipes.iter import FileLister, IterableWrapper
    >>> from pipes.formats.decode import decode
    >>> samples = IterableWrapper([{"__key__": f"{n:04d}", "cls": n, "txt": f"text {n}"} for n in range(3)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [name.removeprefix(folder) for name in samples.save_to_webdataset(folder, "train", maxcount=2)]
    ...     read = FileLister(folder).open_files("rb").load_from_tar().webdataset().map(decode)
    ...     [(sample["cls"], sample["txt"]) for sample in read]
    ['/train-000-000000.tar', '/train-000-000001.tar']
    [(0, 'text 0'), (1, 'text 1'), (2, 'text 2')]
    """

    run_class = _WebDatasetSaverRun

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        target: Any,
        prefix: str = "shard",
        *,
        maxcount: int = 100_000,
        maxsize: int = 1 << 30,
        options: S3Options | None = None,
    ) -> None:
        maxcount, maxsize = whole("maxcount", maxcount), whole("maxsize", maxsize)
        if maxcount < 1 or maxsize < 1:
            raise ValueError(f"maxcount={maxcount}, maxsize={maxsize}: a shard holds at least one sample")
        if "/" in prefix or "\0" in prefix:
            raise ValueError(f"prefix={prefix!r} is the beginning of a file name, without '/'; folders go into target")
        self.datapipe = as_pipe(datapipe)
        self.target = os.fspath(target)
        self.prefix = prefix
        self.maxcount = maxcount
        self.maxsize = maxsize
        self.options = options
        self._store = None
        if self.target.startswith("s3://"):
            split_s3_url(self.target, prefix=True)
            self._store = S3Store(options)

    def store(self) -> S3Store | None:
        """The store of the shards; None for local files."""
        return self._store

    def shard_name(self, stream: int, number: int) -> str:
        """The full name of a stream's shard."""
        folder = os.path.abspath(self.target) if self._store is None else self.target.rstrip("/")
        return os.path.join(folder, f"{self.prefix}-{stream:03d}-{number:06d}.tar")
