"""Names, pages and streams (cases D1, D2) over moto's server, moto's in-process mock, and clients of the user's own."""

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from fault_server import FaultServer, Step
from moto import mock_aws
from s3_objects import HARD_KEYS, body_of, put_objects

from pipes.iter import S3FileLister, S3FileLoader
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options
from pipes.sources.s3_pages import _parse, _scan
from pipes.sources.s3_stream import S3Stream

PATTERN = bytes((31 * i + 7) % 251 for i in range(3 << 20))


@pytest.fixture(scope="module")
def names_url(moto_server: str) -> Iterator[str]:
    put_objects(moto_server, "names", {key: body_of(key) for key in HARD_KEYS})
    kept = [S3Store(S3Options(endpoint_url=moto_server, client=client)) for client in ("auto", "boto3", "obstore")]
    assert {len(list(store.list("s3://names/"))) for store in kept} == {len(HARD_KEYS)}
    yield moto_server
    del kept


@pytest.mark.parametrize("page_size", [1, 2, 1000])
@pytest.mark.parametrize("client", ["auto", "boto3", "obstore"])
def test_listing_is_exact_and_in_utf8_order(names_url: str, client: str, page_size: int) -> None:
    store = S3Store(S3Options(endpoint_url=names_url, client=client))
    expected = sorted(HARD_KEYS, key=str.encode)
    listed = list(store.list("s3://names/in", page_size))
    assert [item.key for item in listed] == expected
    assert [item.size for item in listed] == [len(body_of(key)) for key in expected]
    assert all(item.etag and item.etag.startswith('"') and item.last_modified for item in listed)
    inside = [key for key in expected if key.startswith("in/")]
    assert len(inside) == 12
    assert [item.url for item in store.list("s3://names/in/", page_size)] == [f"s3://names/{key}" for key in inside]
    assert list(store.list("s3://names/none/", page_size)) == []


@pytest.mark.parametrize("client", ["auto", "boto3", "obstore"])
def test_every_key_opened_gives_exactly_its_body(names_url: str, client: str) -> None:
    store = S3Store(S3Options(endpoint_url=names_url, client=client))
    for item in store.list("s3://names/"):
        assert store.get(item.url) == store.get(str(item.url)) == body_of(item.key), item.key


def test_keys_that_paths_cannot_hold() -> None:
    keys = ["a/./b", "a/../b", "/lead", "tab\tline\n", "\x01", "a/b/", "%", "<&>\"'"]
    with FaultServer({key: key.encode() for key in keys}) as server:
        for client in ("boto3", "obstore"):
            options = S3Options(endpoint_url=server.url, unsigned=True, client=client)
            store = S3Store(options)
            assert [item.key for item in store.list("s3://bkt/")] == sorted(keys)
            assert [store.get(item.url) for item in store.list("s3://bkt/")] == [key.encode() for key in sorted(keys)]


def test_an_odd_listing_page_reads_like_a_plain_one() -> None:
    head = '<?xml version="1.0"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    entry = (
        "<Contents><Size>3</Size><Key>a+%2B</Key><ETag>&quot;t&quot;</ETag>"
        "<LastModified>2026-12-07T10:00:00.000Z</LastModified></Contents>"
    )
    tail = "<IsTruncated>true</IsTruncated><NextContinuationToken>n&amp;n</NextContinuationToken></ListBucketResult>"
    plain = head + "<EncodingType>url</EncodingType>" + entry + tail
    scanned = _scan(plain)
    assert scanned is not None
    assert scanned == _parse(plain.encode())
    assert (scanned[0][0][0], scanned[0][0][2], scanned[1:]) == ("a +", '"t"', (True, "n&n"))
    odd = plain.replace("&quot;t&quot;", "&quot;t&amp;quot;&#34;").replace("a+%2B", "a")
    scanned = _scan(odd)
    assert scanned is not None
    assert scanned == _parse(odd.encode())
    assert scanned[0][0][:3] == ("a", 3, '"t&quot;"')
    assert _scan(head + entry + tail) is None, "keys that are not encoded may hold entities"
    assert _parse((head + entry + tail).encode())[0][0][0] == "a+%2B"
    assert _scan(plain.replace("<ETag>&quot;t&quot;</ETag>", "")) is None
    assert _scan(plain[:-20]) is None


