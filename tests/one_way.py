"""Streams that only go forward."""

from __future__ import annotations

import io


class OneWay:
    """A stream without seek, giving at most `step` bytes a call."""

    def __init__(self, data: bytes, step: int = 1000) -> None:
        self.inner = io.BytesIO(data)
        self.step = step
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        chunk = self.inner.read(self.step if size < 0 else min(size, self.step))
        self.given += len(chunk)
        return chunk


class Skipping(OneWay):
    """One that can go forward without reading, at most to its end, and says by how much."""

    skipped = 0

    def skip(self, size: int) -> int:
        here = self.inner.tell()
        passed = min(size, len(self.inner.getvalue()) - here)
        self.inner.seek(here + passed)
        self.skipped += passed
        return passed
