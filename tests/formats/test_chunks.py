"""Chunks of bytes and their decompression."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_way import OneWay, Skipping

from pipes.errors import DataError, StateError, TruncatedError
from pipes.formats.chunks import CHUNK, chunks_from, decompress, drop, expand, go_to, read_chunks, sniff, whole_lines


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
}


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@given(
    st.lists(st.binary(max_size=3000), min_size=1, max_size=4), st.sampled_from(sorted(PACKERS)), st.integers(1, 700)
)
@settings(deadline=None)
def test_every_compression_in_any_chunks_and_members(members: list[bytes], kind: str, size: int) -> None:
    packed = b"".join(PACKERS[kind](member) for member in members)
    assert b"".join(expand(pieces(packed, size), "a", kind)) == b"".join(members)
    assert b"".join(decompress(pieces(packed, size), "a")) == b"".join(members)


@pytest.mark.parametrize("kind", sorted(PACKERS))
def test_output_is_bounded_and_complete(kind: str) -> None:
    packed = PACKERS[kind](bytes(40_000_000))
    sizes = [len(piece) for piece in expand([packed], "a", kind)]
    assert sum(sizes) == 40_000_000
    assert max(sizes) <= (64 << 20 if kind == "zst" else 1 << 20)


@pytest.mark.parametrize("kind", sorted(PACKERS))
def test_cut_data_end_in_an_error_at_every_byte(kind: str) -> None:
    packed = PACKERS[kind](b"some text " * 50)
    for cut in range(len(packed)):
        with pytest.raises(TruncatedError, match=rf"a\.bin: (empty|cut at byte {cut})"):
            list(expand([packed[:cut]] if cut else [], "a.bin", kind))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_data_cut_in_a_later_member_end_in_an_error(pack: Callable[[bytes], bytes]) -> None:
    first, second = pack(b"one"), pack(b"two")
    kind = sniff(first)
    for cut in range(len(first) + 1, len(first + second)):
        with pytest.raises(TruncatedError, match=f"a: cut at byte {cut}, inside its {kind}"):
            list(expand([(first + second)[:cut]], "a", kind))


@pytest.mark.parametrize("kind", sorted(PACKERS))
def test_damaged_data_are_errors_that_name_the_file(kind: str) -> None:
    packed = bytearray(PACKERS[kind](bytes(range(256)) * 20))
    packed[:3] = b"???"
    with pytest.raises(DataError, match=rf"a\.bin: bad {kind} data"):
        list(expand([bytes(packed)], "a.bin", kind))


def test_padding_after_a_member_is_no_data_but_other_bytes_are_an_error() -> None:
    packed = gzip.compress(b"abc")
    assert b"".join(expand([packed + bytes(9), bytes(9)], "a", "gz")) == b"abc"
    assert b"".join(expand([packed + bytes(9), packed], "a", "gz")) == b"abcabc"
    with pytest.raises(DataError, match="bad gz data"):
        list(expand([packed, b"garbage"], "a", "gz"))


def test_sniffing_is_strict_and_needs_ten_bytes() -> None:
    for kind, pack in PACKERS.items():
        assert sniff(pack(b"x")[:10]) == kind
    assert sniff(bz2.compress(b"")[:10]) == "bz2"
    assert [sniff(data) for data in (b"", b"BZh9 is a text", b"\x1f\x8b")] == ["", "", ""]
    assert b"".join(decompress([b"pl", b"", b"ain"], "a")) == b"plain"
    assert list(decompress([], "a")) == []
    assert b"".join(decompress([gzip.compress(b"x")], "a", "")) == gzip.compress(b"x")


def test_zstd_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info >= (3, 14):
        pytest.skip("this Python reads zstd by itself")
    packed = zstd(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install zstandard"):
        list(decompress([packed], "a.zst"))
    with pytest.raises(ValueError, match="unknown compression 'lz4'"):
        list(expand([packed], "a", "lz4"))


def test_reading_chunks() -> None:
    assert list(read_chunks(io.BytesIO(b"abcde"), "a", 2)) == [b"ab", b"cd", b"e"]

    class Nothing:
        def read(self, size: int) -> None:
            return None

    with pytest.raises(BlockingIOError, match="non-blocking"):
        list(read_chunks(Nothing(), "a"))

    class Arrays:
        def __init__(self) -> None:
            self.left = [bytearray(b"ab"), memoryview(b"cd"), b""]

        def read(self, size: int) -> object:
            return self.left.pop(0)

    assert list(read_chunks(Arrays(), "a")) == [b"ab", b"cd"]


DATA = bytes(range(256)) * 2000


@pytest.mark.parametrize("offset", [0, 1, 9, 10, 11, 5000, CHUNK + 1, len(DATA) - 1, len(DATA)])
@pytest.mark.parametrize("wrap", [io.BytesIO, OneWay, Skipping])
def test_content_from_an_offset(wrap: Callable[[bytes], object], offset: int) -> None:
    assert b"".join(chunks_from(wrap(DATA), "a", offset)) == DATA[offset:]
    packed = gzip.compress(DATA)
    assert b"".join(chunks_from(wrap(packed), "a", offset)) == DATA[offset:]
    stream = wrap(DATA)
    go_to(stream, "a", offset)
    assert b"".join(read_chunks(stream, "a")) == DATA[offset:]
    assert b"".join(drop(pieces(DATA, 999), offset)) == DATA[offset:]


def test_a_stream_of_its_own_skips() -> None:
    stream = Skipping(DATA)
    assert b"".join(chunks_from(stream, "a", 5000)) == DATA[5000:]
    assert stream.skipped == 4990


def test_content_begins_where_the_stream_stands() -> None:
    stream = io.BytesIO(b"before" + DATA)
    stream.seek(6)
    assert b"".join(chunks_from(stream, "a", 100)) == DATA[100:]


@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\r", b"\n", b"\r\n", b"a\r"])))
def test_whole_lines(chunks: list[bytes]) -> None:
    for lone_cr in (False, True):
        blocks = list(whole_lines(chunks, lone_cr=lone_cr))
        assert b"".join(blocks) == b"".join(chunks)
        for block, after in pairwise(blocks):
            assert block.endswith(b"\n") or (lone_cr and block.endswith(b"\r") and not after.startswith(b"\n"))


@pytest.mark.parametrize("way", ["seek", "skip", "skip without an answer", "read", "compressed"])
def test_an_offset_beyond_the_end_is_no_silent_end(way: str) -> None:
    data = bytes(range(200))

    class Skips(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def skip(self, size: int) -> int | None:
            passed = len(self.read(size))
            return None if way == "skip without an answer" else passed

    class Reads(io.BytesIO):
        def seekable(self) -> bool:
            return False

    made = {"seek": io.BytesIO, "read": Reads, "compressed": lambda data: io.BytesIO(gzip.compress(data))}
    make: Any = made.get(way, Skips)
    for offset in (0, 5, 100, 199, 200):
        assert b"".join(chunks_from(make(data), "a.bin", offset)) == data[offset:]
    if way == "skip without an answer":  # then the stream itself says so, or nobody knows
        return
    for offset in (201, 2**61):
        with pytest.raises(StateError, match=f"a.bin: the state stands at byte {offset}, and there are only 200"):
            list(chunks_from(make(data), "a.bin", offset))


class _Short(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, 100))


def test_files_that_seek_may_give_less_than_asked() -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pipes.formats.npy import read_npz
    from pipes.formats.parquet import ParquetReader
    from pipes.formats.zip import ZipReader

    file = io.BytesIO()
    np.savez(file, **{"n" * 300: np.arange(500)})
    (array,) = read_npz(_Short(file.getvalue()), "a.npz").values()
    assert array.tolist() == list(range(500))
    assert [len(member.data) for member in ZipReader(_Short(file.getvalue()), "a.zip")] == [128 + 4000]
    file = io.BytesIO()
    pq.write_table(pa.table({"a": range(1000)}), file)
    assert sum(batch.num_rows for batch in ParquetReader(_Short(file.getvalue()), "a.parquet")) == 1000