@pytest.mark.parametrize("page_size", [0, 1001])
def test_page_size_is_checked_before_anything_is_sent(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size={page_size}"):
        S3Store().list("s3://b/", page_size)
    with pytest.raises(ValueError, match="'b/k'"):
        S3Store().list("b/k")


@pytest.fixture(scope="module")
def pattern_server() -> Iterator[FaultServer]:
    with FaultServer({"x": PATTERN, "small": PATTERN[:5000], "lines": b"one\r\ntwo\n\nlast"}) as server:
        options = [
            S3Options(endpoint_url=server.url, unsigned=True, client=each) for each in ("auto", "boto3", "obstore")
        ]
        kept = [S3Store(each) for each in options]
        assert {len(list(store.list("s3://bkt/"))) for store in kept} == {3}
        yield server


def open_on(server: FaultServer, key: str, client: str = "auto", **more: Any) -> S3Stream:
    return S3Store(S3Options(endpoint_url=server.url, unsigned=True, client=client)).open(f"s3://bkt/{key}", **more)


@pytest.mark.parametrize("client", ["boto3", "obstore"])
@pytest.mark.parametrize("size", [1, 511, 65_536, 1 << 20, 10 << 20])
def test_reads_of_any_size(pattern_server: FaultServer, client: str, size: int) -> None:
    key = "small" if size == 1 else "x"
    whole = pattern_server.objects[key]
    with open_on(pattern_server, key, client) as stream:
        parts = list(iter(lambda: stream.read(size), b""))
        assert {len(part) for part in parts[:-1]} <= {size}
        assert b"".join(parts) == whole
        assert stream.position == stream.tell() == stream.size == len(whole)


def test_a_stream_is_a_buffered_binary_file(pattern_server: FaultServer) -> None:
    stream = open_on(pattern_server, "lines")
    assert isinstance(stream, io.BufferedIOBase)
    assert (stream.readable(), stream.seekable(), stream.writable()) == (True, False, False)
    assert stream.name == "s3://bkt/lines"
    assert stream.peek()[:3] == b"one"
    assert stream.readline() == b"one\r\n"
    buffer = bytearray(2)
    assert stream.readinto(buffer) == 2
    assert bytes(buffer) == b"tw"
    assert stream.read1(100) == b"o\n\nlast"
    assert (stream.read1(), stream.read(), stream.peek()) == (b"", b"", b"")
    stream.close()
    with pytest.raises(ValueError, match="closed stream: s3://bkt/lines"):
        stream.read()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(stream)
    text = io.TextIOWrapper(open_on(pattern_server, "lines"))
    assert list(text) == ["one\n", "two\n", "\n", "last"]


@pytest.mark.parametrize("offset", [0, 1, 2 << 20, (3 << 20) - 1, 3 << 20])
def test_open_at_an_offset(pattern_server: FaultServer, offset: int) -> None:
    for client in ("boto3", "obstore"):
        for known in (None, len(PATTERN)):
            with open_on(pattern_server, "x", client, offset=offset, size=known) as stream:
                assert stream.position == offset
                assert stream.read() == PATTERN[offset:]


def test_skip_reads_over_little_and_asks_again_over_much(pattern_server: FaultServer) -> None:
    with open_on(pattern_server, "x", "boto3") as stream:
        before = len(pattern_server.requests)
        assert stream.read(10) == PATTERN[:10]
        stream.skip(1000)
        stream.skip((1 << 20) - 1000)  # what has arrived and a little more
        assert stream.read(5) == PATTERN[(1 << 20) + 10 :][:5]
        assert len(pattern_server.requests) == before
    with open_on(pattern_server, "x", "boto3") as stream:
        before = len(pattern_server.requests)
        assert stream.skip(2 << 20) == 2 << 20
        assert stream.skip(300_000) == 300_000
        assert stream.position == (2 << 20) + 300_000
        assert stream.read(7) == PATTERN[(2 << 20) + 300_000 :][:7]
        (asked,) = pattern_server.requests[before:]
        assert asked.headers["Range"] == f"bytes={(2 << 20) + 300_000}-"
        assert stream.skip(100 << 20) == (1 << 20) - 300_007  # no more is left
        assert stream.read() == b""
        assert len(pattern_server.requests) == before + 1
        with pytest.raises(ValueError, match="forward only"):
            stream.skip(-1)


def test_an_interrupt_in_a_read_loses_no_byte(pattern_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_on(pattern_server, "x", "boto3")
    assert stream.read(10) == PATTERN[:10]
    body = stream._body
    assert body is not None

    def interrupted(limit: int, buffers: None) -> bytes:
        type(body).read(body, limit)
        raise KeyboardInterrupt

    monkeypatch.setattr(body, "read", interrupted)
    at = stream._arrived
    with pytest.raises(KeyboardInterrupt):
        stream.read(2 << 20)
    assert stream._arrived == at
    stream.close()


def test_connections_are_kept(pattern_server: FaultServer) -> None:
    store = S3Store(S3Options(endpoint_url=pattern_server.url, unsigned=True, client="boto3"))
    before = len(pattern_server.requests)
    for _ in range(3):
        with store.open("s3://bkt/small") as stream:
            stream.read()
    assert len({request.port for request in pattern_server.requests[before:]}) == 1


def test_auto_takes_obstore_once_objects_prove_small(pattern_server: FaultServer) -> None:
    store = S3Store(S3Options(endpoint_url=pattern_server.url, unsigned=True))
    before = len(pattern_server.requests)
    for url in ("s3://bkt/small", "s3://bkt/small", "s3://bkt/x", "s3://bkt/small", "s3://bkt/small"):
        store.get(url)
    clients = [
        {name.lower(): value for name, value in request.headers.items()}["user-agent"].partition("/")[0]
        for request in pattern_server.requests[before:]
    ]
    assert clients == ["Boto3", "pipes", "pipes", "Boto3", "pipes"]


def test_which_client_was_used_can_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    with FaultServer({"a": b"a", "b": b"b"}) as server, caplog.at_level("INFO", "pipes"):
        options = S3Options(endpoint_url=server.url, unsigned=True)
        names = S3FileLister("s3://bkt/", options=options)
        listed = names.load_files_by_s3(options=options)
        plain = S3FileLoader(["s3://bkt/a"], options=replace(options, client="boto3"))
        assert (names.clients_in_use, listed.clients_in_use, plain.clients_in_use) == ((), (), ())
        assert [stream.read() for _, stream in listed] + [stream.read() for _, stream in plain] == [b"a", b"b", b"a"]
        assert (names.clients_in_use, listed.clients_in_use) == (("boto3",), ("obstore",))
        assert plain.clients_in_use == ("boto3",)
        server.script("a", Step(status=503))
        assert [stream.read() for _, stream in listed] == [b"a", b"b"]
        assert listed.clients_in_use == ("boto3", "obstore"), "a second attempt goes through boto3"
        again: S3FileLoader = pickle.loads(pickle.dumps(plain))
        assert again.clients_in_use == ()
    said = [record.getMessage() for record in caplog.records if "is in use" in record.getMessage()]
    assert said == [
        f"s3://bkt: {client} is in use in process {os.getpid()}" for client in ("boto3", "obstore", "boto3")
    ], "once for each bucket and settings"


def test_the_environment_does_not_reach_past_the_options(
    pattern_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for client in ("boto3", "obstore"):
        options = S3Options(endpoint_url=pattern_server.url, client=client, access_key="OWN", secret_key="s")
        assert S3Store(options).get("s3://bkt/small") == PATTERN[:5000]
        headers = {name.lower(): value for name, value in pattern_server.requests[-1].headers.items()}
        assert "Credential=OWN/" in headers["authorization"]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL"])
@pytest.mark.parametrize("client", ["boto3", "obstore"])
def test_endpoint_and_region_from_the_environment(
    pattern_server: FaultServer, monkeypatch: pytest.MonkeyPatch, variable: str, client: str
) -> None:
    monkeypatch.setenv(variable, pattern_server.url)
    monkeypatch.setenv("AWS_REGION", "eu-test-1")
    assert S3Store(S3Options(client=client)).get("s3://bkt/small") == PATTERN[:5000]
    headers = {name.lower(): value for name, value in pattern_server.requests[-1].headers.items()}
    assert "/eu-test-1/s3/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "testing"


def test_requester_pays_and_unsigned(pattern_server: FaultServer) -> None:
    for client in ("boto3", "obstore"):
        S3Store(S3Options(endpoint_url=pattern_server.url, client=client, requester_pays=True)).get("s3://bkt/small")
        headers = {name.lower(): value for name, value in pattern_server.requests[-1].headers.items()}
        assert headers["x-amz-request-payer"] == "requester"
        S3Store(S3Options(endpoint_url=pattern_server.url, client=client, unsigned=True)).get("s3://bkt/small")
        assert "authorization" not in {name.lower() for name in pattern_server.requests[-1].headers}


def test_no_credentials(pattern_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    for client in ("boto3", "obstore"):
        with pytest.raises(PermissionError, match=r"no usable credentials .*unsigned=True"):
            S3Store(S3Options(endpoint_url=pattern_server.url, client=client)).open("s3://bkt/small")


def test_a_profile_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="profile 'nobody' is in none of the AWS configuration files"):
        S3Store(S3Options(profile="nobody")).open("s3://b/k")


@pytest.mark.parametrize("client", ["auto", "obstore", "boto3"])
def test_under_mock_aws_everything_goes_through_boto3(client: str) -> None:
    store = S3Store(S3Options(client=client, region="us-east-1", attempts=1))
    for _ in range(2):  # the second time on a fresh mock, with the store that saw the first
        with mock_aws():
            mine = boto3.client("s3", region_name="us-east-1")
            mine.create_bucket(Bucket="mocked")
            mine.put_object(Bucket="mocked", Key="a b", Body=b"abc")
            (item,) = store.list("s3://mocked/")
            assert (item.key, item.size, store.get(item.url)) == ("a b", 3, b"abc")


def test_a_boto3_client_of_the_users_own() -> None:
    with mock_aws():
        mine = boto3.client("s3", region_name="us-east-1")
        mine.create_bucket(Bucket="mocked")
        for key in ("a+b", "a b"):
            mine.put_object(Bucket="mocked", Key=key, Body=key.encode())
        store = S3Store(S3Options(client=mine))
        assert [(item.key, item.size) for item in store.list("s3://mocked/", 1)] == [("a b", 3), ("a+b", 3)]
        assert store.get("s3://mocked/a+b") == b"a+b"
        with pytest.raises(TypeError, match="boto3 client of yours cannot travel"):
            pickle.dumps(store)


def test_a_store_pickles_as_its_settings(pattern_server: FaultServer) -> None:
    store = S3Store(S3Options(endpoint_url=pattern_server.url, unsigned=True))
    store.get("s3://bkt/small")
    again = pickle.loads(pickle.dumps(store))
    assert again.options == store.options
    assert again.get("s3://bkt/small") == PATTERN[:5000]


def test_a_stalled_reader_does_not_disturb_the_next(pattern_server: FaultServer) -> None:
    store = S3Store(S3Options(endpoint_url=pattern_server.url, unsigned=True))
    with store.open("s3://bkt/x") as first, store.open("s3://bkt/x") as second:
        assert first.read(100) == second.read(100) == PATTERN[:100]
        assert second.read() == PATTERN[100:]
        assert first.read() == PATTERN[100:]
    pattern_server.script("x", Step())
