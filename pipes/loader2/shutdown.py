"""The end of a loader's workers: told to stop, waited for, and a reader in another thread woken.

Contract
- Success. `see_off` lets workers end by themselves, between two outputs, for 2 s together; whoever then still lives is
  killed by the caller.
- Failure. Workers that are gone already are no failure.
- Stop. Both functions are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pipes.errors import ChannelClosed
from pipes.loader2 import channel as channels
from pipes.loader2.messages import Kind
from pipes.loader2.slot import Slot

__all__ = ["see_off", "wake_reader"]

_GRACE = 2.0


def see_off(workers: Sequence[Slot]) -> None:
    """Tell workers to stop and wait for them to end."""
    for worker in workers:
        worker.post(Kind.STOP)
    deadline = time.monotonic() + _GRACE
    for worker in workers:
        # Reading on lets a worker that is sending reach its next look at the channel.
        while worker.process.is_alive() and time.monotonic() < deadline:
            channels.wait([worker.channel], [worker.process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
            try:
                for message in worker.channel.feed():
                    channels.close_descriptors(message.fds)
            except (ChannelClosed, OSError):
                worker.process.join(max(0.0, deadline - time.monotonic()))


def wake_reader(workers: Sequence[Slot], has_left: Callable[[], bool]) -> None:
    """Make another thread leave `next`: the ends of its workers wake it."""
    for worker in workers:
        worker.process.kill()
    deadline = time.monotonic() + _GRACE
    while not has_left() and time.monotonic() < deadline:
        time.sleep(0.001)
