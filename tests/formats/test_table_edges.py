"""Cases D2 and D5 through the stages: hard texts in reads of 1 to 16 bytes, local and from S3, and empty files."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fault_server import FaultServer

from pipes.errors import DataError, TruncatedError
from pipes.iter import IterableWrapper
from pipes.sources.s3_options import S3Options

CSV = b'\xef\xbb\xbfid,text\r\n1,"line one\r\nline ""two"""\r\n2,"a,b"\r\n3,\r\n'
ROWS = [["id", "text"], ["1", 'line one\r\nline "two"'], ["2", "a,b"], ["3", ""]]
LONG = {"long": "x" * 5_000_000}
LINES = '{"a":"\u2028x"}\n\n{"a":"é€😀"}\r\n'.encode()
VALUES: list[Any] = [{"a": "\u2028x"}, {"a": "é€😀"}]


class Trickle(io.RawIOBase):
    """A stream that gives at most `most` bytes a read and cannot seek."""

    def __init__(self, data: bytes, most: int) -> None:
        self.inner, self.most = io.BytesIO(data), most

    def read(self, size: int = -1, /) -> bytes:
        return self.inner.read(min(size, self.most) if size >= 0 else self.most)


def streams(data: bytes, most: int) -> Any:
    return IterableWrapper([("z", Trickle(data, most))], deepcopy=False)


@pytest.mark.parametrize("most", range(1, 17))
def test_hard_texts_in_reads_of_any_size(most: int) -> None:
    for end in (CSV, CSV[:-2]):
        assert list(streams(end, most).parse_csv()) == ROWS
        half = len(end) // 2
        assert list(streams(gzip.compress(end[:half]) + gzip.compress(end[half:]), most).parse_csv()) == ROWS
    assert next(iter(streams(CSV, most).parse_csv_as_dict())) == dict(zip(*ROWS[:2], strict=True))
    assert list(streams(LINES + b'{"last":1}', most).parse_jsonl()) == [*VALUES, {"last": 1}]
    with pytest.raises(DataError, match=r"z.*line 4.*byte 33"):
        list(streams(LINES + b'{"a":\n[]\n', most).parse_jsonl())


@pytest.mark.parametrize("most", [16, 1 << 20])
def test_a_value_of_five_megabytes(most: int) -> None:
    data = LINES + json.dumps(LONG).encode() + b'\n{"last":1}'
    assert list(streams(data, most).parse_jsonl()) == [*VALUES, LONG, {"last": 1}]
    with pytest.raises(DataError, match=r"z: line 1 .*csv.field_size_limit\(n\) raises the limit"):
        list(streams(b'a,"' + b"y" * 200_000 + b'"\n', most).parse_csv())


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer({"z.csv": b"", "z.jsonl": b"", "z.parquet": b"", "z.npy": b"", "hard.csv": CSV}) as server:
        yield server


@pytest.mark.parametrize("client", ["boto3", "obstore"])
def test_empty_objects(server: FaultServer, client: str) -> None:
    options = S3Options(endpoint_url=server.url, unsigned=True, client=client)

    def load(key: str) -> Any:
        return IterableWrapper([f"s3://bkt/{key}"]).load_files_by_s3(options=options)

    assert list(load("hard.csv").parse_csv()) == ROWS
    assert list(load("z.csv").parse_csv()) == list(load("z.csv").parse_csv_as_dict()) == []
    assert list(load("z.jsonl").parse_jsonl()) == []
    for pipe in (
        load("z.parquet").load_parquet(),
        IterableWrapper(["s3://bkt/z.parquet"]).load_parquet(options=options),
    ):
        with pytest.raises(TruncatedError, match=r"s3://bkt/z.parquet: empty file, expected Parquet"):
            list(pipe)
    with pytest.raises(TruncatedError, match=r"s3://bkt/z.npy: empty file, expected .npy"):
        list(load("z.npy").load_npy())
    assert list(load("z.parquet").load_parquet(on_error="skip", max_errors=None)) == []
    ranges = [request for request in server.requests if "Range" in request.headers]
    assert not [request for request in ranges if request.key.startswith("z.")]
