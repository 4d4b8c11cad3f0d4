"""Zip archives in S3: the members that local files give, few requests, a resume by ranges, cut and empty archives."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from fault_server import FaultServer, Step
from loading import loader_of
from s3_objects import put_objects
from stage_contract import saved, start

from pipes import IterDataPipe
from pipes.errors import ChangedDataError, TruncatedError
from pipes.iter import FileLister, IterableWrapper, S3FileLister
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

pytestmark = pytest.mark.usefixtures("no_residue")


def make_zip(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression=method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


def behind_data(data: bytes) -> bytes:
    """An archive written to a pipe, whose sizes stand behind the data, so that only the directory tells them."""

    class Pipe(io.RawIOBase):
        written = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.written += bytes(data)
            return len(bytes(data))

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        archive.writestr("p.txt", data)
    return pipe.written


MEMBERS = [(f"d.1/{number:03d}.{end}", f"{number}{end}".encode() * 50) for number in range(6) for end in ("txt", "cls")]
SHARDS = {"0.zip": make_zip(MEMBERS[:8]), "1.zip": make_zip([]), "2.zip": make_zip(MEMBERS[8:]),
          "3.zip": behind_data(b"x" * 500)}  # fmt: skip


@pytest.fixture(scope="module")
def store(moto_server: str) -> str:
    whole = SHARDS["0.zip"]
    bodies = {f"train/{name}": body for name, body in SHARDS.items()}
    bodies |= {"d2/a.zip": whole, "d2/z.zip": b"", "d2/z.tar": b"", "cut.zip": whole[:-1]}
    put_objects(moto_server, "zips", bodies)
    return moto_server


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def clients_have_started(server: FaultServer) -> None:
    """Start obstore's runtime, whose descriptors live as long as the process, before `no_residue` looks."""
    server.reset({"x": b"x"})
    assert S3Store(S3Options(endpoint_url=server.url, unsigned=True, client="obstore")).get("s3://bkt/x") == b"x"


def read(member: tuple[str, Any]) -> tuple[str, bytes]:
    return member[0].partition(".zip/")[2], member[1].read()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_gives_the_members_that_local_files_give(store: str, tmp_path: Path, workers: int) -> None:
    for name, body in SHARDS.items():
        (tmp_path / name).write_bytes(body)
    local = FileLister(str(tmp_path)).sharding_filter().open_files("rb")
    names = S3FileLister("s3://zips/train/", endpoint_url=store).sharding_filter()
    for opened in (local, names.load_files_by_s3(endpoint_url=store)):
        with loader_of(opened.load_from_zip().map(read), workers) as loader:
            assert sorted(loader) == sorted([*MEMBERS, ("p.txt", b"x" * 500)])


def test_empty_and_cut_archives_are_named_or_skipped_and_counted(store: str) -> None:
    def opened(*keys: str) -> IterDataPipe[Any]:
        return IterableWrapper([f"s3://zips/{key}" for key in keys]).load_files_by_s3(endpoint_url=store)

    with pytest.raises(TruncatedError, match=r"s3://zips/d2/z\.zip: empty archive"):
        list(opened("d2/z.zip").load_from_zip())
    with pytest.raises(TruncatedError, match=r"s3://zips/d2/z\.tar: empty archive"):
        list(opened("d2/z.tar").load_from_tar())
    with pytest.raises(TruncatedError, match=r"s3://zips/cut\.zip: the archive was cut at byte"):
        list(opened("cut.zip").load_from_zip())
    for pipe, bad in (
        (opened("d2/z.zip", "d2/a.zip", "cut.zip").load_from_zip(on_error="skip", max_errors=2).map(read), 2),
        (opened("d2/z.tar", "d2/z.tar").load_from_tar(on_error="skip", max_errors=2).map(read), 2),
    ):
        run = start(pipe)
        assert list(run) in (MEMBERS[:8], [])
        (counts,) = [each for each in run.context.tallies.counts().values() if each.skipped]
        assert counts.skipped == bad
        assert "empty archive" in counts.first


LARGE = make_zip([(f"{number}.bin", bytes([number]) * 400_000) for number in range(10)], zipfile.ZIP_STORED)


def large(server: FaultServer) -> IterDataPipe[Any]:
    options = S3Options(endpoint_url=server.url, unsigned=True, client="boto3")
    names = S3FileLister("s3://bkt/large.zip", endpoint_url=server.url, options=options)
    return names.load_files_by_s3(options=options).load_from_zip()


def ranges(server: FaultServer) -> list[str]:
    seen = [
        value for each in server.seen("large.zip") for name, value in each.headers.items() if name.lower() == "range"
    ]
    return [value for value in seen if value]


def test_a_resume_asks_for_the_directory_and_what_follows(server: FaultServer) -> None:
    server.reset({"large.zip": LARGE})
    run = start(large(server).map(read_large))
    first = list(islice(run, 7))
    state = saved(run)
    rest = list(run)
    assert [name for name, _ in first + rest] == [f"{number}.bin" for number in range(10)]
    run.close()
    server.reset({"large.zip": LARGE})
    resumed = start(large(server).map(read_large), state)
    assert list(resumed) == rest
    starts = [int(value.removeprefix("bytes=").partition("-")[0]) for value in ranges(server)]
    assert starts
    assert min(starts) >= 7 * 400_000
    server.reset({"large.zip": make_zip([("a", b"1")])})
    with pytest.raises(ChangedDataError):
        list(start(large(server).map(read_large), state))


def read_large(member: tuple[str, Any]) -> tuple[str, int]:
    data = member[1].read()
    assert data == data[:1] * 400_000
    return member[0].partition(".zip/")[2], data[0]


def test_a_body_that_is_cut_and_an_object_that_is_replaced(server: FaultServer) -> None:
    server.reset({"large.zip": LARGE})
    server.script("large.zip", Step(cut=1_000_000), Step(cut=1_500_000))
    assert [read_large(member)[1] for member in large(server)] == list(range(10))
    server.reset({"large.zip": LARGE})
    server.script("large.zip", *[Step(cut=900_000)] * 3)
    members = iter(large(server))
    next(members)
    server.reset({"large.zip": LARGE[:-1] + b"x"})
    with pytest.raises(ChangedDataError, match="replaced"):
        list(members)
