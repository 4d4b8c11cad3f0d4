"""Decompressed streams against the standard library's compressors, and opened archives against its readers."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from fault_server import FaultServer
from one_way import OneWay
from stage_contract import saved, start
from tars import make_tar

from pipes.errors import ChangedDataError, DataError, ErrorBudgetExceeded, TruncatedError
from pipes.formats.decompressing import ArchiveFile
from pipes.iter import Decompressor, Extractor, FileOpener, IterableWrapper
from pipes.sources.s3_options import S3Options

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
EXTENSIONS = {"gzip": "gz", "bz2": "bz2", "lzma": "xz", "zstd": "zst"}
TEXT = b"".join(b"line %d\n" % number for number in range(100_000))
MEMBERS = [("a/0.txt", b"zero"), ("a/1.txt", b"one" * 9000)]


def only(pipe: Any) -> tuple[str, Any]:
    (pair,) = list(pipe)
    return pair  # type: ignore[no-any-return]


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in MEMBERS:
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize(("name", "make"), [("bz2", bz2.compress), ("xz", lzma.compress)])
def test_one_compression_by_torchdata_s_names(name: str, make: Callable[[bytes], bytes]) -> None:
    paths = [f"a/2z{name}.{name}", f"b.{name}.{name}", "plain"]
    source = IterableWrapper([(path, io.BytesIO(make(path.encode()))) for path in paths])
    pipe = getattr(source, f"load_from_{name}")()
    assert [(path, stream.read().decode()) for path, stream in pipe] == list(
        zip([f"a/2z{name}", f"b.{name}", "plain"], paths, strict=True)
    )
    assert (len(pipe), len(getattr(source, f"load_from_{name}")(length=7))) == (3, 7)
    damaged = IterableWrapper([(f"x.{name}", io.BytesIO(b"no such thing"))])
    ((_, stream),) = getattr(damaged, f"load_from_{name}")()
    with pytest.raises(DataError, match=rf"x\.{name}: "):
        stream.read()


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("make", [io.BytesIO, OneWay])
def test_every_compression_by_extension_by_bytes_and_by_word(kind: str, make: Callable[[bytes], Any]) -> None:
    packed = COMPRESS[kind](TEXT)
    for path, file_type in [(f"a.txt.{EXTENSIONS[kind].upper()}", None), ("a", None), ("a.zip", kind.upper())]:
        name, stream = only(IterableWrapper([(path, make(packed))], deepcopy=False).decompress(file_type))
        assert name == path
        assert stream.readline() == b"line 0\n"
        assert stream.read(6) == b"line 1"
        assert stream.read() == TEXT[13:]
        assert stream.read() == b""


def test_the_names_that_torchdata_has() -> None:
    assert issubclass(Extractor, Decompressor)
    source = IterableWrapper([("a.gz", io.BytesIO(gzip.compress(b"x")))])
    assert only(source.extract(file_type="GZIP"))[1].read() == b"x"
    with pytest.raises(ValueError, match="'rar' is not a valid CompressionType"):
        source.decompress("rar")
    assert len(source.decompress()) == 1


@pytest.mark.parametrize("make", [io.BytesIO, OneWay])
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_tar_archives_come_opened_and_as_streams(suffix: str, make: Callable[[bytes], Any]) -> None:
    packed = make_tar(MEMBERS)
    for kind, extension in EXTENSIONS.items():
        if suffix == f".{extension}":
            packed = COMPRESS[kind](packed)
    path = f"x.tar{suffix}"
    archive = only(IterableWrapper([(path, make(packed))], deepcopy=False).decompress())[1]
    assert repr(archive.file_obj) == f"<tar archive {path!r}>"
    found = [(member.name, archive.extractfile(member).read()) for member in archive if member.isfile()]
    assert found == MEMBERS
    archive.close()
    loaded = IterableWrapper([(path, make(packed))], deepcopy=False).decompress().load_from_tar()
    assert [(name, stream.read()) for name, stream in loaded] == [(f"{path}/{name}", data) for name, data in MEMBERS]


@pytest.mark.parametrize("make", [io.BytesIO, OneWay])
@pytest.mark.parametrize("path", ["x.zip", "x"])
def test_zip_archives_come_opened_and_as_streams(path: str, make: Callable[[bytes], Any]) -> None:
    archive = only(IterableWrapper([(path, make(zipped()))], deepcopy=False).decompress())[1]
    assert [(name, archive.read(name)) for name in archive.namelist()] == MEMBERS
    loaded = IterableWrapper([(path, make(zipped()))], deepcopy=False).decompress().load_from_zip()
    assert [(name, stream.read()) for name, stream in loaded] == [(f"{path}/{name}", data) for name, data in MEMBERS]


@pytest.mark.parametrize("client", ["boto3", "obstore"])
def test_objects_of_a_store(client: str) -> None:
    objects = {"a.gz": gzip.compress(TEXT), "b": bz2.compress(TEXT), "t": make_tar(MEMBERS), "z": zipped()}
    with FaultServer(objects) as server:
        options = S3Options(endpoint_url=server.url, unsigned=True, client=client)

        def load(*keys: str) -> Any:
            return IterableWrapper([f"s3://bkt/{key}" for key in keys]).load_files_by_s3(options=options).decompress()

        assert [stream.read() == TEXT for _, stream in load("a.gz", "b")] == [True, True]
        assert [stream.read() for _, stream in load("t").load_from_tar()] == [data for _, data in MEMBERS]
        assert [stream.read() for _, stream in load("z").load_from_zip()] == [data for _, data in MEMBERS]
        opened = only(load("z"))[1]
        assert opened.namelist() == [name for name, _ in MEMBERS]
        opened.close()


def test_a_tar_without_an_extension_is_known_by_its_bytes() -> None:
    for make in (io.BytesIO, OneWay):
        pipe = IterableWrapper([("x", make(make_tar(MEMBERS)))], deepcopy=False).decompress().load_from_tar()
        assert len(list(pipe)) == 2


def test_members_are_extracted_below_the_folder_only(tmp_path: Path) -> None:
    archive = only(IterableWrapper([("x.tar", io.BytesIO(make_tar([("../out.txt", b"out")])))]).decompress())[1]
    with pytest.raises(tarfile.OutsideDestinationError):
        archive.extractall(tmp_path / "in")
    assert not (tmp_path / "out.txt").exists()


def test_what_is_not_compressed_cut_or_damaged() -> None:
    with pytest.raises(DataError, match=r"a\.txt: neither its extension nor its first bytes"):
        list(IterableWrapper([("a.txt", io.BytesIO(b"plain"))]).decompress())
    with pytest.raises(DataError, match="b: neither"):
        list(IterableWrapper([("b", io.BytesIO())]).decompress())
    for kind, compress in COMPRESS.items():
        packed = compress(TEXT)
        stream = only(IterableWrapper([("c", io.BytesIO(packed[:-9]))]).decompress(kind))[1]
        with pytest.raises(TruncatedError, match="c: cut at byte"):
            stream.read()
        with pytest.raises(DataError, match="c: bad"):
            only(IterableWrapper([("c", io.BytesIO(b"no" + packed))]).decompress(kind))[1].read()
    for path in ("d.tar", "d.zip"):
        with pytest.raises(DataError, match=f"{path}: no {path[2:]} archive"):
            only(IterableWrapper([(path, io.BytesIO(b"no"))]).decompress())[1].getmembers()
    with pytest.raises(TypeError, match="should be tuple type"):
        list(IterableWrapper(["a.gz"]).decompress())
    with pytest.raises(TypeError, match="binary mode"):
        only(IterableWrapper([("a.gz", io.StringIO("text"))]).decompress())[1].read()


def test_skipping_what_has_no_known_type() -> None:
    files = [("a.gz", io.BytesIO(gzip.compress(b"x"))), ("b.txt", io.BytesIO(b"plain"))]
    pipe = IterableWrapper(files).decompress(on_error="skip", max_errors=1)
    assert [path for path, _ in pipe] == ["a.gz"]
    with pytest.raises(ErrorBudgetExceeded):
        list(IterableWrapper(files).decompress(on_error="skip", max_errors=0))
    with pytest.raises(TypeError, match="on_error"):
        len(pipe)


def test_the_file_closes_with_what_was_made_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x"))
    (tmp_path / "a.tar").write_bytes(make_tar(MEMBERS))
    (tmp_path / "a.zip").write_bytes(zipped())
    uses: dict[str, Callable[[Any], Any]] = {
        "a.gz": lambda stream: stream.read(),
        "a.tar": lambda stream: stream.getmembers(),
        "a.zip": lambda stream: stream.infolist(),
    }
    for name, use in uses.items():
        for used in (False, True):
            path, source = only(FileOpener([str(tmp_path / name)], "rb"))
            stream = only(IterableWrapper([(path, source)], deepcopy=False).decompress())[1]
            if used:
                use(stream)
            assert not source.closed
            stream.close()
            assert source.closed
            stream.close()


def test_an_archive_does_not_travel_and_copying_it_opens_nothing() -> None:
    archive = ArchiveFile("tar", io.BytesIO(b"no archive"), "a.tar")
    with pytest.raises(DataError):
        archive.getmembers()
    assert not hasattr(archive, "__array__")
    made = ArchiveFile.__new__(ArchiveFile)
    with pytest.raises(AttributeError):
        made.__setstate__  # noqa: B018
    with open(__file__, "rb") as file, pytest.raises(TypeError, match="pickle"):
        pickle.dumps(ArchiveFile("tar", file, "a.tar"))


def test_a_large_file_takes_no_memory_to_speak_of() -> None:
    packed = gzip.compress(bytes(200 << 20), 1)
    stream = only(IterableWrapper([("a.gz", io.BytesIO(packed))], deepcopy=False).decompress())[1]
    tracemalloc.start()
    try:
        read = sum(len(data) for data in iter(lambda: stream.read(1 << 20), b""))
        assert read == 200 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_resume_over_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"1\n2\n3\n"))
    make = lambda: FileOpener([str(path)], "rb").decompress().readlines()  # noqa: E731
    run = start(make())
    next(iter(run))
    state = saved(run)
    assert [line for _, line in start(make(), state)] == [b"2", b"3"]
    path.write_bytes(gzip.compress(b"1\n2\n4\n5\n"))
    with pytest.raises(ChangedDataError):
        list(start(make(), state))
