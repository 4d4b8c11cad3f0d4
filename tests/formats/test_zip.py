"""Zip archives: equal to what `zipfile` reads, by their directory and as streams, and never a wrong byte."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_way import OneWay, Skipping

from pipes.errors import DataError, StoreConnectionError, TruncatedError
from pipes.formats.zip import ZipMember, ZipReader

METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


class Ranging(OneWay):
    """Goes forward only, but gives the whole as a file that seeks, as S3 streams do."""

    def ranged(self) -> io.BytesIO:
        return io.BytesIO(self.inner.getvalue())


STREAMS: dict[str, Callable[[bytes], Any]] = {
    "seeks": io.BytesIO,
    "ranges": lambda data: Ranging(data, 700),
    "one way": lambda data: OneWay(data, 700),
    "skips": lambda data: Skipping(data, 700),
}
by_directory = pytest.mark.parametrize("make_stream", [STREAMS["seeks"], STREAMS["ranges"]])
every_way = pytest.mark.parametrize("make_stream", list(STREAMS.values()), ids=list(STREAMS))


def make_zip(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression=method) as archive:
        for name, data in members:
            archive.writestr(name, data)
        archive.comment = comment
    return buffer.getvalue()


def drain(stream: Any, into: list[ZipMember], **options: Any) -> ZipReader:
    reader = ZipReader(stream, "a.zip", **options)
    for member in reader:
        into.append(member)
    return reader


def read(stream: Any, **options: Any) -> list[tuple[str, bytes]]:
    members: list[ZipMember] = []
    drain(stream, members, **options)
    return [(member.name, member.data) for member in members]


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/\\"), min_size=1, max_size=20)


@given(
    members=st.lists(
        st.tuples(st.lists(names, min_size=1, max_size=3).map("/".join), st.binary(max_size=3000)),
        max_size=5,
        unique_by=lambda member: member[0],
    ),
    method=st.sampled_from(METHODS),
    comment=st.binary(max_size=40).filter(lambda text: b"PK" not in text),  # which zipfile takes for the end
    step=st.sampled_from([1, 29, 31, 4096]),
)
@settings(max_examples=60, deadline=None)
def test_random_archives_equal_what_zipfile_reads(
    members: list[tuple[str, bytes]], method: int, comment: bytes, step: int
) -> None:
    data = make_zip(members, method, comment)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert expected == members
    assert read(io.BytesIO(data)) == read(OneWay(data, step)) == read(Ranging(data, step)) == expected


MEMBERS = [("a/1.txt", b"a" * 700), ("ü.txt", bytes(range(256))), ("empty", b""), ("z.bin", b"z")]


@every_way
@pytest.mark.parametrize("method", METHODS)
def test_reading_goes_on_at_every_position(make_stream: Callable[[bytes], Any], method: int) -> None:
    data = make_zip(MEMBERS, method)
    reader = ZipReader(make_stream(data), "a.zip")
    positions = [0] + [reader.position for _ in reader]
    for number, position in enumerate(positions):
        assert read(make_stream(data), offset=position) == MEMBERS[number:]


@pytest.mark.parametrize("make_stream", [STREAMS["one way"], STREAMS["skips"]])
@pytest.mark.parametrize("method", METHODS)
def test_cut_at_every_byte_as_a_stream(make_stream: Callable[[bytes], Any], method: int) -> None:
    data = make_zip(MEMBERS, method, b"about it")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        starts = [*(info.header_offset for info in archive.infolist()[1:]), archive.start_dir]
    for cut in range(len(data)):
        got: list[ZipMember] = []
        with pytest.raises(TruncatedError, match=r"a\.zip: ") as caught:
            drain(make_stream(data[:cut]), got)
        assert [(member.name, member.data) for member in got] == MEMBERS[: sum(cut >= stop for stop in starts)]
        assert ("empty archive" if cut == 0 else f"at byte {cut}:") in str(caught.value)


@by_directory
def test_cut_at_every_byte_without_its_directory(make_stream: Callable[[bytes], Any]) -> None:
    data = make_zip(MEMBERS, comment=b"about it")
    for cut in range(len(data)):
        with pytest.raises(DataError, match=r"a\.zip: ") as caught:
            read(make_stream(data[:cut]))
        if cut == 0 or cut >= 4:
            assert isinstance(caught.value, TruncatedError)


@every_way
def test_a_changed_byte_of_a_member_is_noticed(make_stream: Callable[[bytes], Any]) -> None:
    for method in METHODS:
        data = make_zip([("a.bin", bytes(range(100)))], method)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            end = archive.start_dir
        for place in range(35, end):
            changed = data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]
            with suppress(DataError):  # but for bits that say nothing, as of a dictionary's size
                assert read(make_stream(changed)) == [("a.bin", bytes(range(100)))]


def test_bytes_that_are_no_archive() -> None:
    for make_stream in STREAMS.values():
        with pytest.raises(DataError, match=r"a\.zip: not a zip archive") as caught:
            read(make_stream(b"hello, world\n" * 100))
        assert not isinstance(caught.value, TruncatedError)
        with pytest.raises(TruncatedError, match=r"a\.zip: empty archive \(0 bytes\)"):
            read(make_stream(b""))
        assert read(make_stream(make_zip([]))) == []
        assert read(make_stream(make_zip([], comment=b"nothing"))) == []


def test_what_stands_before_an_archive_that_can_seek() -> None:
    data = b"#!/bin/sh\n" * 10 + make_zip(MEMBERS)
    assert read(io.BytesIO(data)) == MEMBERS
    assert read(io.BytesIO(data + b"\n" * 7)) == MEMBERS


@by_directory
def test_zip64(make_stream: Callable[[bytes], Any]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("a.bin", "w", force_zip64=True) as member:
        member.write(b"abc")
    assert read(make_stream(buffer.getvalue())) == [("a.bin", b"abc")]


def test_zip64_as_a_stream_and_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("a.bin", "w", force_zip64=True) as member:
        member.write(b"abc")
    assert read(OneWay(buffer.getvalue())) == [("a.bin", b"abc")]
    # An end record in zip64 form, which more than 65,535 members have.
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    data = make_zip(MEMBERS)
    assert b"PK\6\6" in data
    for make_stream in STREAMS.values():
        assert read(make_stream(data)) == MEMBERS


@pytest.mark.skipif(shutil.which("zip") is None, reason="needs the zip program")
def test_archives_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("1.txt", "d/2.txt"):
        (tmp_path / name).write_text(name * 100)
    (tmp_path / "l.txt").symlink_to("1.txt")

    def packed(*options: str) -> bytes:
        subprocess.run(["zip", "-q", "-r", "-X", *options, ".", "-i", "*.txt"], cwd=tmp_path, check=True)
        return (tmp_path / "a.zip").read_bytes()

    reader = ZipReader(io.BytesIO(packed("-y", "a.zip")), "a.zip")
    assert {member.name: member.data for member in reader} == {n: n.encode() * 100 for n in ("1.txt", "d/2.txt")}
    assert reader.skipped == {"symbolic link": 1}
    (tmp_path / "a.zip").unlink()
    locked = packed("-P", "secret", "a.zip")
    for make_stream in (STREAMS["seeks"], STREAMS["ranges"]):
        with pytest.raises(DataError, match=r"a\.zip: '.*txt' at byte \d+ is encrypted"):
            read(make_stream(locked))
        assert read(make_stream(locked), select=lambda name: False) == []


def test_an_encrypted_member_of_a_stream() -> None:
    data = bytearray(make_zip([("a", b"1")]))
    data[6] |= 1
    with pytest.raises(DataError, match="'a' at byte 0 is encrypted"):
        read(OneWay(bytes(data)))


def test_sizes_behind_the_data() -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.data += bytes(data)
            return len(bytes(data))

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        archive.writestr("a.txt", b"abc")
        archive.writestr("b.txt", b"def")
    for make_stream in (STREAMS["seeks"], STREAMS["ranges"]):
        assert read(make_stream(pipe.data)) == [("a.txt", b"abc"), ("b.txt", b"def")]
    with pytest.raises(DataError, match=r"'a\.txt' at byte 0 has its size behind its data"):
        read(OneWay(pipe.data))


@every_way
def test_a_member_larger_than_allowed(make_stream: Callable[[bytes], Any]) -> None:
    data = make_zip([("a", b"1"), ("bomb", bytes(1 << 20)), ("c", b"3")])
    assert len(data) < 3000
    got: list[ZipMember] = []
    with pytest.raises(DataError, match=r"'bomb' at byte \d+ has 1048576 bytes, more than max_member_bytes=1048575"):
        drain(make_stream(data), got, max_member_bytes=(1 << 20) - 1)
    assert [member.name for member in got] == ["a"]
    assert len(read(make_stream(data), max_member_bytes=1 << 20)) == 3
    assert len(read(make_stream(data), max_member_bytes=None)) == 3


@every_way
def test_a_header_that_makes_a_bomb_small(make_stream: Callable[[bytes], Any]) -> None:
    data = make_zip([("bomb", bytes(1 << 20))])
    for method in METHODS[1:]:
        data = make_zip([("bomb", bytes(1 << 20))], method)
        with pytest.raises(DataError, match="unpacks to more than 10 bytes"):
            read(make_stream(data.replace((1 << 20).to_bytes(4, "little"), (10).to_bytes(4, "little"))))


@by_directory
def test_a_member_that_lies_nowhere_is_not_left_out(make_stream: Callable[[bytes], Any]) -> None:
    # As behind other bytes: zipfile then counts all offsets from where the archive seems to begin.
    data = bytearray(make_zip([("a", b"1"), ("b", b"2")]))
    end = data.rindex(b"PK\5\6")
    data[end + 16 : end + 20] = b"\xff\xff\xff\x7f"
    with pytest.raises(DataError, match=r"a\.zip: damaged: by its directory, 'a' lies before"):
        read(make_stream(bytes(data)))


@every_way
def test_a_directory_has_no_data(make_stream: Callable[[bytes], Any]) -> None:
    for method in METHODS:
        # Packed, nothing has bytes, too.
        whole = make_zip([("ab/", b""), ("ab/x", b"1")], method)
        assert read(make_stream(whole)) == [("ab/x", b"1")]
        damaged = make_zip([("a", b"1"), ("abc", b"some data"), ("d", b"")], method).replace(b"abc", b"ab/")
        got: list[ZipMember] = []
        with pytest.raises(
            DataError, match=r"a\.zip: damaged: 'ab/' at byte \d+ has the name of a directory and 9 bytes"
        ):
            drain(make_stream(damaged), got)
        assert [(member.name, member.data) for member in got] == [("a", b"1")]


@pytest.mark.parametrize("method", METHODS)
def test_a_size_beyond_a_machine_word(method: int) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive, archive.open("a", "w", force_zip64=True) as member:
        member.write(b"1" * 100)
    data = bytearray(buffer.getvalue())
    place = data.index(struct.pack("<2H", 1, 16)) + 4
    data[place : place + 8] = b"\xff" * 8
    with pytest.raises(DataError, match=r"a\.zip: 'a' at byte 0 is damaged"):
        read(OneWay(bytes(data), 700), max_member_bytes=None)


@by_directory
def test_members_that_overlap_are_refused(make_stream: Callable[[bytes], Any]) -> None:
    data = make_zip([("a", b"1" * 50), ("b", b"2" * 50)], zipfile.ZIP_STORED)
    second = data.index(b"PK\3\4", 4)
    listed = data.index(b"PK\1\2", data.index(b"PK\1\2") + 4)
    place = listed + 42
    assert data[place : place + 4] == second.to_bytes(4, "little")
    again = data[:place] + bytes(4) + data[place + 4 :]
    with pytest.raises(DataError, match="overlaps what follows at byte 0"):
        read(make_stream(again))
    # A member that reaches into the next.
    sizes = (50).to_bytes(4, "little")
    first = data.index(b"PK\1\2") + 20
    longer = data[:first] + (90).to_bytes(4, "little") + sizes + data[first + 8 :]
    with pytest.raises(DataError, match=f"'a' at byte 0 overlaps what follows at byte {second}"):
        read(make_stream(longer))


@by_directory
def test_names_of_directory_and_header_that_differ(make_stream: Callable[[bytes], Any]) -> None:
    data = bytearray(make_zip([("a.txt", b"1")]))
    data[30] ^= 3
    with pytest.raises(DataError, match=r"the directory says 'a\.txt' and the header at byte 0 'b\.txt'"):
        read(make_stream(bytes(data)))


def test_a_stream_whose_directory_lists_other_members() -> None:
    data = make_zip([("a", b"1"), ("b", b"2")])
    shown = make_zip([("a", b"1")])
    start = shown.index(b"PK\1\2")
    hidden = data[: data.index(b"PK\1\2")] + shown[start:]
    with pytest.raises(DataError, match="does not list the members that came"):
        read(OneWay(hidden))
    with pytest.raises(DataError, match="found no end record"):
        read(OneWay(data.replace(b"PK\5\6", b"PK\5\7")))
    with pytest.raises(DataError, match=r"damaged at byte \d+: found no header"):
        read(OneWay(data[: data.index(b"PK\3\4", 4)] + b"junk" * 20))


@every_way
def test_methods_that_are_not_known(make_stream: Callable[[bytes], Any]) -> None:
    data = make_zip([("a", b"1")], zipfile.ZIP_STORED)
    central = data.index(b"PK\1\2") + 10
    changed = data[:8] + b"\x5d" + data[9:central] + b"\x5d" + data[central + 1 :]
    with pytest.raises(DataError, match="'a' at byte 0 is packed by method 93; known are stored, deflate, bzip2, LZMA"):
        read(make_stream(changed))


@every_way
def test_what_is_not_given_is_counted(make_stream: Callable[[bytes], Any]) -> None:
    data = make_zip([("d/", b""), ("d/a.mp4", bytes(5000)), ("d/a.txt", b"1"), ("e.mp4", b"2")], zipfile.ZIP_STORED)
    kinds: list[str] = []
    got: list[ZipMember] = []
    stream = make_stream(data)
    reader = drain(stream, got, select=lambda name: name.endswith(".txt"), on_skip=kinds.append)
    assert [member.name for member in got] == ["d/a.txt"]
    assert reader.skipped == {"directory": 1, "not selected": 2}
    assert kinds == ["directory", "not selected", "not selected"]
    if isinstance(stream, Skipping):
        assert stream.given < 5000


@by_directory
def test_a_store_that_fails_is_not_taken_for_a_bad_archive(make_stream: Callable[[bytes], Any]) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise StoreConnectionError("gave up", bucket="b", key="k")

    stream = make_stream(make_zip(MEMBERS))
    failing = Failing(b"x" * 100)
    if isinstance(stream, Ranging):
        stream.ranged = lambda: failing  # type: ignore[method-assign]
    else:
        stream = failing
    with pytest.raises(StoreConnectionError):
        read(stream)


def test_duplicate_names_all_come() -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = make_zip([("a", b"1"), ("a", b"2")])
    for make_stream in STREAMS.values():
        assert read(make_stream(data)) == [("a", b"1"), ("a", b"2")]
