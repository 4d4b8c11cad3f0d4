"""What the ranks of a training agree on, output by output, by small all-reduces in a gloo group of their own.

Contract
- Success. `agree` returns the same on every rank: whether each of them has an output. All ranks ask as often and in the
  same order, and nothing is under way between two calls; an answer takes as long as the last of the ranks takes to ask.
- Failure. What fails on one rank is told by that rank's `tell`, which is its turn to ask, and is a RankError with the
  rank and the error's text on all others. Ranks that ask about different epochs all get a RankError that says in what
  they differ. After both they are in step, and the next epoch can begin. A rank that is gone is a RankError, one that
  does not ask within `timeout` seconds a RankTimeoutError: of gloo, at once or at the timeout. These, and Ctrl-C while
  the others are waited for, break the group for good, and later calls say so.
- Stop. `close` destroys the group, unless an answer is still under way (after Ctrl-C, or where another thread waits for
  it): gloo would wait for the other ranks then, so the group is left to the end of the process. The waiting thread gets
  a RuntimeError. May be called twice, from any thread, also when all groups were destroyed before.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipes.errors import RankError, RankTimeoutError, mask
from pipes.loader2.streams import Plan

if TYPE_CHECKING:
    import torch

__all__ = ["Agreement"]

# Ctrl-C is seen, and a shutdown by another thread, when so much time has passed.
_SLICE = timedelta(seconds=0.1)
_TEXT = 1000
_NAMES = ("seed", "seed", "epoch", "num_streams")


class Agreement:
    """The group in which the ranks agree; made by all of them at the same time."""

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        import torch.distributed as dist

        self._rank, self._world, self._timeout = rank, world, timeout
        self._about = [0] * len(_NAMES)
        self._closed = self._broken = False
        # Whether an all-reduce has begun that nothing is known of.
        self._under_way = False
        started = time.monotonic()
        try:
            self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._lost("its first iter()", started, error) from error

    def begin(self, plan: Plan) -> None:
        """Compare, from the next call on, with what epoch and order the other ranks are in."""
        self._about = [plan.seed >> 32, plan.seed & 0xFFFFFFFF, plan.epoch, plan.streams]

    def agree(self, *, has: bool = True, what: str = "the start of the epoch") -> bool:
        """Return whether every rank has an output; raises RankError, see the contract."""
        ended, failed = self._ask(not has, 0, what)
        if failed:
            text = self._tell_text("", what)
            raise RankError(
                f"rank {failed - 1} of {self._world} failed at {what}, so this epoch is over on all ranks: {text}",
                rank=failed - 1,
            )
        return not ended

    def tell(self, error: BaseException, what: str = "the start of the epoch") -> None:
        """Let the other ranks know that this one has failed; raises nothing of its own account."""
        try:
            _, failed = self._ask(True, self._rank + 1, what)
            own = failed == self._rank + 1
            self._tell_text(f"{type(error).__name__}: {_line(error)}" if own else "", what)
        except (RankError, RuntimeError):
            # The error that is told of is the one to be seen.
            return

    def _ask(self, ended: bool, failed: int, what: str) -> tuple[int, int]:
        import torch

        # The lowest of a number is the highest of its negative.
        numbers = torch.tensor([int(ended), failed, *self._about, *(-number for number in self._about)])
        self._highest(numbers, what)
        found: list[int] = numbers.tolist()
        count = len(self._about)
        highest, lowest = found[2 : 2 + count], [-number for number in found[2 + count :]]
        if not found[1]:
            for name, high, low in zip(_NAMES, highest, lowest, strict=True):
                if high != low:
                    raise RankError(
                        f"the ranks do not iterate the same epoch: the {name} is not the same on all of them"
                        + (f", but {low} to {high}" if name != "seed" else "")
                        + ". Call iter(loader), loader.seed() and load_state_dict() on all ranks alike, and leave the "
                        "loop at the same output"
                    )
        return found[0], found[1]

    def _tell_text(self, text: str, what: str) -> str:
        """Return the text of the rank that has one."""
        import torch

        content = text.encode(errors="replace")[:_TEXT]
        numbers = torch.tensor([*content, *bytes(_TEXT - len(content))], dtype=torch.uint8)
        self._highest(numbers, what)
        return bytes(numbers.tolist()).rstrip(b"\0").decode(errors="replace")

    def _highest(self, numbers: torch.Tensor, what: str) -> None:
        """Replace each number by the highest of all ranks."""
        import torch.distributed as dist

        if self._broken:
            raise RankError(
                "the ranks are no longer in step since one of them was lost or interrupted: make a new loader on all "
                "of them, which goes on from a state saved before"
            )
        started = time.monotonic()
        group = self._group
        # Until the answer is there: Ctrl-C comes anywhere.
        self._broken = self._under_way = True
        try:
            self._check_open()
            work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group, async_op=True)
            while not self._waited_for(work):
                self._check_open()
        except RuntimeError as error:
            self._check_open()
            self._under_way = False
            raise self._lost(what, started, error) from error
        self._broken = self._under_way = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loader was shut down while this iterator waited for the other ranks")

    @staticmethod
    def _waited_for(work: Any) -> bool:
        """Wait a while for the answer; return whether it is there, raise what gloo has against it."""
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if work.is_completed():
                work.wait()
                return True
            return False
        return True

    def _lost(self, what: str, started: float, error: RuntimeError) -> RankError:
        reason = str(error).strip().split("\n")[0]
        if time.monotonic() - started >= self._timeout:
            return RankTimeoutError(
                f"rank {self._rank} of {self._world} waited {self._timeout:g} s at {what} for the other ranks, and one "
                "of them did not come: it hangs, reads more slowly than that (give DistributedReadingService a larger "
                f"timeout=), or has left its loop earlier than this one ({reason})"
            )
        return RankError(
            f"rank {self._rank} of {self._world} lost another rank at {what}: it ended, or shut its loader down. The "
            f"first error in the logs of the other ranks says why ({reason})"
        )

    def close(self) -> None:
        """Destroy the group, see the contract."""
        import torch.distributed as dist

        self._closed = True
        group, self._group = self._group, None
        if group is None or self._under_way:
            return
        try:
            dist.destroy_process_group(group)
        except (AssertionError, RuntimeError, ValueError):
            # All groups were destroyed before.
            return


def _line(error: BaseException) -> str:
    """Return what an error says, as one line without secrets."""
    try:
        return mask(" ".join(str(error).split()))
    except Exception:
        return "its text cannot be had"
