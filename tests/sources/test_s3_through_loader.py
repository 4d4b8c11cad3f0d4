"""Cases D1, D3 and D4 through a DataLoader2 with two workers: main lists, the workers open and read."""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from fault_server import LIST, FaultServer, Request, Step
from loading import loader_of
from s3_objects import HARD_KEYS, body_of, put_objects

from pipes import IterDataPipe
from pipes.errors import ChangedDataError, StoreConnectionError, StoreNotFoundError, StorePermissionError
from pipes.iter import IterableWrapper, S3FileLister
from pipes.sources.s3_options import S3Options

PATTERN = bytes((31 * i + 7) % 251 for i in range(1_000_000))
OPTIONS = S3Options(unsigned=True, attempts=4, backoff=0.05, read_timeout=5.0)
CLIENTS = ("boto3", "obstore")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def server(shared_server: FaultServer) -> FaultServer:
    shared_server.reset({key: key.encode() for key in "abcdf"} | {"a": b"abc"})
    return shared_server


def read(pair: Any) -> tuple[str, bytes]:
    return str(pair[0]), pair[1].read()


def reading(names: IterDataPipe[Any], options: S3Options, **more: Any) -> IterDataPipe[Any]:
    return names.sharding_filter().load_files_by_s3(options=options, **more).map(read)


def from_workers(pipe: IterDataPipe[Any]) -> list[Any]:
    with loader_of(pipe, 2) as loader:
        found = list(loader)
        assert len(loader.stats()["workers"]) == 2
    return found


@pytest.mark.parametrize(("prefix", "count"), [("in/", 12), ("in", 14)])
def test_hard_names_come_in_order_with_their_bodies(moto_server: str, prefix: str, count: int) -> None:
    put_objects(moto_server, "hard", {key: body_of(key) for key in HARD_KEYS})
    keys = sorted((key for key in HARD_KEYS if key.startswith(prefix)), key=str.encode)
    assert len(keys) == count
    options = S3Options(endpoint_url=moto_server)

    def listed(page_size: int, **more: Any) -> IterDataPipe[Any]:
        return S3FileLister(f"s3://hard/{prefix}", page_size=page_size, options=options, **more)

    all_of_them = listed(2, keep_markers=True).concat(listed(1), listed(1000))
    expected = [(f"s3://hard/{key}", body_of(key)) for key in keys]
    plain = [pair for pair in expected if not pair[0].endswith("/")]
    assert len(plain) == count - 2
    assert from_workers(reading(all_of_them, options)) == expected + plain + plain


def test_an_empty_prefix_gives_nothing_and_a_missing_bucket_an_error(moto_server: str) -> None:
    put_objects(moto_server, "hard", {})
    options = S3Options(endpoint_url=moto_server)
    assert from_workers(reading(S3FileLister("s3://hard/none/", options=options), options)) == []
    with pytest.raises(StoreNotFoundError, match="s3://nowhere: the bucket does not exist"):
        from_workers(reading(S3FileLister("s3://nowhere/in/", options=options), options))


@pytest.mark.parametrize("client", CLIENTS)
def test_passing_faults_are_waited_out(server: FaultServer, client: str) -> None:
    server.script("a", Step(status=503), Step(status=503))
    server.script("f", Step(status=429, headers={"Retry-After": "1"}))
    server.script(LIST, Step(), Step(status=500))
    options = replace(OPTIONS, endpoint_url=server.url, client=client)
    names = S3FileLister("s3://bkt/", page_size=2, options=options)
    found = from_workers(reading(names, options))
    assert found == [(f"s3://bkt/{key}", body) for key, body in sorted(server.objects.items())]
    assert [len(server.seen(key)) for key in "abcdf"] == [3, 1, 1, 1, 2]
    assert len(server.seen(LIST)) == 4, "three pages, one of them twice, for both workers together"
    first, second = server.seen("f")
    assert second.time - first.time >= 1


