"""What the tests of the transport share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from wire import Wire


@pytest.fixture
def closes_descriptors() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.pool.close()
