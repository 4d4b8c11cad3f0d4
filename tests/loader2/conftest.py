"""What the tests of the transport share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from wire import Wire


def descriptors() -> set[tuple[str, str]]:
    """The open descriptors with what they stand for; others may close some meanwhile."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.fixture
def closes_descriptors() -> Iterator[None]:
    before = descriptors()
    yield
    left = {each for each in descriptors() - before if not each[1].endswith("/fd")}
    assert left == set()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.pool.close()
