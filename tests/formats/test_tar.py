"""Tar archives: equal to what `tarfile` reads, whole or with the right error at every cut."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from one_way import OneWay, Skipping
from tars import END, HARD_STEM, hard_archive, header, make_tar

from pipes.errors import DataError, TruncatedError
from pipes.formats.chunks import CHUNK
from pipes.formats.tar import TarMember, TarReader

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


class Seekable(io.BytesIO):
    given = 0

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(size)
        self.given += len(chunk)
        return chunk


def read(data: bytes, **options: Any) -> list[tuple[str, bytes]]:
    return [(member.name, member.data) for member in TarReader(io.BytesIO(data), "a.tar", **options)]


def drain(reader: TarReader, into: list[tuple[str, bytes]]) -> None:
    for member in reader:
        into.append((member.name, member.data))


names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=40
)
paths = st.lists(names, min_size=1, max_size=6).map("/".join)
contents = st.binary(max_size=2000) | st.sampled_from([0, 1, 511, 512, 513, 1023, 1024]).map(lambda size: b"x" * size)


@given(
    members=st.lists(st.tuples(paths, contents), max_size=6),
    form=st.sampled_from(sorted(FORMATS)),
    step=st.sampled_from([1, 7, 511, 512, 513, 4096, 1 << 20]),
)
@settings(max_examples=150, deadline=None)
@example(members=[("ü" * 60 + ".txt", b"pax")], form="pax", step=1)
@example(members=[("d/" + "q" * 140 + "/" + "n" * 100, b"long")], form="gnu", step=1)
@example(members=[("p" * 99 + "/" + "n" * 100, b"prefix")], form="ustar", step=1)
def test_random_archives_equal_what_tarfile_reads(members: list[tuple[str, bytes]], form: str, step: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[form]) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            try:
                archive.addfile(info, io.BytesIO(data))
            except (ValueError, UnicodeError):  # ustar has no room for the name
                continue
    expected = []
    with tarfile.open(fileobj=io.BytesIO(buffer.getvalue())) as archive:
        for found in archive:
            stream = archive.extractfile(found)
            if stream is not None:
                expected.append((found.name, stream.read()))
    reader = TarReader(OneWay(buffer.getvalue(), step), "a.tar")
    assert [(member.name, member.data) for member in reader] == expected


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_cut_at_every_byte_gives_the_complete_members_and_then_the_error(form: str) -> None:
    name = "long/" * 25 + "ü.txt" if form != "ustar" else "b/2.txt"
    members = [("a/1.bin", b"a" * 700), (name, b"b" * 512), ("c/3.bin", b"")]
    data = make_tar(members, FORMATS[form])
    ends = [member.offset for member in TarReader(io.BytesIO(data), "a.tar")][1:]
    reader = TarReader(io.BytesIO(data), "a.tar")
    list(reader)
    marker = reader.position
    ends.append(marker)
    bounds = [next(m.offset for m in TarReader(io.BytesIO(data), "a.tar") if m.name == name_) for name_, _ in members]
    for cut in range(marker + 1024):
        for stream in (io.BytesIO(data[:cut]), OneWay(data[:cut], 1000), Skipping(data[:cut], 700)):
            got: list[tuple[str, bytes]] = []
            with pytest.raises(TruncatedError, match=r"a\.tar: ") as caught:
                drain(TarReader(stream, "a.tar"), got)
            # A member is complete with its last byte; only its padding may be missing.
            whole = [
                item
                for item, start, stop in zip(members, bounds, ends, strict=True)
                if cut >= stop - (-len(item[1]) % 512)
            ]
            assert got == whole
            assert ("empty archive" if cut == 0 else f"at byte {cut}:") in str(caught.value)
    assert read(data[: marker + 1024]) == members


@pytest.mark.parametrize(
    ("kind", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)], ids=["gz", "bz2", "xz"]
)
def test_cut_compressed_archives_end_in_an_error_at_every_byte(kind: str, pack: Callable[[bytes], bytes]) -> None:
    members = [("a.bin", bytes(range(256)) * 3), ("b.bin", b"b")]
    whole = pack(make_tar(members))
    assert read(whole) == members
    assert read(whole, mode=f"r|{kind}") == members
    for cut in range(len(whole)):
        got: list[tuple[str, bytes]] = []
        with pytest.raises(DataError, match=r"a\.tar"):
            drain(TarReader(OneWay(whole[:cut], 64), "a.tar"), got)
        assert got == members[: len(got)]


def test_zstd_archives_are_read() -> None:
    zstandard = pytest.importorskip("zstandard")
    members = [(f"{number}.bin", bytes([number]) * 5000) for number in range(20)]
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(make_tar(members))
    assert read(whole) == members
    assert read(whole, mode="r:zst") == members
    with pytest.raises(TruncatedError, match="inside its zst compression"):
        read(whole[:-1])


def test_several_gzip_members_are_one_archive() -> None:
    data = make_tar([("a.bin", b"1" * 3000), ("b.bin", b"2" * 3000)])
    pieces = b"".join(gzip.compress(data[at : at + 700]) for at in range(0, len(data), 700))
    assert read(pieces) == [("a.bin", b"1" * 3000), ("b.bin", b"2" * 3000)]
    assert read(pieces + bytes(100)) == [("a.bin", b"1" * 3000), ("b.bin", b"2" * 3000)]


@pytest.mark.parametrize("step", [1, 511, 513, 1 << 20])
def test_hard_names_in_gnu_format(step: int) -> None:
    reader = TarReader(OneWay(hard_archive(), step), "a.tar")
    found = list(reader)
    assert [(m.name, m.data, m.size) for m in found] == [
        (HARD_STEM + ".bin", b"", 0),
        (HARD_STEM + ".seg.json", b'{"k":1}', 7),
        ("v1.2/s0002.bin", b"\0\1", 2),
        ("v1.2/s0002.seg.json", b"[]", 2),
    ]
    assert reader.skipped == {"directory": 1, "symbolic link": 1}


@pytest.mark.parametrize("step", [1, 511, 513, 1 << 20])
def test_pax_names_outside_ascii(step: int) -> None:
    data = make_tar([("ü" * 60 + ".txt", b"x")], tarfile.PAX_FORMAT)
    assert [m.name for m in TarReader(OneWay(data, step), "a.tar")] == ["ü" * 60 + ".txt"]


@pytest.mark.parametrize("wrap", [io.BytesIO, lambda d: OneWay(d, 999), lambda d: Skipping(d, 999)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reading_goes_on_at_every_position(wrap: Callable[[bytes], Any], pack: Callable[[bytes], bytes]) -> None:
    members = [(f"{'n' * (40 * number)}{number}.bin", bytes([number]) * (number * 400)) for number in range(6)]
    data = pack(make_tar(members, tarfile.PAX_FORMAT, pax_headers={"comment": "of all"}))
    reader = TarReader(wrap(data), "a.tar")
    positions = [(0, {})] + [(reader.position, dict(reader.records)) for _ in reader]
    for number, (position, records) in enumerate(positions):
        later = TarReader(wrap(data), "a.tar", offset=position, records=records)
        assert [m.name for m in later] == [name for name, _ in members[number:]]
    with pytest.raises(DataError, match="damaged at byte 512"):
        list(TarReader(wrap(pack(make_tar([("a", b"\1" * 600)]))), "a.tar", offset=512))


def test_an_archive_may_begin_where_the_stream_stands() -> None:
    stream = io.BytesIO(b"before" + make_tar([("a", b"1"), ("b", b"2")]))
    stream.seek(6)
    assert [m.name for m in TarReader(stream, "a.tar")] == ["a", "b"]
    stream.seek(6)
    assert [m.name for m in TarReader(stream, "a.tar", offset=1024)] == ["b"]


@pytest.mark.parametrize("make_stream", [Seekable, lambda d: Skipping(d, 1 << 20)])
def test_unwanted_members_are_not_read(make_stream: Callable[[bytes], Any]) -> None:
    large = 4 * CHUNK
    data = make_tar([("a.mp4", bytes(large)), ("a.txt", b"1"), ("b.mp4", bytes(large)), ("b.txt", b"2")])
    stream = make_stream(data)
    reader = TarReader(stream, "a.tar", select=lambda name: name.endswith(".txt"))
    assert [m.name for m in reader] == ["a.txt", "b.txt"]
    assert reader.skipped == {"not selected": 2}
    assert stream.given <= 3 * CHUNK
    stream = make_stream(data)
    last = [m.offset for m in TarReader(io.BytesIO(data), "a.tar")][-1]
    assert [m.name for m in TarReader(stream, "a.tar", offset=last)] == ["b.txt"]
    assert stream.given <= CHUNK + 512


def test_a_member_that_is_passed_over_may_be_cut_too() -> None:
    data = make_tar([("a.txt", b"1"), ("b.mp4", bytes(100_000))])
    for stream in (io.BytesIO(data[:50_000]), OneWay(data[:50_000], 512), Skipping(data[:50_000], 512)):
        with pytest.raises(TruncatedError, match="at byte 50000"):
            list(TarReader(stream, "a.tar", select=lambda name: name == "a.txt"))


def test_a_stream_mode_never_seeks() -> None:
    class NoSeek(io.BytesIO):
        def seek(self, *args: Any) -> int:
            raise AssertionError("seek in stream mode")

    data = make_tar([("a.txt", b"1"), ("b.txt", b"2" * 2000)])
    assert [m.name for m in TarReader(NoSeek(data), "a.tar", mode="r|*", offset=1024)] == ["b.txt"]


def test_what_follows_the_end_mark_is_ignored() -> None:
    data = make_tar([("a", b"1")]).rstrip(b"\0") + bytes(511) + END
    assert read(data + b"anything" * 100) == [("a", b"1")]
    assert read(END) == []


def test_concatenated_archives_by_choice() -> None:
    data = make_tar([("a", b"1")]) + make_tar([("b", b"2")])
    assert read(data) == [("a", b"1")]
    reader = TarReader(io.BytesIO(data), "a.tar", concatenated=True)
    positions = [reader.position for _ in reader]
    assert read(data, concatenated=True) == [("a", b"1"), ("b", b"2")]
    assert read(data, concatenated=True, offset=positions[0]) == [("b", b"2")]
    with pytest.raises(TruncatedError, match="inside the two zero blocks"):
        read(data[:1024] + bytes(512), concatenated=True)


def test_one_zero_block_is_no_end() -> None:
    first, second = header(b"a", b"0", b"1"), header(b"b", b"0", b"2")
    with pytest.raises(DataError, match="damaged at byte 1536: found not the second of the two zero blocks"):
        read(first + bytes(512) + second + END)
    with pytest.raises(TruncatedError, match="at byte 1536: inside the two zero blocks"):
        read(first + bytes(512))


def test_bytes_that_are_no_archive() -> None:
    with pytest.raises(DataError, match=r"a\.tar: not a tar archive") as caught:
        read(b"hello, world\n" * 100)
    assert not isinstance(caught.value, TruncatedError)
    with pytest.raises(DataError, match="bad gz data"):
        read(make_tar([("a", b"1")]), mode="r:gz")


def test_a_damaged_header_is_an_error_after_the_members_before_it() -> None:
    data = bytearray(make_tar([("a", b"1"), ("b", b"2")]))
    data[1024 + 3] ^= 1
    got: list[tuple[str, bytes]] = []
    with pytest.raises(DataError, match="damaged at byte 1024"):
        drain(TarReader(io.BytesIO(bytes(data)), "a.tar"), got)
    assert got == [("a", b"1")]


def test_a_size_that_is_a_lie_does_not_fill_the_memory() -> None:
    huge = header(b"a", b"0", size=b"\x80" + (1 << 60).to_bytes(11, "big"))
    with pytest.raises(TruncatedError, match="bytes are missing"):
        read(huge + bytes(2000))
    with pytest.raises(DataError, match="extended header of"):
        read(header(b"././@LongLink", b"L", size=b"77777777777\0") + END)
    with pytest.raises(DataError, match="no size can be read"):
        read(header(b"a", b"0", size=b"\xff" * 12) + END)
    with pytest.raises(DataError, match="no size can be read"):
        read(header(b"a", b"0", size=b"0000000009x\0") + END)


def test_sparse_and_multi_volume_members_are_refused() -> None:
    with pytest.raises(DataError, match=r"'s\.bin' at byte 0 is stored as a sparse file"):
        read(header(b"s.bin", b"S", b"x") + END)
    record = b"22 GNU.sparse.major=1\n"
    with pytest.raises(DataError, match="sparse"):
        read(header(b"x", b"x", record) + header(b"s.bin", b"0", b"x") + END)
    with pytest.raises(DataError, match="another volume"):
        read(header(b"s.bin", b"M", b"x") + END)


def test_sizes_in_base_256_and_in_pax_records() -> None:
    assert read(header(b"a", b"0", b"abc", size=b"\x80" + (3).to_bytes(11, "big")) + END) == [("a", b"abc")]
    lie = header(b"a", b"0", b"abc", size=b"00000000000\0")
    assert read(header(b"x", b"x", b"9 size=3\n", magic=b"ustar\x0000") + lie + END) == [("a", b"abc")]
    with pytest.raises(DataError, match="no size can be read"):
        read(header(b"x", b"x", b"9 size=x\n") + lie + END)
    with pytest.raises(DataError, match="no size can be read"):
        read(header(b"x", b"x", b"9 size=\xff\n") + lie + END)
    with pytest.raises(DataError, match="malformed"):
        read(header(b"x", b"x", b"99 size=3\n") + lie + END)


def test_global_records_reach_all_that_follows() -> None:
    data = header(b"g", b"g", b"11 path=zz\n") + header(b"a", b"0", b"1") + header(b"b", b"0", b"2") + END
    assert read(data) == [("zz", b"1"), ("zz", b"2")]
    reader = TarReader(io.BytesIO(data), "a.tar")
    next(iter(reader))
    assert reader.records == {"path": "zz"}
    assert read(data, offset=reader.position, records=reader.records) == [("zz", b"2")]
    again = header(b"g", b"g", b"8 path=\n")
    assert read(data[:1024] + again + data[1024:]) == [("a", b"1"), ("b", b"2")]


def test_v7_headers() -> None:
    old = header(b"a", b"\0", b"1", magic=b"", size=b"         1 \0")
    assert read(old + END) == [("a", b"1")]
    reader = TarReader(io.BytesIO(header(b"d/", b"\0", magic=b"") + old + END), "a.tar")
    assert [m.name for m in reader] == ["a"]
    assert reader.skipped == {"directory": 1}


def test_checksums_summed_as_signed_bytes() -> None:
    block = bytearray(header("ü".encode(), b"0", b"1"))
    block[148:156] = b" " * 8
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:512])
    block[148:156] = b"%06o\0 " % signed
    assert read(bytes(block) + END) == [("ü", b"1")]


def test_kinds_that_are_not_files_are_counted() -> None:
    links = (
        header(b"h", b"1", size=b"00000001000\0")
        + header(b"s", b"2")
        + header(b"p", b"6")
        + header(b"z", b"Z", b"data")
    )
    reader = TarReader(io.BytesIO(links + header(b"f", b"7", b"1") + END), "a.tar")
    assert [m.name for m in reader] == ["f"]
    assert reader.skipped == {"hard link": 1, "symbolic link": 1, "fifo": 1, "other": 1}


def test_streams_with_only_readinto_and_wrong_streams() -> None:
    class Into:
        def __init__(self, data: bytes) -> None:
            self.inner = io.BytesIO(data)

        def readinto(self, buffer: bytearray) -> int:
            return self.inner.readinto(buffer)

    data = make_tar([("a", b"1")])
    assert [m.data for m in TarReader(Into(data), "a.tar")] == [b"1"]
    with pytest.raises(TypeError, match="neither read"):
        TarReader(object(), "a.tar")
    with pytest.raises(TypeError, match="binary mode"):
        list(TarReader(io.StringIO("text"), "a.tar"))
    with pytest.raises(ValueError, match="mode 'w:' is not one of"):
        TarReader(io.BytesIO(data), "a.tar", mode="w:")


def test_large_members_through_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipes.formats.tar._PIECE", 1 << 19)
    members = [("a", b"a" * (CHUNK * 5 + 1)), ("b", b"b" * (CHUNK - 512)), ("c", b"c" * CHUNK), ("d", b"")]
    data = make_tar(members)
    assert read(data) == members
    for step in (512, 1000, CHUNK + 7):
        assert [(m.name, m.data) for m in TarReader(OneWay(data, step), "a.tar")] == members


def test_a_member_is_a_tuple_with_its_offset() -> None:
    data = make_tar([("a", b"12"), ("n" * 120, b"3")])
    assert list(TarReader(io.BytesIO(data), "a.tar")) == [
        TarMember("a", b"12", 2, 0),
        TarMember("n" * 120, b"3", 1, 1024),
    ]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_member_larger_than_allowed(pack: Callable[[bytes], bytes]) -> None:
    data = pack(make_tar([("a", b"1" * 100), ("bomb", bytes(1 << 20)), ("c", b"3")]))
    got: list[tuple[str, bytes]] = []
    with pytest.raises(DataError, match="'bomb' at byte 1024 has 1048576 bytes, more than max_member_bytes=100"):
        drain(TarReader(OneWay(data), "a.tar", max_member_bytes=100), got)
    assert got == [("a", b"1" * 100)]
    assert len(read(data, max_member_bytes=1 << 20)) == 3
    assert [name for name, _ in read(data, max_member_bytes=100, select=lambda name: name != "bomb")] == ["a", "c"]


def test_memory_does_not_grow_with_the_number_of_members() -> None:
    block = make_tar([(f"{number:03d}.txt", b"0123456789") for number in range(100)])[: 100 * 1024]

    class Endless:
        left = 300

        def read(self, size: int) -> bytes:
            if self.left == 0:
                return b""
            self.left -= 1
            return block if self.left else END

    tracemalloc.start()
    try:
        reader = iter(TarReader(Endless(), "a.tar"))
        for _ in range(1000):
            next(reader)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        count = sum(1 for _ in reader)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 299 * 100 - 1000
    assert after - before < 1 << 18
    assert peak - before < 1 << 21
