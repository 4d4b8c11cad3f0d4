"""The place of one worker in main: the process that fills it, and what has arrived from it and those before.

Contract
- Success. `start` fills the place with a new process that has the graph and waits for EPOCH.
- Failure. `start` raises WorkerError when no process can be had; nothing is left then.
- Stop. `discard` kills the process if it lives and frees all but what has arrived; the place can be filled again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipes.devices import Device
from pipes.loader2.channel import Channel
from pipes.loader2.messages import Kind
from pipes.loader2.packing import Receiver
from pipes.loader2.process import WorkerProcess, start_worker
from pipes.loader2.settings import Settings
from pipes.loader2.sharing import Sharing
from pipes.loader2.shipping import ship
from pipes.loader2.whereabouts import Page, Place
from pipes.loader2.worker import Job, WorkerInfo, work

__all__ = ["Counts", "Slot"]


@dataclass(frozen=True)
class Counts:
    """What one worker gave since the loader was made, and what it cost."""

    pid: int
    batches: int
    bytes: int
    copied_batches: int
    restarts: int
    seconds_waited: float


class Slot:
    """The place of worker `number` of `count`; `device` page-locks what comes from it."""

    def __init__(self, number: int, count: int, device: Device | None = None) -> None:
        self.number = number
        self._count, self._device = count, device
        self.generation = -1
        self.restarts = 0
        # The output (stream, number) that the last process died at, and how many in a row did.
        self.traced: Place | None = None
        self.deaths_there = 0
        self.process: WorkerProcess
        self.page: Page
        self.channel: Channel
        self.receiver: Receiver
        # (kind, stream, generation, parcel or error, snapshot) in the order of arrival
        self.inbox: deque[tuple[Kind, int, int, Any, bytes]] = deque()
        # Messages that were taken in of this process.
        self.taken_in = 0
        self.fatal: BaseException | None = None
        # Main waited in vain for it: the next epoch has another process here.
        self.stuck = False
        self.batches = self.nbytes = 0
        self.waited = 0.0
        self._restarts_before = self._copied_before = 0

    @property
    def runs(self) -> bool:
        """Whether a process was started here and not given up."""
        return hasattr(self, "channel") and not self.channel.closed

    @property
    def has_news(self) -> bool:
        """Whether something may have come, without a system call; a death is seen only by who waits."""
        return not self.runs or self.page.ledger.sent != self.taken_in

    @property
    def _copied(self) -> int:
        return self._copied_before + (self.receiver.copied_batches if hasattr(self, "receiver") else 0)

    @property
    def counts(self) -> Counts:
        """The counts over all epochs and processes of this place."""
        restarts = self._restarts_before + self.restarts
        return Counts(self.process.pid, self.batches, self.nbytes, self._copied, restarts, self.waited)

    def begin_epoch(self) -> None:
        """Forget what has arrived, and let the worker be restarted as often as at first."""
        self.inbox.clear()
        self._restarts_before += self.restarts
        self.restarts = 0
        self.traced = None

    def start(self, settings: Settings, shared: Sharing, max_bytes: int) -> None:
        """Start a process here that runs the graph of `shared`."""
        self.generation += 1
        self.taken_in = 0
        self.fatal = None
        self.stuck = False
        job = Job(
            shared.shipped,
            WorkerInfo(self._count, self.number),
            self.generation,
            max_bytes,
            shared.count,
            settings.snapshot_every,
            settings.init_fn,
            settings.reset_fn,
        )
        self.process = start_worker(
            partial(work, self.number),
            ship(job, "the functions for workers"),
            method=settings.method,
            name=f"pipes worker {self.number}",
            number=self.number,
        )
        self.page, descriptor = Page.create()
        self.channel = Channel(self.process.sock)
        self.channel.post(Kind.PAGE, [], [descriptor])
        self._copied_before = self._copied
        self.receiver = Receiver(settings.max_held, self._device)
        shared.send(self.channel)

    def post(self, kind: Kind, parts: Sequence[bytes] = ()) -> None:
        """Send the worker a message without waiting."""
        self.page.ledger.announce()
        self.channel.post(kind, parts)

    def credit(self, batches: int = 0, own: int = 0) -> None:
        """Let the worker make so many further batches, of which this process had sent `own`; give its slabs back."""
        ledger = self.page.ledger
        ledger.add(batches, own, self.receiver.returned())
        if ledger.to_wake:
            self.post(Kind.CREDIT)

    def discard(self) -> None:
        """End the process and close what belongs to it."""
        # Ctrl-C may have cut a start in two: each closes what there is.
        if hasattr(self, "channel"):
            self.channel.close()
        if hasattr(self, "process"):
            self.process.close()
        if hasattr(self, "receiver"):
            self.receiver.loans.close()
