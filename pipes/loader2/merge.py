"""The order in which the outputs of several streams are given, and how far each has come.

The next output comes from the stream, of those not ended, that has given the fewest, the lowest number first: round
robin over the living. The rule needs no memory but the counts, so it is the same in a worker that runs some of the
streams, in the main process, on every rank, and after a resume.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

__all__ = ["RoundRobin"]


class RoundRobin:
    """Say whose turn it is.

    >>> turns = RoundRobin({0: 0, 1: 0})
    >>> turns.turn(), turns.advance(), turns.turn(), turns.advance(), turns.turn()
    (0, None, 1, None, 0)
    >>> turns.end(), turns.turn(), turns.end(), turns.turn()
    (None, 1, None, None)
    """

    __slots__ = ("_heap",)

    def __init__(self, given: dict[int, int], ended: Iterable[int] = ()) -> None:
        gone = set(ended)
        self._heap = [(count, stream) for stream, count in given.items() if stream not in gone]
        heapq.heapify(self._heap)

    def turn(self) -> int | None:
        """Return the stream whose turn it is; None when all have ended."""
        return self._heap[0][1] if self._heap else None

    def advance(self) -> None:
        """Note that the stream whose turn it is gave one output."""
        count, stream = self._heap[0]
        heapq.heapreplace(self._heap, (count + 1, stream))

    def end(self) -> None:
        """Note that the stream whose turn it is has ended."""
        heapq.heappop(self._heap)
