"""Who may use an engine: the process that made it, and one thread at a time.

Contract
- Success. `check_open` and `check_free` return, and cost a look at an attribute.
- Failure. A second thread that asks while one is inside `next` gets BusyError, and the first goes on undisturbed. In a
  forked child of main an engine is `inherited`: it tells where it stood and does nothing to the workers, which share
  memory with that process, too, and would take what it wrote there for main's.
- Stop. An inherited engine counts as closed, so that neither the end of the child nor its `shutdown()` ends workers.
"""

from __future__ import annotations

import os
import weakref

from pipes.errors import BusyError

__all__ = ["Owned", "busy"]


class Owned:
    """Base of what one process made, and one thread at a time may read."""

    def __init__(self) -> None:
        self._closed = self.inherited = False
        # The thread that is inside `next`.
        self._reader: int | None = None
        _owned.add(self)

    def check_open(self) -> None:
        """Raise RuntimeError when this was shut down, or made by the process that this one was forked from."""
        if self.inherited:
            raise RuntimeError(
                "the workers of this iterator belong to the process that this one was forked from; iter(loader) starts "
                "others here"
            )
        if self._closed:
            raise RuntimeError("the loader was shut down while this iterator waited for its workers")

    def check_free(self) -> None:
        """Raise BusyError when a thread, or what this signal handler interrupted, is inside `next`."""
        if self._reader is not None:
            raise busy()


def busy() -> BusyError:
    """Return the error for who asks a loader that another thread is using at that moment."""
    return BusyError(
        "another thread is inside iter() or next() of this loader: let one thread iterate it and hand the outputs on, "
        "hold a lock around next(iterator), or make a loader for each thread"
    )


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def _disown_in_forked_child() -> None:
    for each in list(_owned):
        each.inherited = each._closed = True
        each._reader = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_in_forked_child)
