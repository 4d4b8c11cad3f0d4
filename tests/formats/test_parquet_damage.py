"""Parquet whose footer is damaged: rows or DataError, never the end of the process, local or read by ranges."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipes.errors import DataError
from pipes.iter import IterableWrapper

# In a process of its own: asked for the place of such a column, pyarrow aborts.
NONSENSE = """
import io, sys
import pyarrow as pa, pyarrow.parquet as pq
from pipes.errors import DataError
from pipes.formats.parquet import ParquetReader

tables = {
    "nested": (pa.table({"a": pa.array([[1], [2, 3]], pa.list_(pa.int8()))}), 2),
    "flat": (pa.table({"a": range(9), "b": [f"t{n}" for n in range(9)]}), 5),
}

def rows_of(stream, size):
    batches = list(ParquetReader(stream, "a.parquet", batch_size=size))
    return sum(batch.num_rows for batch in batches), [str(batch.columns) for batch in batches]

table, size = tables[sys.argv[1]]
stream = io.BytesIO()
pq.write_table(table, stream, row_group_size=size, compression="none", store_schema=False)
data = stream.getvalue()
whole = rows_of(io.BytesIO(data), 2)
read = refused = 0
for at in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 4):
    for byte in {data[at] ^ 1, 0, 0x15, 0xFF} - {data[at]}:
        damaged = data[:at] + bytes([byte]) + data[at + 1 :]
        outcomes = []
        for stream in (io.BytesIO(damaged), io.BufferedReader(io.BytesIO(damaged))):
            for rows in (2, None):
                try:
                    outcomes.append(rows_of(stream, rows)[0])
                except DataError as error:
                    assert "a.parquet: " in str(error)
                    outcomes.append(0)
        assert outcomes in ([whole[0]] * 4, [0] * 4), (at, byte, outcomes)
        read += outcomes[0] > 0
        refused += not outcomes[0]
assert min(read, refused) > 100, (read, refused)
"""


@pytest.mark.parametrize("kind", ["nested", "flat"])
def test_any_byte_of_a_footer_may_be_wrong(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NONSENSE, kind], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")


def varint(number: int) -> bytes:
    """As Thrift's compact protocol writes an i64."""
    number, out = number << 1, b""
    while number > 127:
        number, out = number >> 7, out + bytes([number & 127 | 128])
    return out + bytes([number])


def told(rows: int, count: int, row_group_size: int = 1 << 20) -> bytes:
    """A file of 12345 rows of one column, whose footer says `rows` in its first `count` counts of them."""
    file = io.BytesIO()
    pq.write_table(pa.table({"a": range(12345)}), file, row_group_size=row_group_size, write_statistics=False)
    data = file.getvalue()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:-8].replace(varint(12345), varint(rows), count)
    return data[:start] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def test_a_footer_that_has_lost_rows_is_an_error() -> None:
    for data, rows in ((told(12346, 1), 12346), (told(12000, 1, 5000), 12000)):
        with pytest.raises(
            DataError, match=rf"f: damaged footer: the file has {rows} rows, and its . row groups 12345"
        ):
            list(IterableWrapper([("f", io.BytesIO(data))]).load_parquet())


LIMITED = """
import io, resource, sys
from pipes.errors import DataError
from pipes.formats.parquet import ParquetReader

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
data = sys.stdin.buffer.read()
for size in (None, 1 << 50):
    try:
        list(ParquetReader(io.BytesIO(data), "f", batch_size=size))
    except DataError as error:
        print(error)
"""


def test_no_room_is_made_for_rows_that_only_the_footer_has() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], input=told(1 << 42, -1), capture_output=True, check=False, timeout=100
    )
    said = f"f: row group 0 has 12345 rows, and the footer says {1 << 42}\n"
    assert (done.stdout.decode(), done.stderr.decode()) == (said * 2, "")


@pytest.mark.parametrize("form", ["rows", "columns", "batches", "tables"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_code_that_is_in_no_dictionary_is_an_error(form: Any, nested: bool) -> None:
    texts = pa.array(list("abc") * 64).dictionary_encode()
    column = pa.StructArray.from_arrays([texts], ["field"]) if nested else texts
    file = io.BytesIO()
    pq.write_table(pa.table({"n": range(192), "text": column}), file, compression="none", write_statistics=False)
    # The codes 0, 1, 2, 0, 1, 2, ... of two bits each, and four times 3 in place of the first four.
    data = file.getvalue().replace(b"\x24\x49\x92", b"\xff\x49\x92", 1)
    assert len(list(IterableWrapper([("f", file)]).load_parquet())) == 192
    with pytest.raises(DataError, match=r"f: row group 0 of 1 is damaged: .* out of bounds: 3"):
        list(IterableWrapper([("f", io.BytesIO(data))]).load_parquet(form))
