"""What it means that a worker process ends or is stuck: another start, or an error that says all that is known.

Contract
- A death is looked at once, before its process is discarded. `allow_restart` counts it and warns, or raises
  WorkerDiedError: with on_worker_death="raise" at the first death, else after `max_restarts` of one worker in an epoch.
- `give_up_on` makes the error for workers that gave nothing in time; the next epoch replaces them.
- The next process of the place goes on after what has arrived: nothing is lost or doubled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipes.errors import WorkerDiedError, WorkerTimeoutError
from pipes.loader2.process import describe_exit
from pipes.loader2.progress import Progress
from pipes.loader2.settings import Settings
from pipes.loader2.slot import Slot
from pipes.loader2.whereabouts import Place, Whereabouts

__all__ = ["Death", "give_up_on"]

_GRACE = 2.0


@dataclass(frozen=True)
class Death:
    """What is known of a worker that died."""

    pid: int
    exitcode: int | None
    reached: str
    at: Whereabouts
    ahead: Place | None
    crash: str

    @classmethod
    def of(cls, worker: Slot, streams: Iterable[Progress]) -> Death:
        """Look at the process of `worker`, whose end was seen on its channel."""
        process = worker.process
        process.join(_GRACE)
        crash = process.crash_stack()
        own = [p for p in streams if p.worker == worker.number and not p.ended]
        reached = ", ".join(f"stream {p.stream} after output {p.arrived}" for p in own) or "no open stream"
        ahead = (own[0].stream, own[0].arrived) if own else None
        return cls(process.pid, process.exitcode, reached, worker.page.read(), ahead, f"\n{crash}" if crash else "")

    def allow_restart(self, worker: Slot, settings: Settings) -> None:
        """Count a restart and warn of it; raises WorkerDiedError when there may be none."""
        place = self.at.place
        again = place is not None and place == worker.traced
        worker.deaths_there = worker.deaths_there + 1 if again else int(place is not None)
        # A thread may end a worker that waits or sends: an output to come is to blame, and is made one by one then.
        worker.traced = place or self.ahead
        what = (
            f"worker {worker.number} (pid {self.pid}) died: {describe_exit(self.exitcode)}; it was {self.at}; "
            f"it ran {self.reached}"
        )
        if not settings.recover:
            raise self._error(f"{what}. on_worker_death='raise' turns recovery off{self.crash}", worker)
        if worker.restarts >= settings.max_restarts:
            raise self._error(
                f"{what}. It was restarted {worker.restarts} times in this epoch (max_restarts="
                f"{settings.max_restarts}); {self._advice(worker)}{self.crash}",
                worker,
            )
        worker.restarts += 1
        warnings.warn(
            f"{what}; it is started again from its last snapshot, nothing is lost or doubled "
            f"(restart {worker.restarts} of at most {settings.max_restarts} in this epoch){self.crash}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _advice(self, worker: Slot) -> str:
        if self.at.place is None:
            return "mend that, or try num_workers=0, where it is an ordinary error"
        if worker.deaths_there < 2:
            return "it died at another place each time, so look at the memory that the workers use"
        named = "the element" if self.at.element else "an element of the output"
        return f"it died {worker.deaths_there} times at this one, so mend the stage, or leave out {named} that is named"

    def _error(self, message: str, worker: Slot) -> WorkerDiedError:
        code = self.exitcode
        return WorkerDiedError(
            message,
            worker=worker.number,
            pid=self.pid,
            signal=-code if code is not None and code < 0 else None,
            exit_code=code if code is not None and code >= 0 else None,
            reason=describe_exit(code),
            stream=self.at.stream,
            output=self.at.output,
            stage=self.at.stage,
            element=self.at.element,
            restarts=worker.restarts,
        )


def give_up_on(workers: Sequence[Slot], settings: Settings) -> WorkerTimeoutError:
    """Return the error for `workers`, which gave nothing within the timeout, with the stack of each."""
    names = " and ".join(f"worker {worker.number} (pid {worker.process.pid})" for worker in workers)
    stacks = []
    for worker in workers:
        worker.stuck = True
        stacks.append(f"worker {worker.number}, {worker.page.read()}:\n{worker.process.stack()}")
    return WorkerTimeoutError(
        f"{names} gave no output within timeout={settings.timeout:g} s; raise the timeout, or see where it is stuck:\n"
        + "\n".join(stacks)
    )
