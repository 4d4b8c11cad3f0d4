"""Ctrl-C put off while descriptors and processes are between two owners.

Contract: inside `with held() as interrupt`, SIGINT does nothing but be noted; `interrupt.deliver()` and the end of the
block let main's own handler have it. Nothing is lost, nothing is raised at a place where it would leak a descriptor,
orphan a process, or be swallowed by a fork hook. Outside the main thread, where Python delivers no signals, it does
nothing.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["held"]


class held:
    """Context manager that notes SIGINT instead of handling it.

    >>> try:
    ...     with held():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("goes on")
    ... except KeyboardInterrupt:
    ...     print("then stops")
    goes on
    then stops
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._frame: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> held:
        handler = signal.getsignal(signal.SIGINT)
        if handler is not None and threading.current_thread() is threading.main_thread():
            # Kept before it is replaced: an interrupt in between finds the old one still in place.
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._frame is not None:
                signal.raise_signal(signal.SIGINT)

    def deliver(self) -> None:
        """Let main's handler have an interrupt that came meanwhile; it may raise."""
        if self._frame is not None and callable(self._handler):
            frame, self._frame = self._frame, None
            self._handler(*frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._frame = number, frame
