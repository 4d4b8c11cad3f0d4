"""The fields of a tar header."""

from __future__ import annotations

import io
import tarfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tars import END, header

from pipes.errors import DataError
from pipes.formats.tar import TarReader
from pipes.formats.tar_headers import checksum_matches, expected_sum, parse_number, parse_pax, text


@given(st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=90), st.integers(0, 8**11 - 1))
def test_the_checksum_is_that_of_tarfile(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = size
    block = info.tobuf(tarfile.GNU_FORMAT)[-512:]
    assert zlib.adler32(block, 0) & 0xFFFF == expected_sum(block[148:156])
    assert checksum_matches(block)
    assert parse_number(block[124:136]) == size
    damaged = bytes([block[0] ^ 1]) + block[1:]
    assert zlib.adler32(damaged, 0) & 0xFFFF != expected_sum(damaged[148:156])
    assert not checksum_matches(damaged)


@given(st.integers(0, 1 << 70))
def test_base_256_numbers(size: int) -> None:
    assert parse_number(b"\x80" + size.to_bytes(11, "big")) == size


@pytest.mark.parametrize(
    ("field", "number"),
    [(b"0000644\0", 420), (b"   644 \0", 420), (b"\0" * 8, 0), (b"644\0junk", 420), (b"\xff" * 12, -1)],
)
def test_numbers(field: bytes, number: int) -> None:
    assert parse_number(field) == number


@pytest.mark.parametrize("field", [b"00000x\0", b"-0000001", b"0o17\0", b"1_000\0", b"9\0"])
def test_what_is_no_number(field: bytes) -> None:
    with pytest.raises(ValueError, match=r"octal|invalid literal"):
        parse_number(field)


def test_checksum_fields_without_a_number() -> None:
    assert expected_sum(bytes(8)) == -1
    assert not checksum_matches(bytes(512))
    assert not checksum_matches(b"z" * 512)


def test_names_keep_undecodable_bytes() -> None:
    assert text(b"\xff\0rest").encode("utf-8", "surrogateescape") == b"\xff"


def test_pax_records() -> None:
    body = "15 path=a\nb=ü\n".encode() + b"11 mtime=1\n" + b"10 size=7\n" + b"22 GNU.sparse.major=1\n" + bytes(20)
    assert parse_pax(body, "a.tar") == {"path": "a\nb=ü", "size": "7", "GNU.sparse.major": "1"}


@pytest.mark.parametrize(
    "body", [b"9 path=a", b"x path=a\n", b"99 path=a\n", b"9 path a\n", b"path=a\n", b"2 \n", b"-9 path=a\n"]
)
def test_malformed_pax_records(body: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.tar: a pax record at byte 0"):
        parse_pax(body, "a.tar")


@pytest.mark.parametrize("magic", [b"ustar\x0000", b"ustar\0\0\0", b"ustar\0  ", b"ustar   "])
def test_a_prefix_counts_whatever_the_version_says(magic: bytes) -> None:
    data = header(b"a.jpg", b"0", b"1", magic=magic, prefix=b"dir") + END
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["dir/a.jpg"]
    assert [member.name for member in TarReader(io.BytesIO(data), "a.tar")] == ["dir/a.jpg"]


def test_gnu_keeps_times_where_others_have_a_prefix() -> None:
    data = header(b"a.jpg", b"0", b"1", magic=b"ustar  \0", prefix=b"14000000000\0" * 2) + END
    assert [member.name for member in TarReader(io.BytesIO(data), "a.tar")] == ["a.jpg"]


@pytest.mark.parametrize("extended", [header(b"x", b"x", b"9 path=x\n"), header(b"././@LongLink", b"L", b"long\0")])
def test_a_name_without_a_member_is_damage(extended: bytes) -> None:
    with pytest.raises(DataError, match="at byte 2048: found no member after the header that gives its name"):
        list(TarReader(io.BytesIO(header(b"a", b"0", b"1") + extended + END), "a.tar"))
    only_global = header(b"g", b"g", b"9 path=x\n")
    assert list(TarReader(io.BytesIO(only_global + END), "a.tar")) == []
