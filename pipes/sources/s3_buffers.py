"""Memory that receives the bytes of large objects, over and over.

Fresh memory costs a page fault for every 4 KiB, which was 0.5 s of system time a GB and a third of the time of reading
from a near store. So parts are received in buffers that are used again, straight from `http.client`: urllib3's
`readinto` fills fresh memory and copies it.
"""

from __future__ import annotations

from collections import deque
from http.client import HTTPResponse
from typing import Any

__all__ = ["Buffers"]

_TRIES = 4


class Buffers:
    """Buffers of `size` bytes, each used again once it has no view left; up to `most` that are free are kept.

    >>> buffers = Buffers(4, 2)
    >>> view = buffers.take(); view[:] = b"abcd"
    >>> kept = view[1:3]; buffers.give(view); del view
    >>> buffers.take().tobytes(), kept.tobytes()
    (b'\\x00\\x00\\x00\\x00', b'bc')
    >>> del kept
    >>> buffers.take().tobytes()
    b'abcd'
    """

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self._free: deque[bytearray] = deque(maxlen=most)
        self._owed = 0

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> memoryview:
        """A view of a buffer that nobody else looks at, with any content."""
        for _ in range(_TRIES):
            try:
                buffer = self._free.pop()
            except IndexError:
                break
            if not _is_viewed(buffer):
                return memoryview(buffer)
            self._free.appendleft(buffer)
        return memoryview(bytearray(self.size))

    def give(self, data: bytes | memoryview) -> None:
        """Have the buffer of `data`, if it is in one, used again, once its last view is gone."""
        buffer = data.obj if isinstance(data, memoryview) else None
        if isinstance(buffer, bytearray) and len(buffer) == self.size:
            self._free.append(buffer)

    def make_room(self, count: int) -> None:
        """Let go of free buffers for `count` bytes that were received elsewhere, so that both stay within one bound."""
        self._owed += count
        while self._owed >= self.size and self._free:
            self._free.popleft()
            self._owed -= self.size
        self._owed = min(self._owed, self.size)

    def receive(self, body: Any) -> memoryview | None:
        """The next bytes of a botocore body in a buffer, empty at the end; None: it does not come from a socket."""
        raw = body._raw_stream
        answer = getattr(raw, "_fp", None)
        if type(answer) is not HTTPResponse:
            return None
        view = self.take()
        count = answer.readinto(view)
        if count and answer.isclosed():
            raw.release_conn()
        return view[:count]


def _is_viewed(buffer: bytearray) -> bool:
    try:
        buffer.append(buffer.pop())  # refused while there is a view
    except BufferError:
        return True
    return False
