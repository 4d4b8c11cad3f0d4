"""The fields of a tar header, as pure functions.

Sources: POSIX.1-2017, "pax - portable archive interchange" (ustar and pax interchange formats); the GNU tar manual,
"Basic Tar Format" (long names, base-256 numbers, sparse members). Offsets are those of `struct posix_header`.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct

from pipes.errors import DataError

__all__ = [
    "BLOCK",
    "GNU_MAGIC",
    "KINDS",
    "checksum_matches",
    "expected_sum",
    "parse_number",
    "parse_pax",
    "text",
    "unpack",
    "unpack_start",
]

BLOCK = 512
GNU_MAGIC = b"ustar  \0"
# name, size, checksum, type, magic with version, prefix
unpack = Struct("100s24x12s12x8sc100x8s80x155s12x").unpack
# name, size, checksum, type, the prefix's first byte: all that a plain member needs
unpack_start = Struct("100s24x12s12x8sc188xc166x").unpack

# What a member is, by its type byte. Unknown types are "other".
KINDS = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "character device",
    b"4": "block device",
    b"5": "directory",
    b"6": "fifo",
    b"V": "volume label",
}
# The records that say where a member's data lies and what it is called; the others do not concern a reader.
_RECORDS = ("path", "size")

# zlib's Adler-32, begun at 0, holds the sum of all bytes modulo this in its low half, 20 times faster than sum().
_ADLER = 65521


@lru_cache(4096)
def expected_sum(field: bytes) -> int:
    """What `adler32(header, 0) & 0xFFFF` must be for this checksum field; -1 when it holds no number.

    The checksum is the sum of the header's bytes with spaces in its own field.
    """
    try:
        stored = int(field.rstrip(b"\0 "), 8)
    except ValueError:
        return -1
    return (stored - 8 * 32 + sum(field)) % _ADLER


def checksum_matches(header: bytes) -> bool:
    """Whether the stored checksum is the sum of the header's bytes, taken as unsigned or, as old tars did, signed."""
    try:
        stored = int(header[148:156].split(b"\0", 1)[0].strip() or b"?", 8)
    except ValueError:
        return False
    rest = header[:148] + header[156:]
    unsigned = sum(rest) + 8 * 32
    return stored in (unsigned, unsigned - 256 * sum(byte > 127 for byte in rest))


def text(field: bytes) -> str:
    """A name: up to the first NUL, UTF-8, undecodable bytes as surrogates, as Python's own file names are."""
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def parse_number(field: bytes) -> int:
    """A numeric field: octal digits ended by NUL or space, or GNU's base-256 with the first bit set.

    >>> parse_number(b"0000644 "), parse_number(bytes([0x80, 0, 0, 2, 0]))
    (420, 512)

    Raises:
        ValueError: neither.
    """
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] == 0xFF:
        return int.from_bytes(field, "big", signed=True)
    digits = field.split(b"\0", 1)[0].strip()
    if not digits:
        return 0
    if not digits.isdigit():
        raise ValueError(f"not an octal number: {field!r}")
    return int(digits, 8)


def parse_pax(body: bytes, where: str) -> dict[str, str]:
    """The records of a pax extended header that concern reading: `path`, `size` and GNU's marks of sparse members.

    >>> parse_pax(b"12 path=a/b\\n" + b"20 comment=anything\\n", "a.tar")
    {'path': 'a/b'}

    Raises:
        DataError: a record's length does not lead to its newline.
    """
    records = {}
    at = 0
    while at < len(body) and body[at]:
        space = body.find(b" ", at, at + 20)
        try:
            stop = at + int(body[at:space]) if space > 0 else 0
        except ValueError:
            stop = 0
        key, equals, value = body[space + 1 : stop - 1].partition(b"=")
        if not (at < space < stop <= len(body) and body[stop - 1] == 0x0A and equals):
            raise DataError(f"{where}: a pax record at byte {at} of the extended header is malformed")
        keyword = key.decode("utf-8", "replace")
        if keyword in _RECORDS or keyword.startswith("GNU.sparse."):
            records[keyword] = value.decode("utf-8", "surrogateescape")
        at = stop
    return records
