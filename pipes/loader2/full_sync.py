"""All ranks end an epoch together, at the end of the shortest: a runner around another one.

Contract
- Success. `next()` gives the outputs of the runner below as they are, each once all ranks have one (see `agreement`);
  when one rank has no more, the epoch ends on all of them. What the others have beyond that is dropped. It stands above
  the feeder of a device, which copies ahead without asking anyone, so that ranks that leave their loops at one output
  have asked equally often; for the same reason no answer is sought ahead of the user.
- State. `states()` is that after the last output given: one that came while the ranks could not agree is not.
- Failure. What the runner below raises, when an epoch begins or at an output, is raised on this rank, and RankError at
  the same output on all others. Then the epoch is over on all ranks, and the next one can be begun.
- A lost rank, a timeout, Ctrl-C while the ranks agree: the loader is of no further use; its state tells where it stood.
- Stop. `close()` closes the runner below, then the group; may be called twice.
- No thread of Python: all happens inside the calls. A forked child cannot use the group, and is told so.
"""

from __future__ import annotations

import os
from typing import Any

from pipes.loader2.agreement import Agreement
from pipes.loader2.dealing import Dealer
from pipes.loader2.iterator import Runner, RunnerAround
from pipes.loader2.streams import Plan, StreamState

__all__ = ["FullSync"]


class FullSync(RunnerAround):
    """A runner that ends on all ranks at once."""

    def __init__(self, runner: Runner, agreement: Agreement) -> None:
        super().__init__(runner)
        self._agreement = agreement
        self._pid = os.getpid()
        # The epoch, and the outputs given before it.
        self._epoch = self._given_before = 0

    @property
    def inherited(self) -> bool:
        """False: a forked child is told why it cannot go on, and does not wait for a group that nobody else makes."""
        return False

    def begin(self, plan: Plan, states: dict[int, StreamState], dealer: Dealer | None) -> None:
        """Begin an epoch, on all ranks; raises RankError when one of them could not, or begins another one."""
        self._check_process()
        self._dropped += self._not_given
        self._epoch, self._given_before = plan.epoch, self._given
        self._agreement.begin(plan)
        try:
            self._runner.begin(plan, states, dealer)
        except Exception as error:
            self._agreement.tell(error)
            raise
        self._agreement.agree()

    def next(self) -> Any:
        """Return the next output; raises StopIteration at the end of any rank, what the runner raises, RankError."""
        self._check_process()
        what = f"output {self._given - self._given_before} of epoch {self._epoch}"
        try:
            output = self._runner.next()
        except StopIteration:
            self._agreement.agree(has=False, what=what)
            raise
        except Exception as error:
            self._agreement.tell(error, what)
            raise
        if not self._agreement.agree(what=what):
            raise StopIteration
        self._given += 1
        return output

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this process was forked from a rank that iterates the loader, and has no process group: make a loader "
                "without DistributedReadingService here"
            )

    def close(self) -> None:
        """Close the runner, then the group; see the contract."""
        try:
            self._runner.close()
        finally:
            if os.getpid() == self._pid:
                self._agreement.close()
