"""Workers that die, stop or fail at a chosen moment: what replaces `pipes.loader2.fault_points.reach` in them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipes.loader2 import fault_points, slot, worker
from pipes.loader2.messages import Kind

if TYPE_CHECKING:
    # Each worker imports this module, and pytest would take longer than all the rest.
    import pytest

WAYS = ("SIGKILL", "SIGSEGV", "exit")


def die(way: str) -> None:
    """End this process by a signal, or "exit" without any clean-up."""
    if way == "exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, way))
    signal.pause()


def stress_round() -> int:
    """Which repeat of the tests this is; random choices depend on it, so that a round can be repeated."""
    return int(os.environ.get("PIPES_STRESS_ROUND", "0"))


@dataclass(frozen=True)
class Fault:
    """The n-th death: a process dies in the n-th of `ways` as it passes `point` for the n-th of `passings`-th time.

    A process dies as the first that was not taken yet says; when all are taken, none does.
    """

    point: tuple[str, Kind | None]
    ways: tuple[str, ...]
    passings: tuple[int, ...]
    folder: Path

    def inject(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every worker started from here on carry the fault."""
        fault, work = self, worker.work

        def faulty_work(number: int, sock: socket.socket, payload: bytes) -> None:
            fault.arm()
            work(number, sock, payload)

        monkeypatch.setattr(slot, "work", faulty_work)

    def arm(self) -> None:
        passed = itertools.count(1)
        choice = self._take()

        def reach(moment: str, kind: Any = None) -> None:
            if (moment, kind) == self.point and next(passed) == choice[1]:
                (self.folder / f"died {os.getpid()}").touch()
                die(choice[0])

        if choice is not None:
            fault_points.reach = reach

    def _take(self) -> tuple[str, int] | None:
        for number, choice in enumerate(zip(self.ways, self.passings, strict=True)):
            try:
                os.close(os.open(self.folder / f"taken {number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return choice
        return None

    @property
    def deaths(self) -> int:
        """How many processes have died of it."""
        return len(list(self.folder.glob("died *")))


def log_points(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let every worker started from here on leave one file in `folder` for each point that it passes."""
    work = worker.work

    def logging_work(number: int, sock: socket.socket, payload: bytes) -> None:
        seen = set()

        def reach(moment: str, kind: int | None = None) -> None:
            if (moment, kind) not in seen:
                seen.add((moment, kind))
                (folder / label((moment, None if kind is None else Kind(kind)))).touch()

        fault_points.reach = reach
        work(number, sock, payload)

    monkeypatch.setattr(slot, "work", logging_work)


def label(point: tuple[str, Kind | None]) -> str:
    moment, kind = point
    return moment if kind is None else f"{moment} {kind.name}"
