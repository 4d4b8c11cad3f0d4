"""S3 objects as files that seek: right bytes, few requests, a bounded cache, one version."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator

import pytest
from fault_server import FaultServer, Step
from hypothesis import given, settings
from hypothesis import strategies as st

from pipes.errors import ChangedDataError, StoreNotFoundError
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_names import S3Url
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_ranges import RangedFile

BODY = bytes((31 * i + 7) % 251 for i in range(100_000))


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


def store(server: FaultServer, client: str = "auto") -> S3Store:
    return S3Store(S3Options(endpoint_url=server.url, unsigned=True, client=client, attempts=3, backoff=0.01))


def ranged(server: FaultServer, client: str = "auto", block: int = 1000, cache: int = 3000) -> RangedFile:
    url = S3Url("s3://bkt/x", len(BODY), server.etag("x"))
    return RangedFile(store(server, client), url, block=block, cache=cache)


def ranges(server: FaultServer) -> list[str]:
    return [value for request in server.seen("x") for name, value in request.headers.items() if name.lower() == "range"]


Calls = st.lists(st.tuples(st.sampled_from(["read", "seek", "read_at"]), st.integers(0, 4000), st.integers(0, 1500)))


@settings(max_examples=25)
@given(calls=Calls)
def test_it_reads_like_a_local_file(server: FaultServer, calls: list[tuple[str, int, int]]) -> None:
    server.reset({"x": BODY[:3333]})
    ours = RangedFile(store(server, "boto3"), "s3://bkt/x", block=512, cache=1024)
    local = io.BytesIO(BODY[:3333])
    for name, first, second in calls:
        if name == "read":
            assert ours.read(second) == local.read(second)
        elif name == "seek":
            whence = second % 3
            offset = first - 3333 * (whence == 2)
            assert ours.seek(offset, whence) == local.seek(max(offset, -3333), whence)
        else:
            assert ours.read_at(first, second) == BODY[:3333][first : first + second]
        assert ours.tell() == local.tell()


@pytest.mark.parametrize("client", ["boto3", "obstore"])
def test_blocks_are_asked_for_once_and_neighbours_together(server: FaultServer, client: str) -> None:
    server.reset({"x": BODY})
    file = ranged(server, client)
    assert file.read_at(5_500, 900) == BODY[5_500:6_400]
    assert file.read_at(5_000, 999) == BODY[5_000:5_999]
    assert ranges(server) == ["bytes=5000-6999"]
    assert file.read_at(20_300, 5_000) == BODY[20_300:25_300]
    assert ranges(server)[1:] == ["bytes=20300-25299"]
    assert all(request.headers.get("If-Match", request.headers.get("if-match")) for request in server.seen("x"))
    assert file.read_at(len(BODY) - 10, 50) == BODY[-10:]
    assert file.read_at(len(BODY), 50) == file.read_at(0, 0) == b""
    assert len(server.requests) == 3


def test_the_cache_is_bounded(server: FaultServer) -> None:
    server.reset({"x": BODY})
    file = ranged(server)
    for offset in range(0, 50_000, 1000):
        file.read_at(offset, 10)
    assert sum(map(len, file._blocks.values())) == 3000
    file.read_at(0, 10)
    assert len(server.requests) == 51


def test_an_empty_object_is_never_asked_for_a_range(server: FaultServer) -> None:
    server.reset({"x": b""})
    assert RangedFile(store(server), "s3://bkt/x").read() == b""
    assert RangedFile(store(server), S3Url("s3://bkt/x", 0, '"t"')).read(10) == b""
    assert [request.method for request in server.requests] == ["HEAD"]


def test_a_replaced_object_is_refused_between_two_reads(server: FaultServer) -> None:
    server.reset({"x": BODY})
    for file in (
        ranged(server),
        RangedFile(store(server), "s3://bkt/x", block=1000),
    ):
        server.etags["x"] = '"t1"' if file.etag is None else file.etag
        assert file.read_at(10, 10) == BODY[10:20]
        server.etags["x"] = '"t2"'
        with pytest.raises(ChangedDataError, match=r"s3://bkt/x: the object was replaced.*t2"):
            file.read_at(90_000, 1_000_000)
        server.etags.clear()


def test_a_cut_range_is_resumed(server: FaultServer) -> None:
    server.reset({"x": BODY})
    server.script("x", Step(cut=4000), Step(status=503))
    assert ranged(server, "boto3").read_at(10_000, 9_000) == BODY[10_000:19_000]
    assert ranges(server) == ["bytes=10000-18999", "bytes=14000-18999", "bytes=14000-18999"]


def test_a_stream_gives_its_object_as_such_a_file(server: FaultServer) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(3):
            archive.writestr(f"{number}.bin", BODY[:50_000])
    server.reset({"x": packed.getvalue()})
    with store(server).open("s3://bkt/x") as stream, stream.ranged() as file:
        assert (file.size, file.etag) == (stream.size, stream.etag)
        with zipfile.ZipFile(file) as archive:
            assert archive.read("1.bin") == BODY[:50_000]
    with pytest.raises(ValueError, match="closed file: s3://bkt/x"):
        file.read_at(0, 1)


def test_what_cannot_be(server: FaultServer) -> None:
    server.reset({"x": BODY})
    file = ranged(server)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(file)
    with pytest.raises(ValueError, match="neither may be negative"):
        file.read_at(-1, 5)
    with pytest.raises(ValueError, match="seek to byte -1"):
        file.seek(-1)
    with pytest.raises(ValueError, match="block=10 and cache=5"):
        RangedFile(store(server), "s3://bkt/x", block=10, cache=5)
    with pytest.raises(StoreNotFoundError, match="s3://bkt/none"):
        RangedFile(store(server), "s3://bkt/none").read(1)
