"""The two S3 pipes: names and markers (case D1), resume that opens only what is wanted, data that changed."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import boto3
import pytest
from fault_server import LIST, FaultServer, Step
from moto import mock_aws
from s3_objects import HARD_KEYS, body_of, put_objects
from stage_contract import check_stage, start
from tars import make_tar

from pipes.errors import ChangedDataError, StateError, StoreNotFoundError, StorePermissionError
from pipes.iter import IterableWrapper
from pipes.sources.s3 import S3FileLister, S3FileLoader
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_names import S3Url
from pipes.sources.s3_options import S3Options
from pipes.utils import StreamWrapper

UNSIGNED = S3Options(unsigned=True, attempts=2, backoff=0.01)


def read(pair: tuple[str, StreamWrapper]) -> tuple[str, bytes]:
    return pair[0], pair[1].read()


@pytest.fixture(scope="module")
def moto(moto_server: str) -> Iterator[str]:
    put_objects(moto_server, "pipes", {key: body_of(key) for key in HARD_KEYS})
    kept = S3Store(S3Options(endpoint_url=moto_server))  # equal stores share its clients: making one takes long
    assert len(list(kept.list("s3://pipes/"))) == len(HARD_KEYS)
    yield moto_server
    del kept


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        kept = S3Store(replace(UNSIGNED, endpoint_url=server.url))
        assert list(kept.list("s3://bkt/")) == []
        yield server


@pytest.fixture
def server(shared_server: FaultServer) -> FaultServer:
    shared_server.reset({f"k{i:02d}": b"%d" % i for i in range(40)})
    return shared_server


@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_raw_listing_and_marker_skipping(moto: str, page_size: int) -> None:
    for prefix, raw, skipped in (("in/", 12, 10), ("in", 14, 12), ("none/", 0, 0)):
        keys = sorted((key for key in HARD_KEYS if key.startswith(prefix)), key=str.encode)
        pipe = S3FileLister(f"s3://pipes/{prefix}", page_size=page_size, endpoint_url=moto, keep_markers=True)
        assert list(pipe) == [f"s3://pipes/{key}" for key in keys]
        assert len(keys) == raw
        pipe = S3FileLister(f"s3://pipes/{prefix}", page_size=page_size, endpoint_url=moto)
        assert list(pipe) == [f"s3://pipes/{key}" for key in keys if not key.endswith("/")]
        assert len(list(pipe)) == skipped


def test_every_listed_name_opens_to_its_body(moto: str) -> None:
    pipe = S3FileLister("s3://pipes/in", endpoint_url=moto, keep_markers=True).load_files_by_s3(endpoint_url=moto)
    found = [(url, type(stream), stream.read()) for url, stream in pipe]
    keys = sorted(HARD_KEYS, key=str.encode)
    assert found == [(f"s3://pipes/{key}", StreamWrapper, body_of(key)) for key in keys]


def test_masks_match_the_whole_name(moto: str) -> None:
    def names(masks: Any) -> list[str]:
        return [
            url.removeprefix("s3://pipes/") for url in S3FileLister("s3://pipes/in/", masks=masks, endpoint_url=moto)
        ]

    assert names("*.bin") == ["in/zero.bin"]
    assert names("*.BIN") == []
    assert names("a*") == []
    assert names(["s3://pipes/in/h*", "*zero*"]) == ["in/h#h.txt", "in/zero.bin"]


def test_several_prefixes_and_a_pipe_of_prefixes(moto: str) -> None:
    prefixes = ["s3://pipes/in/h", "s3://pipes/none/", "s3://pipes/input/", "s3://pipes/in/h"]
    expected = ["s3://pipes/in/h#h.txt", "s3://pipes/input/not-mine.txt", "s3://pipes/in/h#h.txt"]
    assert list(S3FileLister(prefixes, endpoint_url=moto)) == expected
    assert list(IterableWrapper(prefixes).list_files_by_s3(-1, -1, "", "", endpoint_url=moto)) == expected


def test_the_stage_contract(moto: str) -> None:
    check_stage(lambda: S3FileLister(["s3://pipes/in/a", "s3://pipes/in/h"], endpoint_url=moto))
    roots = ["s3://pipes/in/a", "s3://pipes/none", "s3://pipes/in/h"]
    check_stage(lambda: IterableWrapper(roots).list_files_by_s3(endpoint_url=moto))
    check_stage(
        lambda: (
            S3FileLister("s3://pipes/in/", endpoint_url=moto)
            .load_files_by_s3(endpoint_url=moto, concurrency=2, read_ahead=262144)
            .map(read)
            .map(str)
        )
    )
    check_stage(
        lambda: (
            S3FileLister("s3://pipes/in/a", endpoint_url=moto)
            .shuffle(buffer_size=2)
            .load_files_by_s3(endpoint_url=moto)
            .map(read)
        )
    )


def test_names_carry_size_and_etag_through_pickle(server: FaultServer) -> None:
    (url,) = S3FileLister("s3://bkt/k07", endpoint_url=server.url, options=UNSIGNED)
    again = pickle.loads(pickle.dumps(url))
    assert isinstance(again, S3Url)
    assert (str(again), again.size, again.etag) == ("s3://bkt/k07", 1, server.etag("k07"))


def test_a_resume_lists_once_and_opens_only_what_is_wanted(server: FaultServer) -> None:
    pipe = (
        S3FileLister("s3://bkt/k", endpoint_url=server.url, options=UNSIGNED)
        .shuffle(buffer_size=8)
        .load_files_by_s3(endpoint_url=server.url, options=UNSIGNED)
        .map(read)
    )
    whole = list(start(pipe))
    run = start(pipe)
    assert list(islice(iter(run), 30)) == whole[:30]
    state = json.loads(json.dumps(run.table()))
    run.context.close()
    server.requests.clear()
    assert list(start(pipe, state)) == whole[30:]
    assert len(server.seen(LIST)) == 1
    assert len(server.requests) == 1 + 10


@pytest.mark.parametrize("change", ["body", "more", "fewer"])
@pytest.mark.parametrize("of_pipe", [False, True])
def test_a_resume_over_changed_data_is_refused(server: FaultServer, change: str, of_pipe: bool) -> None:
    source = IterableWrapper(["s3://bkt/k"]) if of_pipe else "s3://bkt/k"
    pipe = S3FileLister(source, endpoint_url=server.url, options=UNSIGNED)
    run = start(pipe)
    assert len(list(islice(iter(run), 3))) == 3
    state = json.loads(json.dumps(run.table()))
    run.context.close()
    server.objects.update({"k39": b"X?"} if change == "body" else {"k99": b"x"} if change == "more" else {})
    if change == "fewer":
        del server.objects["k39"]
    with pytest.raises(
        ChangedDataError, match=r"lists \d+ names \(digest (\w+)\), .* saved with 40 \(digest (?!\1)\w+\)"
    ):
        list(start(pipe, state))


def test_a_damaged_position_is_a_state_error(server: FaultServer) -> None:
    pipe = S3FileLister("s3://bkt/k", endpoint_url=server.url, options=UNSIGNED)
    for position in ({"at": 41}, {"at": -1}, {"at": "x"}, {}):
        with pytest.raises(StateError, match="damaged"):
            list(start(pipe, {"0:S3FileLister": position}))


def test_an_object_replaced_after_the_listing_is_refused(server: FaultServer) -> None:
    urls = list(S3FileLister("s3://bkt/k0", endpoint_url=server.url, options=UNSIGNED))
    server.objects["k03"] = b"other"
    pipe = S3FileLoader(urls, endpoint_url=server.url, options=UNSIGNED).map(read)
    got: list[Any] = []
    with pytest.raises(ChangedDataError, match=r"s3://bkt/k03: the object was replaced") as caught:
        got.extend(iter(pipe))
    assert any("S3FileLoader" in note and "s3://bkt/k03" in note for note in caught.value.__notes__)


def test_a_plain_list_and_torchdatas_parameters(server: FaultServer) -> None:
    pipe = S3FileLoader(["s3://bkt/k01", "s3://bkt/k02"], -1, "us-east-1", 4096, False, endpoint_url=server.url)
    assert [read(pair) for pair in pipe] == [("s3://bkt/k01", b"1"), ("s3://bkt/k02", b"2")]
    assert len(pipe) == 2
    lister = S3FileLister("s3://bkt/", 40, 500, "eu-west-1", "*", endpoint_url=server.url)
    assert len(lister) == 40
    assert (lister._store.options.read_timeout, lister._store.options.region) == (0.5, "eu-west-1")
    with pytest.raises(TypeError, match=r"S3FileLister .*has no length: pass length="):
        len(S3FileLister("s3://bkt/"))


@pytest.mark.parametrize("bad", ["", "bkt/k", "http://bkt/k", "s3://", ["s3://bkt/", "s3:///k"]])
def test_a_bad_prefix_is_refused_when_the_pipe_is_built(bad: Any) -> None:
    with pytest.raises(ValueError, match="should look like 's3://bucket/key'"):
        S3FileLister(bad)


def test_bad_names_from_a_pipe_are_named(server: FaultServer) -> None:
    for pipe in (
        IterableWrapper(["bkt/k"]).list_files_by_s3(endpoint_url=server.url),
        IterableWrapper(["bkt/k"]).load_files_by_s3(endpoint_url=server.url),
    ):
        with pytest.raises(ValueError, match="'bkt/k' is not an S3 name"):
            list(pipe)
    with pytest.raises(ValueError, match="page_size=0"):
        S3FileLister("s3://bkt/", page_size=0)
    with pytest.raises(ValueError, match="buffer_size=-1"):
        S3FileLoader([], buffer_size=-1)


def test_missing_bucket_denied_and_nothing_found(server: FaultServer) -> None:
    def lister(prefix: str, **more: Any) -> S3FileLister:
        return S3FileLister(prefix, endpoint_url=server.url, options=UNSIGNED, **more)

    with pytest.raises(StoreNotFoundError, match="s3://other: the bucket does not exist") as caught:
        list(lister("s3://other/x"))
    assert any("S3FileLister" in note for note in caught.value.__notes__)
    server.script(LIST, Step(status=403))
    with pytest.raises(StorePermissionError, match="denied access"):
        list(lister("s3://bkt/"))
    assert list(lister("s3://bkt/none")) == []
    with pytest.raises(StoreNotFoundError, match=r"s3://bkt/none: nothing is listed .*strict=True"):
        list(lister("s3://bkt/none", strict=True))
    with pytest.raises(StoreNotFoundError, match=r"that fits \['\*.tar'\]"):
        list(lister("s3://bkt/k", strict=True, masks="*.tar"))


def test_in_process_mock() -> None:
    with mock_aws():
        mine = boto3.client("s3", region_name="us-east-1")
        mine.create_bucket(Bucket="mocked")
        for key in ("b", "a", "c/"):
            mine.put_object(Bucket="mocked", Key=key, Body=key.encode())
        pipe = S3FileLister("s3://mocked/", region="us-east-1").load_files_by_s3(region="us-east-1").map(read)
        assert list(pipe) == list(pipe) == [("s3://mocked/a", b"a"), ("s3://mocked/b", b"b")]
        own = S3FileLister("s3://mocked/", options=S3Options(client=mine))
        assert list(own) == ["s3://mocked/a", "s3://mocked/b"]
        with pytest.raises(TypeError, match="boto3 client of yours cannot travel"):
            pickle.dumps(own)


def test_secrets_are_not_in_the_chain_that_prints() -> None:
    options = S3Options(access_key="AKIA-SEEN", secret_key="hush-hush", session_token="token-token")
    text = repr(S3FileLister("s3://bkt/", options=options).load_files_by_s3(options=options))
    for secret in ("AKIA-SEEN", "hush-hush", "token-token"):
        assert secret not in text
    assert "S3FileLister" in text


def test_objects_that_fail_are_skipped_and_counted(server: FaultServer) -> None:
    whole = make_tar([("a.txt", b"x"), ("b.txt", b"y")])
    server.reset({"0.tar": whole, "1.tar": b"", "3.tar": whole[:600], "4.tar": whole})
    server.script("4.tar", *[Step(status=403)] * 8)
    names = [f"s3://bkt/{number}.tar" for number in range(6)]

    def graph() -> Any:
        options = replace(UNSIGNED, endpoint_url=server.url)
        opened = S3FileLoader(names, options=options, on_error="skip", max_errors=9)
        return opened.load_from_tar(on_error="skip", max_errors=9).map(read)

    run = start(graph())
    # what stands before a cut is given
    good = ["s3://bkt/0.tar/a.txt", "s3://bkt/0.tar/b.txt", "s3://bkt/3.tar/a.txt"]
    assert [name for name, _ in run] == good
    counts = run.context.tallies.counts().values()
    assert sum(each.skipped for each in counts) == 5, counts
    assert "s3://bkt/" in next(each.first for each in counts if each.first)
