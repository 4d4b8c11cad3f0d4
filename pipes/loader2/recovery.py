"""What the end of a worker process means: another start, or an error that says all that is known of it.

Contract
- A death is looked at once, before its process is discarded. `allow_restart` counts it and warns, or raises
  WorkerDiedError: with on_worker_death="raise" at the first death, else after `max_restarts` of one worker in an epoch.
- The next process of the place goes on after what has arrived: nothing is lost or doubled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from pipes.errors import WorkerDiedError
from pipes.loader2.process import describe_exit
from pipes.loader2.progress import Progress
from pipes.loader2.settings import Settings
from pipes.loader2.slot import Slot

__all__ = ["Death"]

_GRACE = 2.0


@dataclass(frozen=True)
class Death:
    """What is known of a worker that died."""

    what: str
    crash: str

    @classmethod
    def of(cls, worker: Slot, streams: Iterable[Progress]) -> Death:
        """Look at the process of `worker`, whose end was seen on its channel."""
        process = worker.process
        process.join(_GRACE)
        how = describe_exit(process.exitcode)
        crash = process.crash_stack()
        own = [p for p in streams if p.worker == worker.number and not p.ended]
        where = ", ".join(f"stream {p.stream} after output {p.arrived}" for p in own) or "no open stream"
        what = f"worker {worker.number} (pid {process.pid}) died: {how}; it ran {where}"
        return cls(what, f"\n{crash}" if crash else "")

    def allow_restart(self, worker: Slot, settings: Settings) -> None:
        """Count a restart and warn of it; raises WorkerDiedError when there may be none."""
        if not settings.recover:
            raise WorkerDiedError(f"{self.what}. on_worker_death='raise' turns recovery off{self.crash}")
        if worker.restarts >= settings.max_restarts:
            raise WorkerDiedError(
                f"{self.what}. It was restarted {worker.restarts} times in this epoch "
                f"(max_restarts={settings.max_restarts}); what it dies of is likely in the elements after those "
                f"named{self.crash}"
            )
        worker.restarts += 1
        warnings.warn(
            f"{self.what}; it is started again from its last snapshot, nothing is lost or doubled "
            f"(restart {worker.restarts} of at most {settings.max_restarts} in this epoch){self.crash}",
            RuntimeWarning,
            stacklevel=3,
        )
