"""Tar shards in S3, in process and on two workers: hard names (case D6), cut archives, stores that give nothing."""

from __future__ import annotations

import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from fault_server import LIST, FaultServer, Step
from loading import loader_of
from moto import mock_aws
from s3_objects import put_objects
from tars import HARD_STEM, hard_archive, make_tar

from pipes import IterDataPipe
from pipes.errors import StoreConnectionError, StoreError, StoreNotFoundError, StorePermissionError, TruncatedError
from pipes.iter import FileLister, IterableWrapper, S3FileLister
from pipes.loader2 import DataLoader2, InProcessReadingService
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

pytestmark = pytest.mark.usefixtures("no_residue")
workers = pytest.mark.parametrize("workers", [0, 2])

PAX_STEM = "ü" * 60
SHARDS = {"hard.tar": hard_archive(), "pax.tar": make_tar([(f"{PAX_STEM}.txt", b"x")], tarfile.PAX_FORMAT)}
SAMPLES = [
    {"__key__": f"hard.tar/{HARD_STEM}", "bin": b"", "seg.json": b'{"k":1}'},
    {"__key__": "hard.tar/v1.2/s0002", "bin": b"\0\1", "seg.json": b"[]"},
    {"__key__": f"pax.tar/{PAX_STEM}", "txt": b"x"},
]

MEMBERS = [("a.txt", b"a" * 700), ("b.txt", b"b" * 512), ("c.txt", b"")]
WHOLE = make_tar(MEMBERS)
# Where each member is complete: with its last byte.
ENDS = [512 + 700, 2048 + 512, 2560 + 512]
CUTS = [0, 511, 1000, 1212, 2560, 3071, 3584]


@pytest.fixture(scope="module")
def store(moto_server: str) -> str:
    bodies = {f"train/{name}": body for name, body in SHARDS.items()}
    bodies |= {"whole.tar": WHOLE} | {f"cut/{cut}.tar": WHOLE[:cut] for cut in CUTS}
    put_objects(moto_server, "tars", bodies)
    return moto_server


@pytest.fixture(scope="module", autouse=True)
def clients_have_started(shared_server: FaultServer) -> None:
    """Start obstore's runtime, whose descriptors live as long as the process, before `no_residue` looks."""
    shared_server.reset({"x": b"x"})
    options = S3Options(endpoint_url=shared_server.url, unsigned=True, client="obstore")
    assert S3Store(options).get("s3://bkt/x") == b"x"


def in_store(store: str) -> IterDataPipe[Any]:
    names = S3FileLister("s3://tars/train/", masks="*.tar", endpoint_url=store).sharding_filter()
    return names.load_files_by_s3(endpoint_url=store).load_from_tar()


def read_sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == "__key__" else value.read() for name, value in sample.items()}


def read_member(member: tuple[str, Any]) -> tuple[str, bytes]:
    return member[0], member[1].read()


def below(root: str, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**sample, "__key__": f"{root}{sample['__key__']}"} for sample in samples]


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


@workers
def test_a_store_gives_the_samples_that_local_files_give(store: str, tmp_path: Path, workers: int) -> None:
    for name, body in SHARDS.items():
        (tmp_path / name).write_bytes(body)
    local = FileLister(str(tmp_path)).sharding_filter().open_files("rb").load_from_tar()
    for root, members in ((f"{tmp_path}/", local), ("s3://tars/train/", in_store(store))):
        with loader_of(members.webdataset().map(read_sample), workers) as loader:
            assert sorted(loader, key=key_of) == below(root, SAMPLES)


@workers
def test_members_from_a_store_stay_readable_in_a_shuffle_buffer(store: str, workers: int) -> None:
    with loader_of(in_store(store).shuffle(buffer_size=10).map(read_member), workers) as loader:
        members = dict(loader)
    assert sorted(members.values()) == [b"", b"\0\1", b"[]", b"x", b'{"k":1}']


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_archive_is_an_error_after_its_complete_members(store: str, cut: int) -> None:
    names = IterableWrapper([f"s3://tars/cut/{cut}.tar"])
    check_cut(iter(names.load_files_by_s3(endpoint_url=store).load_from_tar().map(read_member)), cut)


