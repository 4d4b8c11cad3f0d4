"""What a worker may do, and what waits for it, in memory that main and the worker share.

Contract
- Main writes (`add`, `announce`), the worker reads (`granted`, `own`, `announced`, `take_loans`): no system call on
  either side. The worker counts its messages too (`count_sending`, `sent`), so that main need not look in vain. Numbers
  only grow, and each is written by one side.
- A worker with nothing to do says so, looks once more, and only then waits on its channel (`falling_asleep`). Main
  looks whether it has said so after everything it wrote, and wakes it with a message. A fence stands between the write
  and the look on either side, so that at least one of them sees what the other wrote: no wake-up is lost.
- To be woken costs both sides more than a small batch does. So a worker says how many of its batches the user should
  have been given by then: half of those that wait. When none waits any more, that many were given.
- Loans that find no room in the ring wait in main for the next `add`.
- A process that ends at any moment leaves the other side nothing to wait for: the next process has another page.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LEDGER_BYTES", "Ledger"]

LEDGER_BYTES = 2048

# Words of 8 bytes, those of main and those of the worker on cache lines of their own; the ring takes the rest.
_GRANTED, _OWN, _ANNOUNCED, _RETURNED = range(4)
_WAKE_AT, _TAKEN, _SENT = 8, 9, 10
_RING = 16
_ROOM = LEDGER_BYTES // 8 - _RING


class Ledger:
    """One side's view of the words; `memory` is `LEDGER_BYTES` zeroed bytes that both sides map.

    >>> memory = memoryview(bytearray(LEDGER_BYTES))
    >>> main, worker = Ledger(memory), Ledger(memory)
    >>> main.add(batches=2, own=1, loans=[7, 8])
    >>> worker.count_sending()
    >>> main.sent
    1
    >>> worker.granted, worker.own, list(worker.take_loans()), list(worker.take_loans())
    (2, 1, [7, 8], [])
    >>> with worker.falling_asleep(wake_at=2):
    ...     before = main.to_wake
    ...     main.add(batches=1, own=1, loans=[])
    ...     before, main.to_wake
    (False, True)
    >>> main.to_wake
    False
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("B").cast("Q")
        self._lock = threading.Lock()
        # Ended loans that the ring had no room for.
        self._late: deque[int] = deque()

    @property
    def granted(self) -> int:
        """Batches that this process was ever allowed to send, beside those of its EPOCH messages."""
        return self._words[_GRANTED]

    @property
    def own(self) -> int:
        """Batches of this process that the user was ever given."""
        return self._words[_OWN]

    @property
    def announced(self) -> int:
        """Messages that main has sent, or is about to send, since the worker began to serve."""
        return self._words[_ANNOUNCED]

    @property
    def sent(self) -> int:
        """Messages that the worker has sent, or is about to send, since it began to serve."""
        return self._words[_SENT]

    @property
    def to_wake(self) -> bool:
        """Whether the worker waits for a message, or is about to, and as many batches were given as it asked for."""
        wake_at = self._words[_WAKE_AT]
        return wake_at != 0 and self._words[_OWN] >= wake_at - 1

    def announce(self) -> None:
        """Count a message of main's, before it is sent."""
        self._words[_ANNOUNCED] += 1

    def count_sending(self) -> None:
        """Count a message of the worker's, before it is sent: one that is larger than the socket needs main to read."""
        self._words[_SENT] += 1

    def add(self, batches: int, own: int, loans: list[int]) -> None:
        """Allow so many further batches, count so many as given, and give back loans; then look at `to_wake`."""
        words = self._words
        if loans or self._late:
            self._late.extend(loans)
            at = words[_RETURNED]
            fitting = min(len(self._late), _ROOM - (at - words[_TAKEN]))
            for number in range(at, at + fitting):
                words[_RING + number % _ROOM] = self._late.popleft()
            self._fence()
            words[_RETURNED] = at + fitting
        words[_OWN] += own
        words[_GRANTED] += batches
        self._fence()

    def take_loans(self) -> Iterator[int]:
        """The loans that ended since the last call."""
        words = self._words
        at, end = words[_TAKEN], words[_RETURNED]
        if at == end:
            return
        self._fence()
        for number in range(at, end):
            yield words[_RING + number % _ROOM]
        self._fence()
        words[_TAKEN] = end

    @contextmanager
    def falling_asleep(self, wake_at: int) -> Iterator[None]:
        """Say inside the `with` block that the worker needs a message once `own` is `wake_at`; look again there."""
        self._words[_WAKE_AT] = wake_at + 1
        try:
            self._fence()
            yield
        finally:
            self._words[_WAKE_AT] = 0

    def _fence(self) -> None:
        """Let the other side see what was written before this call before it sees what is written or read after it.

        Python has no such instruction, but locks need it: on every processor a lock's release follows what was written
        before, and the next acquire comes after that release and before whatever follows.
        """
        with self._lock:
            pass
        with self._lock:
            pass
