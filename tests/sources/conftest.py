"""What the tests of stores share: one fault-injecting server a module, which each test fills by `reset`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_server import FaultServer


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FaultServer]:
    """A server that a module's `server` fixture resets for each test."""
    with FaultServer() as server:
        yield server
