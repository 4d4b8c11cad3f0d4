"""`.save_to_webdataset` into a store: the shards that local folders get, each there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from fault_server import FaultServer, Step
from loading import loader_of
from moto import mock_aws
from s3_objects import put_objects

from pipes import IterDataPipe
from pipes.errors import DataError, StoreError, StoreNotFoundError
from pipes.formats.decode import decode
from pipes.iter import IterableWrapper, S3FileLister
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

pytestmark = pytest.mark.usefixtures("no_residue")


@pytest.fixture(scope="module", autouse=True)
def clients_have_started() -> Iterator[None]:
    """Start obstore's runtime, whose descriptors live as long as the process, before `no_residue` looks."""
    with FaultServer({"x": b"x"}) as server:
        assert S3Store(S3Options(endpoint_url=server.url, unsigned=True, client="obstore")).get("s3://bkt/x") == b"x"
        yield


def sample(number: int) -> dict[str, Any]:
    return {"__key__": f"d.1/{number:04d}", "cls": number, "seg.json": {"n": number}, "bin": b"\0" * number}


def saving(target: Any, count: int = 11, **options: Any) -> IterDataPipe[str]:
    return IterableWrapper(range(count)).sharding_filter().map(sample).save_to_webdataset(target, maxcount=3, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_gets_the_shards_that_a_folder_gets(moto_server: str, tmp_path: Path, workers: int) -> None:
    bucket = f"shards{workers}"
    put_objects(moto_server, bucket, {})
    options = S3Options(endpoint_url=moto_server)
    with loader_of(saving(tmp_path), workers) as loader:
        files = list(loader)
    with loader_of(saving(f"s3://{bucket}/out/", options=options), workers) as loader:
        urls = list(loader)
    assert urls == [f"s3://{bucket}/out/{Path(file).name}" for file in files]
    store = S3Store(options)
    assert [store.get(url) for url in urls] == [Path(file).read_bytes() for file in files]
    listed = S3FileLister(f"s3://{bucket}/out/", options=options)
    assert sorted(listed) == sorted(urls)
    read = listed.load_files_by_s3(options=options).load_from_tar().webdataset().map(decode)
    found = sorted(
        ({**each, "__key__": each["__key__"].partition(".tar/")[2]} for each in read), key=lambda s: s["cls"]
    )
    assert found == [sample(number) for number in range(11)]


def test_the_in_process_mock() -> None:
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="mocked")
        options = S3Options(region="us-east-1")
        urls = list(saving("s3://mocked", options=options))
        assert urls == [f"s3://mocked/shard-000-{shard:06d}.tar" for shard in range(4)]
        assert list(S3FileLister("s3://mocked/", options=options)) == urls


def test_what_breaks_off_puts_no_object(moto_server: str) -> None:
    put_objects(moto_server, "broken", {})
    options = S3Options(endpoint_url=moto_server)
    pipe = IterableWrapper([sample(0), sample(1), {"txt": "no key"}]).save_to_webdataset(
        "s3://broken/x", maxcount=1, options=options
    )
    given = iter(pipe)
    assert [next(given), next(given)] == [f"s3://broken/x/shard-000-{shard:06d}.tar" for shard in range(2)]
    with pytest.raises(DataError, match="needs its key"):
        next(given)
    assert len(list(S3FileLister("s3://broken/", options=options))) == 2
    with pytest.raises(StoreNotFoundError, match="s3://none"):
        list(saving("s3://none/x", options=options))
    with pytest.raises(ValueError, match="s3://"):
        saving("s3:///x")


def test_a_store_that_refuses_names_the_shard_and_the_stage() -> None:
    with FaultServer({}) as server:
        server.script("x/shard-000-000000.tar", Step(status=403, code="AccessDenied", forever=True))
        options = S3Options(endpoint_url=server.url, unsigned=True, attempts=2, backoff=0.01)
        with pytest.raises(StoreError, match=r"s3://bkt/x/shard-000-000000\.tar") as caught:
            list(saving("s3://bkt/x", options=options))
        assert any("WebDatasetSaver" in note for note in caught.value.__notes__)
