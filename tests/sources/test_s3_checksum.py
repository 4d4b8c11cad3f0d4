"""Checksums that a store keeps of objects: computed right, compared, and what happens when they differ."""

import hashlib
import sys
import zlib
from base64 import b64encode
from typing import Any

import boto3
import pytest
from fault_server import FaultServer, Request, Step
from hypothesis import given
from hypothesis import strategies as st
from loading import loader_of
from s3_objects import put_objects

from pipes.errors import ChangedDataError, StoreError
from pipes.iter import S3FileLister, S3FileLoader
from pipes.sources import s3_checksum
from pipes.sources.s3_checksum import Checksum, checksum_of_headers, crc_reflected
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

BODY = bytes((31 * i + 7) % 251 for i in range(3 << 20))
CRC32 = (0xEDB88320, 32)
CRC32C = (0x82F63B78, 32)
CRC64NVME = (0x9A6C9329AC4BC9B5, 64)


def crc_header(body: bytes) -> dict[str, str]:
    return {"x-amz-checksum-crc32": b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()}


@pytest.mark.parametrize(
    ("polynomial", "check"), [(CRC32, 0xCBF43926), (CRC32C, 0xE3069283), (CRC64NVME, 0xAE8B14860A799888)]
)
def test_check_values(polynomial: tuple[int, int], check: int) -> None:
    assert crc_reflected(b"123456789", 0, *polynomial) == check
    assert crc_reflected(b"", 0, *polynomial) == 0
    # published for CRC-32C over 32 bytes (RFC 3720, B.4)
    assert crc_reflected(bytes(32), 0, *CRC32C) == 0x8A9136AA
    assert crc_reflected(bytes(range(32)), 0, *CRC32C) == 0x46DD794E


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("name", "expected"), [("crc32c", "4waSgw=="), ("crc64nvme", "rosUhgp5mIg=")])
def test_those_of_awscrt_are_used_and_equal(
    name: str, expected: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums = pytest.importorskip("awscrt.checksums")
    used = []
    function = getattr(checksums, name)
    monkeypatch.setattr(checksums, name, lambda data, value: used.append(len(data)) or function(data, value))
    if not native:
        monkeypatch.setitem(sys.modules, "awscrt", None)
    s3_checksum._native.cache_clear()
    try:
        one = Checksum(name, expected)
        one.update(b"1234")
        one.update(memoryview(b"x56789")[1:])
        assert (one.found, one.matches()) == (expected, True)
        assert used == ([4, 5] if native else [])
    finally:
        s3_checksum._native.cache_clear()


@pytest.mark.parametrize("size", [2047, 2048, 2049, 4096, 100_001, (1 << 20) + 3000])
def test_lanes_give_what_zlib_gives(size: int) -> None:
    assert crc_reflected(BODY[:size], 0, *CRC32) == zlib.crc32(BODY[:size])
    assert crc_reflected(BODY[:size], 77, *CRC32) == zlib.crc32(BODY[:size], 77)


@given(st.binary(max_size=200), st.integers(0, 40), st.integers(0, 9000))
def test_parts_give_what_the_whole_gives(block: bytes, times: int, cut: int) -> None:
    data = block * times
    for polynomial in (CRC32, CRC32C, CRC64NVME):
        rest = crc_reflected(data[cut:], crc_reflected(data[:cut], 0, *polynomial), *polynomial)
        assert rest == crc_reflected(data, 0, *polynomial)


def test_which_headers_tell_a_checksum() -> None:
    def of(headers: dict[str, str]) -> tuple[str, str] | None:
        found = checksum_of_headers({f"x-amz-checksum-{name}": value for name, value in headers.items()})
        return found and (found.name, found.expected)

    assert of({}) is None
    assert of({"sha256": "abc="}) == ("sha256", "abc=")
    assert of({"sha1": "abc=", "crc64nvme": "def="}) == ("crc64nvme", "def=")
    assert of({"crc32": "abc=", "type": "FULL_OBJECT"}) == ("crc32", "abc=")
    assert of({"crc32": "abc=-3"}) is None
    assert of({"crc32": "abc=", "type": "COMPOSITE"}) is None
    assert of({"md5": "abc="}) is None


@pytest.mark.parametrize("name", ["crc32", "crc32c", "crc64nvme", "sha1", "sha256"])
def test_every_algorithm_finds_one_wrong_bit(name: str) -> None:
    whole = Checksum(name, "")
    whole.update(BODY)
    sizes = {"crc32": 8, "crc32c": 8, "crc64nvme": 12, "sha1": 28, "sha256": 44}
    assert len(whole.found) == sizes[name]
    if name.startswith("sha"):
        assert whole.found == b64encode(hashlib.new(name, BODY).digest()).decode()
    again = Checksum(name, whole.found)
    again.update(BODY[:1_500_000])
    assert not again.matches()
    again.update(BODY[1_500_000:])
    assert again.matches()
    wrong = again.begun_again()
    wrong.update(BODY[:-1] + bytes([BODY[-1] ^ 1]))
    assert not wrong.matches()


@pytest.fixture
def server(shared_server: FaultServer) -> FaultServer:
    shared_server.reset({"a": b"abc", "x": BODY, "zero": b""})
    return shared_server


def options_on(url: str, **settings: Any) -> S3Options:
    return S3Options(endpoint_url=url, unsigned=True, backoff=0.01, checksum=True, **settings)


def test_the_store_is_asked_for_checksums_only_where_they_are_wanted(server: FaultServer) -> None:
    server.script("x", Step(headers=crc_header(BODY), cut=2_000_000))
    assert S3Store(options_on(server.url)).get("s3://bkt/x") == BODY
    first, second = server.seen("x")
    assert first.headers["x-amz-checksum-mode"] == "ENABLED"
    assert "x-amz-checksum-mode" not in second.headers, "a range"
    S3Store(S3Options(endpoint_url=server.url, unsigned=True)).get("s3://bkt/a")
    assert "x-amz-checksum-mode" not in server.seen("a")[0].headers


def test_an_empty_object_and_one_without_a_checksum(server: FaultServer) -> None:
    store = S3Store(options_on(server.url))
    assert store.get("s3://bkt/zero") == b""
    assert [request.method for request in server.seen("zero")] == ["GET"]
    assert store.get("s3://bkt/a") == b"abc"
    server.script("a", Step(headers={"x-amz-checksum-crc32": "AAAAAA==-2", "x-amz-checksum-type": "COMPOSITE"}))
    assert store.get("s3://bkt/a") == b"abc"


@pytest.mark.parametrize("size", [-1, 1 << 20, 65_536])
@pytest.mark.parametrize("wrong_at", [0, len(BODY) - 1])
def test_wrong_bytes_are_read_again(server: FaultServer, size: int, wrong_at: int) -> None:
    server.script("x", Step(headers=crc_header(BODY), wrong_at=wrong_at), Step(headers=crc_header(BODY)))
    stream = S3Store(options_on(server.url)).open("s3://bkt/x")
    if size < 0 or wrong_at:
        assert b"".join(iter(lambda: stream.read(size), b"")) == BODY
        assert stream.position == len(BODY)
    else:  # the wrong byte was handed over before anybody could know
        with pytest.raises(StoreError, match="a second reading begins with other bytes than were handed over"):
            list(iter(lambda: stream.read(size), b""))
        assert stream.position < len(BODY), "the end was not told"
    assert len(server.seen("x")) == 2


def test_small_objects_are_mended_wherever_they_are_wrong(server: FaultServer) -> None:
    for wrong_at in range(3):
        server.script("a", Step(headers=crc_header(b"abc"), wrong_at=wrong_at))
        assert S3Store(options_on(server.url)).get("s3://bkt/a") == b"abc"


def test_what_stays_wrong_is_an_error_that_names_both(server: FaultServer) -> None:
    wrong = crc_header(b"abd")["x-amz-checksum-crc32"]
    server.script("a", Step(headers=crc_header(b"abd"), forever=True))
    with pytest.raises(StoreError) as caught:
        S3Store(options_on(server.url)).get("s3://bkt/a")
    found = crc_header(b"abc")["x-amz-checksum-crc32"]
    assert f"s3://bkt/a: its crc32 is {wrong} in the store, and {found} in the bytes received" in str(caught.value)
    assert "so it was when it was read again" in str(caught.value)
    assert (caught.value.key, caught.value.attempts) == ("a", 2)
    assert len(server.seen("a")) == 2


def test_a_second_reading_survives_what_a_first_does(server: FaultServer) -> None:
    wrong = Step(headers=crc_header(BODY), wrong_at=len(BODY) - 5)
    server.script("x", wrong, Step(status=503), Step(headers=crc_header(BODY), cut=900_000), Step(cut=100))
    stream = S3Store(options_on(server.url)).open("s3://bkt/x")
    assert b"".join(iter(lambda: stream.read(1 << 20), b"")) == BODY
    assert len(server.seen("x")) == 5


def test_an_object_replaced_before_the_second_reading(server: FaultServer) -> None:
    server.script("a", Step(headers=crc_header(b"abd")), Step(etag='"new"'))
    with pytest.raises(ChangedDataError):
        S3Store(options_on(server.url)).get("s3://bkt/a")


def test_what_is_not_read_whole_is_not_compared(server: FaultServer) -> None:
    server.script("x", Step(headers=crc_header(b"other"), forever=True))
    store = S3Store(options_on(server.url))
    with store.open("s3://bkt/x") as stream:
        assert stream.read(10) == BODY[:10]
    with store.open("s3://bkt/x") as stream:
        stream.skip(2 << 20)
        assert stream.read() == BODY[2 << 20 :]
    with store.open("s3://bkt/x", offset=5) as stream:
        assert stream.read() == BODY[5:]
    assert store.ranged("s3://bkt/x").read() == BODY


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("read_ahead", [0, 1 << 20, 64 << 20])
def test_a_loader_compares_whatever_it_reads_ahead(server: FaultServer, read_ahead: int, listed: bool) -> None:
    for key in ("a", "x"):
        server.script(key, Step(headers=crc_header(server.objects[key]), forever=True))
    options = options_on(server.url)
    names: Any = S3FileLister("s3://bkt/", options=options) if listed else ["s3://bkt/a", "s3://bkt/x", "s3://bkt/zero"]
    pipe = S3FileLoader(names, options=options, read_ahead=read_ahead)
    assert {name[9:]: stream.read() for name, stream in pipe} == server.objects
    server.objects["x"] = BODY[:-1] + b"\0"  # not what the checksum says
    with pytest.raises(StoreError, match=r"s3://bkt/x: its crc32 is .* in the store, and .* in the bytes received"):
        list(pipe.map(read))


def read(pair: Any) -> Any:
    return pair[1].read()


@pytest.mark.parametrize("start", [1 << 20, (3 << 20) - (256 << 10)])
def test_one_wrong_bit_in_a_part_that_a_worker_reads_ahead(server: FaultServer, start: int) -> None:
    """In the last part it is mended before anybody has it; else the second reading proves that it was handed over."""
    wrong = []

    def judge(request: Request) -> Step | None:
        if request.key != "x":
            return None
        span = {name.lower(): value for name, value in request.headers.items()}.get("range", "")
        spoilt = span.startswith(f"bytes={start}-")
        wrong.extend([span] * spoilt)
        return Step(headers=crc_header(BODY), wrong_at=100 if spoilt else None)

    server.judge = judge
    options = options_on(server.url)
    names = S3FileLister("s3://bkt/x", options=options)
    pipe = names.sharding_filter().load_files_by_s3(options=options, read_ahead=1 << 20).map(read)
    try:
        with loader_of(pipe, 2) as loader:
            if start > 2 << 20:
                assert list(loader) == [BODY]
            else:
                with pytest.raises(StoreError, match=r"s3://bkt/x: its crc32 is .* other bytes than were handed over"):
                    list(loader)
    finally:
        server.judge = None
    assert len(wrong) == 1


def test_a_client_of_the_users_own(server: FaultServer) -> None:
    mine = boto3.client("s3", endpoint_url=server.url)
    store = S3Store(S3Options(client=mine, checksum=True))
    server.script("a", Step(headers=crc_header(b"abc"), wrong_at=1))
    assert store.get("s3://bkt/a") == b"abc"
    server.script("a", Step(headers=crc_header(b"abd"), forever=True))
    with pytest.raises(StoreError, match=r"s3://bkt/a: its crc32 is .* in the store"):
        store.get("s3://bkt/a")
    mine.close()


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
def test_over_another_implementation(moto_server: str, algorithm: Any) -> None:
    put_objects(moto_server, "sums", {})
    client = boto3.client("s3", endpoint_url=moto_server)
    client.put_object(Bucket="sums", Key="x", Body=BODY[:5000], ChecksumAlgorithm=algorithm)
    told = client.head_object(Bucket="sums", Key="x", ChecksumMode="ENABLED")[f"Checksum{algorithm}"]  # type: ignore[literal-required]
    client.close()
    stream = S3Store(S3Options(endpoint_url=moto_server, checksum=True)).open("s3://sums/x")
    assert stream.read() == BODY[:5000]
    assert stream._sum is not None
    assert (stream._sum.name, stream._sum.found) == (algorithm.lower(), told)


def test_obstore_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r'checksum goes with client="boto3"'):
        S3Options(checksum=True, client="obstore")
