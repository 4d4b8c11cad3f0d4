"""Named moments in a worker's life at which the tests make it die, stop or fail.

A worker calls `reach` as it passes each of `POINTS`. That does nothing, and costs some 50 ns a call: it is there to be
replaced, in a worker, by whoever wants to know whether any moment is a bad one to die at.
"""

from __future__ import annotations

from pipes.loader2.messages import Kind

__all__ = ["POINTS", "reach"]

#: Each as `reach` gets it: a moment, and for some of them the kind of message.
POINTS: tuple[tuple[str, Kind | None], ...] = (
    ("at the start", None),
    ("before the graph is unpickled", None),
    ("after the graph is unpickled", None),
    ("ready", None),
    *(
        (moment, kind)
        for kind in (Kind.EPOCH, Kind.CREDIT, Kind.DEAL, Kind.PAUSE, Kind.RESUME, Kind.STOP)
        for moment in ("before handling", "after handling")
    ),
    ("before the output", None),
    ("after the output", None),
    ("before the snapshot", None),
    ("after the snapshot", None),
    ("before the slab is written", None),
    ("after the slab is written", None),
    ("before the descriptors are sent", None),
    ("in the middle of a message", None),
    ("after the descriptors are sent", None),
    *(
        (moment, kind)
        for kind in (Kind.BATCH, Kind.END, Kind.ERROR, Kind.NEED)
        for moment in ("before sending", "after sending")
    ),
)


def reach(moment: str, kind: int | None = None) -> None:
    """Pass one of `POINTS`."""
