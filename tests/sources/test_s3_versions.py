"""Objects that are replaced or deleted while they are read, in buckets that keep versions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import boto3
import pytest
from fault_server import FaultServer, Request, Step
from s3_objects import put_objects
from stage_contract import start

from pipes.errors import ChangedDataError, StoreNotFoundError
from pipes.iter import S3FileLister, S3FileLoader
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

MiB = 1 << 20
OLD = bytes((31 * i + 7) % 251 for i in range(251)) * 12_000
NEW = OLD[::-1]

clients = pytest.mark.parametrize("client", ["boto3", "obstore"])


@pytest.fixture
def server(shared_server: FaultServer) -> Iterator[FaultServer]:
    shared_server.reset({"x": OLD})
    shared_server.versions = {}
    yield shared_server
    shared_server.judge = None


def store_on(server: FaultServer, client: str = "auto", **more: Any) -> S3Store:
    return S3Store(options_on(server, client=client, **more))


def options_on(server: FaultServer, **more: Any) -> S3Options:
    return S3Options(endpoint_url=server.url, unsigned=True, attempts=3, backoff=0.01, **more)


def replaced(server: FaultServer) -> None:
    server.objects["x"] = NEW


def deleted(server: FaultServer) -> None:
    del server.objects["x"]


def versions_asked(server: FaultServer) -> set[str | None]:
    return {request.query.get("versionId") for request in server.seen("x")}


@clients
@pytest.mark.parametrize("change", [replaced, deleted])
@pytest.mark.parametrize("obedient", [True, False])
def test_a_stream_goes_on_with_its_version(server: FaultServer, client: str, change: Any, obedient: bool) -> None:
    old = server.etag("x")
    server.script("x", Step(cut=600_000), Step(ignore_match=not obedient))
    with store_on(server, client).open("s3://bkt/x") as stream:
        assert stream.read(1000) == OLD[:1000]
        assert stream.version == old.strip('"')
        change(server)
        assert stream.read() == OLD[1000:]
        assert stream.etag == old
    assert versions_asked(server) == {None, old.strip('"')}


@clients
def test_no_version_is_asked_for_where_none_has_to_be(server: FaultServer, client: str) -> None:
    server.script("x", Step(cut=600_000))
    assert store_on(server, client).get("s3://bkt/x") == OLD
    assert versions_asked(server) == {None}


@clients
@pytest.mark.parametrize("refusal", [Step(status=403), Step(status=404, code="NoSuchVersion")])
def test_a_version_that_cannot_be_read_is_an_error_that_names_both_tags(
    server: FaultServer, client: str, refusal: Step
) -> None:
    def judge(request: Request) -> Step | None:
        return refusal if "versionId" in request.query else None

    server.judge = judge
    old = server.etag("x")
    server.script("x", Step(cut=600_000))
    with store_on(server, client).open("s3://bkt/x") as stream:
        assert stream.read(1000) == OLD[:1000]
        replaced(server)
        with pytest.raises(ChangedDataError, match=f"s3://bkt/x: the object was replaced.*{old}") as caught:
            stream.read()
    assert server.etag("x") in str(caught.value)
    assert any(f"version {stream.version} cannot be read" in note for note in caught.value.__notes__)


def test_where_no_versions_are_kept_a_deleted_object_is_missing(server: FaultServer) -> None:
    server.versions = None
    server.script("x", Step(cut=600_000))
    with store_on(server).open("s3://bkt/x") as stream:
        assert (stream.read(1000), stream.version) == (OLD[:1000], None)
        deleted(server)
        with pytest.raises(StoreNotFoundError, match="s3://bkt/x"):
            stream.read()


def test_an_object_replaced_after_the_listing_is_refused(server: FaultServer) -> None:
    """A listing names no versions."""
    (listed,) = store_on(server).list("s3://bkt/")
    replaced(server)
    with pytest.raises(ChangedDataError) as caught:
        store_on(server).open(listed.url)
    assert listed.etag is not None
    assert listed.etag in str(caught.value)
    assert server.etag("x") in str(caught.value)


@clients
@pytest.mark.parametrize("sized", [True, False])
def test_ranges_are_of_one_version(server: FaultServer, client: str, sized: bool) -> None:
    store = store_on(server, client)
    with store.ranged("s3://bkt/x", size=len(OLD) if sized else None) as file:
        assert file.read_at(MiB, 10) == OLD[MiB : MiB + 10]
        replaced(server)
        assert file.read_at(2 * MiB, 300_000) == OLD[2 * MiB : 2 * MiB + 300_000]
    server.objects["x"] = OLD
    with store.open("s3://bkt/x") as stream, stream.ranged() as file:
        deleted(server)
        assert file.read() == OLD


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("change", [replaced, deleted])
def test_parts_read_ahead_are_of_one_version(server: FaultServer, listed: bool, checksum: bool, change: Any) -> None:
    told = {"x-amz-checksum-crc32": b64encode(crc32(OLD).to_bytes(4, "big")).decode()}
    server.script("x", Step(headers=told, forever=True))
    options = options_on(server, checksum=checksum)
    names: Any = S3FileLister("s3://bkt/", options=options) if listed else ["s3://bkt/x"]
    run = start(S3FileLoader(names, options=options, read_ahead=MiB))
    ((_, stream),) = [next(iter(run))]
    assert stream.read(1000) == OLD[:1000]
    change(server)
    assert stream.read() == OLD[1000:]
    run.context.close()
    assert versions_asked(server) > {None}


def test_over_another_implementation(moto_server: str) -> None:
    put_objects(moto_server, "kept", {})
    client = boto3.client("s3", endpoint_url=moto_server)
    client.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
    version = client.put_object(Bucket="kept", Key="x", Body=OLD)["VersionId"]
    for name in ("boto3", "obstore"):
        store = S3Store(replace(S3Options(endpoint_url=moto_server), client=name))
        file = store.ranged("s3://kept/x")
        assert file.read_at(0, 10) == OLD[:10]
        with store.open("s3://kept/x") as stream:
            assert stream.read(10) == OLD[:10]
            assert stream.version == version
            client.put_object(Bucket="kept", Key="x", Body=NEW)
            stream.skip(2 * MiB)
            assert stream.read() == OLD[2 * MiB + 10 :]
        client.delete_object(Bucket="kept", Key="x")
        assert file.read_at(MiB, 300_000) == OLD[MiB : MiB + 300_000]
        version = client.put_object(Bucket="kept", Key="x", Body=OLD)["VersionId"]
    client.close()