@pytest.mark.parametrize("cut", [0, 1000, 2560])
def test_a_cut_archive_on_a_worker(store: str, cut: int) -> None:
    names = IterableWrapper(["s3://tars/whole.tar", f"s3://tars/cut/{cut}.tar"]).sharding_filter()
    pipe = names.load_files_by_s3(endpoint_url=store).load_from_tar().map(read_member)
    with loader_of(pipe, 2) as loader:
        error = check_cut(iter(loader), cut)
    assert any("worker 1" in note for note in error.__notes__)


def check_cut(members: Iterator[tuple[str, bytes]], cut: int) -> TruncatedError:
    """Check that the complete members of `cut/N.tar` come, then the error, and return that."""
    root = f"s3://tars/cut/{cut}.tar"
    got: list[tuple[str, bytes]] = []
    with pytest.raises(TruncatedError, match=rf"{root}: ") as caught:
        got.extend(members)
    complete = [(f"{root}/{name}", data) for (name, data), end in zip(MEMBERS, ENDS, strict=True) if cut >= end]
    assert [member for member in got if member[0].startswith(root)] == complete
    assert ("empty archive" if cut == 0 else f"at byte {cut}:") in str(caught.value)
    return caught.value


def listed(url: str, options: S3Options) -> IterDataPipe[Any]:
    names = S3FileLister(url, endpoint_url=options.endpoint_url, options=options).sharding_filter()
    return names.load_files_by_s3(options=options).load_from_tar()


def opened(url: str, options: S3Options) -> IterDataPipe[Any]:
    return IterableWrapper([f"{url}.tar"] * 4).sharding_filter().load_files_by_s3(options=options).load_from_tar()


# The listing is read by main, the objects by the workers.
@pytest.mark.timeout(60)
@workers
@pytest.mark.parametrize("graph", [listed, opened])
@pytest.mark.parametrize(
    ("fault", "url", "kind", "words"),
    [
        ("missing", "s3://other/x", StoreNotFoundError, "s3://other.*does not exist"),
        ("denied", "s3://bkt/x", StorePermissionError, "s3://bkt.*denied access"),
        ("down", "s3://bkt/x", StoreConnectionError, "s3://bkt.*gave up after"),
    ],
)
def test_a_store_that_gives_nothing_is_one_clear_error(
    shared_server: FaultServer, fault: str, url: str, kind: type[StoreError], words: str, graph: Any, workers: int
) -> None:
    shared_server.reset({})
    for key in (LIST, "x.tar") if fault == "denied" else ():
        shared_server.script(key, Step(status=403, forever=True))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and no listen: nobody else gets this port, and every connection is refused
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}" if fault == "down" else shared_server.url
        options = S3Options(endpoint_url=endpoint, unsigned=True)
        with loader_of(graph(url, options), workers) as loader:
            with pytest.raises(kind, match=words) as caught:
                list(loader)
            assert caught.value.bucket in url
            assert any("S3File" in note for note in caught.value.__notes__)


def test_the_in_process_mock_under_a_loader_in_process() -> None:
    with mock_aws():
        mine = boto3.client("s3", region_name="us-east-1")
        mine.create_bucket(Bucket="mocked")
        for name, body in SHARDS.items():
            mine.put_object(Bucket="mocked", Key=name, Body=body)
        names = S3FileLister("s3://mocked/", region="us-east-1").sharding_filter()
        pipe = names.load_files_by_s3(region="us-east-1").load_from_tar().webdataset().map(read_sample)
        with DataLoader2(pipe, reading_service=InProcessReadingService()) as loader:
            for _ in range(2):
                assert list(loader) == below("s3://mocked/", SAMPLES)
