"""What the main process knows of the streams that its workers run: what arrived, what was given to the user."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipes.datapipe import IterDataPipe
from pipes.error_policy import StageCounts
from pipes.loader2.streams import Plan, StreamState, describe
from pipes.state import Captures, Table

__all__ = ["Progress", "Reached"]

# The number of an output, and where the graph stood after it; a table where main has not the worker's graph.
Reached = tuple[int, Captures | Table]


class Progress:
    """How far one stream has come: what arrived from its worker, and what was given to the user."""

    __slots__ = (
        "all_arrived",
        "arrived",
        "arrived_snapshot",
        "base",
        "counts",
        "ended",
        "given",
        "given_snapshot",
        "numbers",
        "stream",
        "worker",
    )

    def __init__(self, stream: int, worker: int, base: StreamState) -> None:
        self.stream, self.worker, self.base = stream, worker, base
        self.given = self.arrived = base.given
        # Each a pickled `Reached`, or nothing: most are never looked at.
        self.given_snapshot = self.arrived_snapshot = b""
        self.ended = self.all_arrived = base.ended
        # What its stages have skipped up to the last output given, or a little beyond.
        self.counts = base.counts
        # What its users' pipes had counted at its end, pickled, or nothing.
        self.numbers = b""

    def begin(self, snapshot: bytes) -> None:
        """Take in where the worker has begun, which says more than `base`."""
        self.arrived_snapshot = self.arrived_snapshot or snapshot
        self.given_snapshot = self.given_snapshot or snapshot

    def end(self, numbers: bytes) -> None:
        """Take in that the stream has no more, and what its users' pipes have counted."""
        self.ended, self.numbers = True, numbers

    def count(self, counts: Mapping[str, StageCounts]) -> bool:
        """Take in what the stages have counted up to the output that follows; tell whether there are more errors."""
        errors = sum(each.errors for each in self.counts.values())
        self.counts = counts
        return errors < sum(each.errors for each in counts.values())

    def state(
        self,
        graph: IterDataPipe[Any],
        plan: Plan,
        *,
        arrived: bool = False,
        before: tuple[int, bytes] | None = None,
    ) -> StreamState:
        """Return where the stream stands for the user, or for a new worker that goes on after what has arrived.

        `before` is how many of the newest outputs do not count as given, and the snapshot that was the newest then.
        """
        snapshot = self.arrived_snapshot if arrived else self.given_snapshot
        given = self.arrived if arrived else self.given
        ended = self.ended
        if before is not None:
            given, snapshot, ended = given - before[0], before[1], False
        if ended or (arrived and self.all_arrived):
            numbers = self.base.numbers if self.base.ended else pickle.loads(self.numbers) if self.numbers else None
            return StreamState(given=given, ended=True, counts=self.counts, numbers=numbers)
        if not snapshot:
            return replace(self.base.after(given), counts=self.counts)
        reached: Captures | Table
        at, reached = pickle.loads(snapshot)
        table = reached if isinstance(reached, dict) else describe(graph, plan, self.stream, reached)
        return StreamState(table, at, given, counts=self.counts)
