"""Tar archives to read in tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from typing import Any

END = bytes(1024)
HARD_STEM = "v1.2/" + "q" * 140 + "/s0001"


def make_tar(members: Iterable[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def header(
    name: bytes,
    kind: bytes,
    data: bytes = b"",
    *,
    size: bytes | None = None,
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
) -> bytes:
    """One header with its data, made by hand where `tarfile` cannot."""
    fields = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2
    fields += (b"%011o\0" % len(data) if size is None else size) + b"00000000000\0"
    tail = kind + bytes(100) + magic.ljust(8, b"\0") + bytes(80) + prefix
    block = (fields + b" " * 8 + tail).ljust(512, b"\0")
    block = fields + b"%06o\0 " % sum(block) + block[156:]
    return block + data + bytes(-len(data) % 512)


def hard_archive() -> bytes:
    """The archive of case D6: two samples between a folder and a link, with dots and length in their names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        folder = tarfile.TarInfo("v1.2")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in [
            (HARD_STEM + ".bin", b""),
            (HARD_STEM + ".seg.json", b'{"k":1}'),
            ("v1.2/s0002.bin", b"\0\1"),
            ("v1.2/s0002.seg.json", b"[]"),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("v1.2/ln.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "s0002.bin"
        archive.addfile(link)
    return buffer.getvalue()
