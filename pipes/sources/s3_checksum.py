"""The checksums that S3 keeps of objects: x-amz-checksum-crc32, -crc32c, -crc64nvme, -sha1, -sha256.

The algorithms are those of RFC 1952 (CRC-32), RFC 3720 (CRC-32C) and the NVM Command Set specification (CRC-64/NVME);
check values are those of the CRC catalogue for b"123456789". zlib and hashlib have three of them; the others are
awscrt's where it is installed (over 1 GB/s), else they run in numpy, in many lanes side by side (some 250 MB/s).
"""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np

__all__ = ["Checksum", "checksum_of_headers", "crc_reflected"]

# The cheapest first: an object may have several.
_NAMES = ("crc32", "crc64nvme", "crc32c", "sha1", "sha256")
# The reflected polynomial and the bits.
_CRCS = {"crc32c": (0x82F63B78, 32), "crc64nvme": (0x9A6C9329AC4BC9B5, 64)}
_LANE = 256
_SLICE = 1 << 20


class _Sum(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...

    def copy(self) -> Any: ...


class Checksum:
    """What a store says an object's checksum is, and what its bytes so far have.

    >>> one = checksum_of_headers({"x-amz-checksum-crc32c": "4waSgw=="})
    >>> one.update(b"12345"); one.matches()
    False
    >>> one.update(b"6789"); one.matches(), one.name, one.found
    (True, 'crc32c', '4waSgw==')
    """

    def __init__(self, name: str, expected: str) -> None:
        self.name, self.expected = name, expected
        self._sum: _Sum = _begin(name)

    @property
    def found(self) -> str:
        """Of the bytes so far, in base64 as the store writes it."""
        return b64encode(self._sum.digest()).decode()

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._sum.update(data)

    def matches(self) -> bool:
        """Whether the bytes so far are what the store has."""
        return self.found == self.expected

    def begun_again(self) -> Checksum:
        """The same expectation, of no bytes yet."""
        return Checksum(self.name, self.expected)


def checksum_of_headers(headers: Mapping[str, str]) -> Checksum | None:
    """The checksum of a whole object that an answer's headers (in lower case) tell; None where they tell none.

    A composite checksum, of the checksums of a multipart upload's parts (it ends in "-" and their number), says nothing
    about the object's bytes as a whole.
    """
    if headers.get("x-amz-checksum-type") == "COMPOSITE":
        return None
    for name in _NAMES:
        expected = headers.get(f"x-amz-checksum-{name}", "")
        if expected and "-" not in expected:
            return Checksum(name, expected)
    return None


def _begin(name: str) -> _Sum:
    if name == "crc32":
        return _Crc(zlib.crc32, 4)
    if name in _CRCS:
        return _Crc(
            _native(name) or (lambda data, value: crc_reflected(data, value, *_CRCS[name])), _CRCS[name][1] // 8
        )
    return hashlib.new(name, usedforsecurity=False)


@cache
def _native(name: str) -> Callable[[bytes | memoryview, int], int] | None:
    try:
        from awscrt import checksums
    except ImportError:
        return None
    return getattr(checksums, name, None)


class _Crc:
    def __init__(self, function: Callable[[bytes | memoryview, int], int], size: int, value: int = 0) -> None:
        self._function, self._size, self._value = function, size, value

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")

    def copy(self) -> _Crc:
        return _Crc(self._function, self._size, self._value)


def crc_reflected(data: bytes | memoryview, value: int, polynomial: int, width: int) -> int:
    """Continue a CRC with reflected input and output, and all bits turned before and after.

    >>> crc = 0x9A6C9329AC4BC9B5, 64
    >>> hex(crc_reflected(b"6789", crc_reflected(b"12345", 0, *crc), *crc))
    '0xae8b14860a799888'
    """
    ones = (1 << width) - 1
    register = value ^ ones
    for start in range(0, len(data), _SLICE):
        part = data[start : start + _SLICE]
        body = len(part) // _LANE * _LANE if len(part) >= 8 * _LANE else 0
        if body:
            register = _side_by_side(part[:body], register, polynomial)
        table = _table(polynomial)
        for byte in part[body:]:
            register = table[(register ^ byte) & 255] ^ register >> 8
    return register ^ ones


def _side_by_side(data: bytes | memoryview, register: int, polynomial: int) -> int:
    """The register after whole lanes, which run at once: what they leave is linear, so it is put together after."""
    words = np.ascontiguousarray(np.frombuffer(data, "<u2").reshape(-1, _LANE // 2).T)
    registers = np.zeros(words.shape[1], np.uint64)
    registers[0] = register
    table = _wide_table(polynomial)
    for row in words:
        registers = table[(registers ^ row) & np.uint64(0xFFFF)] ^ (registers >> np.uint64(16))
    # Lanes of zeros before the first leave nothing.
    registers = np.concatenate(
        [np.zeros((1 << (len(registers) - 1).bit_length()) - len(registers), np.uint64), registers]
    )
    length = _LANE
    while len(registers) > 1:
        moved = np.zeros(len(registers) // 2, np.uint64)
        for place, tables in enumerate(_zeros(polynomial, length)):
            moved ^= tables[(registers[::2] >> np.uint64(8 * place)) & np.uint64(255)]
        registers, length = moved ^ registers[1::2], 2 * length
    return int(registers[0])


@cache
def _table(polynomial: int) -> list[int]:
    """What each byte leaves of the register after its eight bits."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (polynomial if byte & 1 else 0)
        table.append(byte)
    return table


@cache
def _wide_table(polynomial: int) -> np.ndarray[Any, Any]:
    """The same for two bytes."""
    table = np.array(_table(polynomial), np.uint64)
    after_one = table[np.arange(1 << 16) & 255] ^ (np.arange(1 << 16, dtype=np.uint64) >> np.uint64(8))
    wide: np.ndarray[Any, Any] = table[(after_one & np.uint64(255)).astype(np.intp)] ^ (after_one >> np.uint64(8))
    return wide


@cache
def _zeros(polynomial: int, count: int) -> np.ndarray[Any, Any]:
    """What a register becomes over `count` bytes of zeros, a power of two: one table for each of its 8 bytes."""
    if count == 1:
        bits = [1 << bit for bit in range(64)]
        columns = np.array([_table(polynomial)[bit & 255] ^ bit >> 8 for bit in bits], np.uint64)
    else:
        half = _zeros(polynomial, count // 2)
        ones = half[np.arange(64) // 8, 1 << np.arange(64) % 8]
        columns = np.bitwise_xor.reduce(
            [half[place, (ones >> np.uint64(8 * place)) & np.uint64(255)] for place in range(8)], axis=0
        )
    tables = np.zeros((8, 256), np.uint64)
    for bit, column in enumerate(columns):
        set_ = (np.arange(256) >> bit % 8 & 1).astype(bool)
        tables[bit // 8][set_] ^= column
    return tables
