"""Shared memory where memfd is forbidden, and where there is no room."""

from __future__ import annotations

import errno
import os

import pytest

from pipes.loader2 import segments
from pipes.loader2.segments import create_segment, map_segment, view_bytes

pytestmark = pytest.mark.usefixtures("closes_descriptors")


def test_a_posix_segment_has_no_name_and_works_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(segments.os, "memfd_create")
    names = os.listdir("/dev/shm")
    fd = create_segment(1 << 16)
    assert os.listdir("/dev/shm") == names
    one, two = map_segment(fd, 1 << 16), map_segment(fd, 1 << 16)
    os.close(fd)
    view_bytes(one, 100)[:] = 3
    assert view_bytes(two, 100).sum() == 300


@pytest.mark.parametrize("full", [1, 2], ids=["shared memory is full", "so is the disk"])
def test_a_full_shared_memory_is_no_signal_later(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(segments.os, "memfd_create")
    asked: list[str] = []
    allocate = os.posix_fallocate

    def fill(fd: int, offset: int, size: int) -> None:
        asked.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(asked) <= full:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr(segments.os, "posix_fallocate", fill)
    names = os.listdir("/dev/shm")
    if full == 2:
        with pytest.raises(OSError, match="No space left"):
            create_segment(1 << 16)
    else:
        fd = create_segment(1 << 16)
        view_bytes(map_segment(fd, 1 << 16), 100)[:] = 3
        assert os.pread(fd, 100, 0) == b"\3" * 100
        os.close(fd)
    assert [path.startswith("/dev/shm") for path in asked] == [True, False]
    assert os.listdir("/dev/shm") == names
