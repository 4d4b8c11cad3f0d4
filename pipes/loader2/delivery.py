"""Which worker's output is given next: strictly in turn, or whichever is there.

Contract
- `awaited()` names the workers of which one must have something in its inbox before the next output can be given, the
  one to be served first at the head; none at the end. `advance` and `end` tell of what was given.
- InOrder names one: that of the stream whose turn it is.
- AsReady names all that have open streams, the one served longest ago first, so that none is left out for long. A
  worker's own outputs come in the order in which it sent them, its streams in turn.
- Neither holds outputs: what each worker works ahead is bounded by its own credits and bytes in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from pipes.loader2.merge import RoundRobin
from pipes.loader2.progress import Progress
from pipes.loader2.slot import Slot

__all__ = ["AsReady", "Delivery", "InOrder"]


class Delivery(Protocol):
    """What the engine asks about the order."""

    def awaited(self) -> Sequence[Slot]: ...
    def advance(self, stream: int) -> None: ...
    def end(self, stream: int) -> None: ...


class InOrder:
    """Round robin over the streams that live, whichever workers run them.

    >>> from pipes.loader2.streams import StreamState
    >>> workers = [Slot(0, 2), Slot(1, 2)]
    >>> delivery = InOrder([Progress(s, s % 2, StreamState()) for s in range(2)], workers)
    >>> delivery.awaited()[0].number, delivery.advance(0), delivery.awaited()[0].number
    (0, None, 1)
    """

    def __init__(self, streams: Iterable[Progress] = (), workers: Sequence[Slot] = ()) -> None:
        alive = [progress for progress in streams if not progress.ended]
        self._turns = RoundRobin({progress.stream: progress.given for progress in alive})
        self._worker = {progress.stream: (workers[progress.worker],) for progress in alive}

    def awaited(self) -> Sequence[Slot]:
        stream = self._turns.turn()
        return () if stream is None else self._worker[stream]

    def advance(self, stream: int) -> None:
        assert stream == self._turns.turn(), f"an output of stream {stream} in the turn of {self._turns.turn()}"
        self._turns.advance()

    def end(self, stream: int) -> None:
        assert stream == self._turns.turn(), f"the end of stream {stream} in the turn of {self._turns.turn()}"
        self._turns.end()


class AsReady:
    """Whatever is there, from the worker that was served longest ago.

    >>> from pipes.loader2.streams import StreamState
    >>> workers = [Slot(0, 2), Slot(1, 2)]
    >>> delivery = AsReady([Progress(s, s % 2, StreamState()) for s in range(4)], workers)
    >>> delivery.advance(0)
    >>> [worker.number for worker in delivery.awaited()]
    [1, 0]
    """

    def __init__(self, streams: Iterable[Progress], workers: Sequence[Slot]) -> None:
        alive = [progress for progress in streams if not progress.ended]
        self._worker = {progress.stream: progress.worker for progress in alive}
        self._open = Counter(self._worker.values())
        self._queue = {number: workers[number] for number in sorted(self._open)}

    def awaited(self) -> Sequence[Slot]:
        return tuple(self._queue.values())

    def advance(self, stream: int) -> None:
        number = self._worker[stream]
        self._queue[number] = self._queue.pop(number)

    def end(self, stream: int) -> None:
        number = self._worker[stream]
        self._open[number] -= 1
        if not self._open[number]:
            del self._queue[number]