@pytest.mark.parametrize(
    ("key", "status", "kind", "builtin", "attempts"),
    [
        ("b", 503, StoreConnectionError, ConnectionError, 4),
        ("c", 403, StorePermissionError, PermissionError, 1),
        ("d", 404, StoreNotFoundError, FileNotFoundError, 1),
    ],
)
def test_what_stays_wrong_comes_from_the_worker_with_its_fields(
    server: FaultServer, key: str, status: int, kind: Any, builtin: type[OSError], attempts: int
) -> None:
    server.script(key, Step(status=status, forever=True))
    options = replace(OPTIONS, endpoint_url=server.url)
    names = IterableWrapper([f"s3://bkt/{name}" for name in "af" + key])
    given: list[Any] = []
    with loader_of(reading(names, options), 2) as loader, pytest.raises(kind, match=f"s3://bkt/{key}: ") as caught:
        given.extend(loader)
    error = caught.value
    assert isinstance(error, builtin)
    assert (error.bucket, error.key, error.status, error.attempts) == ("bkt", key, status, attempts)
    assert error.request_id == "REQ7"
    assert len(server.seen(key)) == attempts
    assert any("S3FileLoader" in note for note in error.__notes__)
    assert any("worker 0" in note for note in error.__notes__)
    assert given == [("s3://bkt/a", b"abc"), ("s3://bkt/f", b"f")]


def test_a_deadline_ends_the_attempts(server: FaultServer) -> None:
    server.script("a", Step(status=503, forever=True))
    server.script("b", Step(status=503, headers={"Retry-After": "60"}, forever=True))
    options = replace(OPTIONS, endpoint_url=server.url, attempts=10_000, deadline=0.5, client="boto3")
    with pytest.raises(StoreConnectionError, match=r"s3://bkt/a: .*gave up after \d\.\d s and \d+ attempts?"):
        from_workers(reading(IterableWrapper(["s3://bkt/a"] * 2), options))
    with pytest.raises(StoreConnectionError, match=r"s3://bkt/b: .*asks to wait 60 s, beyond the deadline of 0.5 s"):
        from_workers(reading(IterableWrapper(["s3://bkt/b"] * 2), options))
    assert len(server.seen("b")) <= 2, "each worker asks once at most"


def ranges(requests: list[Request]) -> list[tuple[str | None, str | None]]:
    headers = [{name.lower(): value for name, value in request.headers.items()} for request in requests]
    return [(each.get("range"), each.get("if-match")) for each in headers]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_cut_body_is_resumed_and_never_short(server: FaultServer, client: str) -> None:
    options = replace(OPTIONS, endpoint_url=server.url, client=client)
    keys = ["x", "y", "z"]
    server.reset(dict.fromkeys(keys, PATTERN))
    server.etags.update(dict.fromkeys(keys, '"t1"'))
    for key in keys:
        server.script(key, Step(cut=600_000))

    def in_pieces(pair: Any) -> tuple[str, str]:
        digest = sha256()
        size = {"x": 1_000_000, "y": 65_536, "z": 7919}[pair[0][-1]]
        while data := pair[1].read(size):
            digest.update(data)
        return pair[0], digest.hexdigest()

    names = S3FileLister("s3://bkt/", options=options)
    pipe = names.sharding_filter().load_files_by_s3(options=options).map(in_pieces)
    assert from_workers(pipe) == [(f"s3://bkt/{key}", sha256(PATTERN).hexdigest()) for key in keys]
    for key in keys:
        first, second = ranges(server.seen(key))
        assert first[0] is None
        assert second == ("bytes=600000-", '"t1"')
    server.script("y", Step(cut=1000, forever=True))
    with pytest.raises(StoreConnectionError, match=r"s3://bkt/y: .*bytes were received.*gave up after 4 attempts"):
        from_workers(reading(names, options))


def test_an_object_replaced_on_the_way_is_refused_and_others_can_be_skipped(
    server: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(OPTIONS, endpoint_url=server.url)
    server.script("b", Step(body=b"new"))
    names = S3FileLister("s3://bkt/", options=options)
    old = server.etag("b")
    with pytest.raises(ChangedDataError, match=f"s3://bkt/b: the object was replaced.*{old}") as caught:
        from_workers(reading(names, options))
    assert server.etag("b") in str(caught.value)
    server.script("b", Step(status=404, forever=True))
    server.script("c", Step(status=403, forever=True))
    with (
        caplog.at_level(logging.WARNING, "pipes"),
        loader_of(reading(names, options, on_error="skip", max_errors=2), 2) as loader,
    ):
        assert [name[-1] for name, _ in loader] == ["a", "d", "f"]
        (counts,) = loader.stats()["errors"].values()
    assert (counts["taken"], counts["skipped"]) == (5, 2)
