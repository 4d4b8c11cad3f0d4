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
    """One that can go forward without reading."""

    skipped = 0

    def skip(self, size: int) -> None:
        self.skipped += size
        self.inner.seek(size, 1)
