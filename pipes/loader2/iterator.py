"""The iterator of one epoch of a DataLoader2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pipes.arguments import whole_or_none
from pipes.datapipe import IterDataPipe
from pipes.error_policy import StageCounts, tell
from pipes.errors import StaleIteratorError
from pipes.loader2.dealing import Dealer
from pipes.loader2.ownership import busy
from pipes.loader2.slot import Counts
from pipes.loader2.streams import Plan, StreamState

if TYPE_CHECKING:
    from pipes.loader2.loader import DataLoader2

__all__ = ["MOST_AHEAD", "NOTHING", "DataLoader2Iterator", "Runner", "RunnerAround"]

T = TypeVar("T")

#: What `Runner.next_ready` returns when `next` would have to wait.
NOTHING = object()
#: The most outputs that `Runner.states` can leave out.
MOST_AHEAD = 64


class Runner(Protocol):
    """What runs the graph: workers, this process, or a user's service."""

    @property
    def drew_above(self) -> str | None: ...
    @property
    def inherited(self) -> bool: ...
    @property
    def inner(self) -> Any: ...
    @property
    def batches(self) -> int: ...
    @property
    def counts(self) -> list[Counts]: ...
    def begin(self, plan: Plan, states: dict[int, StreamState], dealer: Dealer | None) -> None: ...
    def next(self) -> Any: ...
    def next_ready(self) -> Any: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def states(self, without: int = 0) -> dict[int, StreamState]: ...
    def stage_counts(self) -> dict[str, StageCounts]: ...
    def close(self) -> None: ...


class RunnerAround:
    """What a runner around another one leaves to that; it counts the outputs that it gives itself."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # Of what the runner gave: outputs given to the user, and those that earlier epochs dropped.
        self._given = self._dropped = 0

    @property
    def drew_above(self) -> str | None:
        """The stage above which users' draws from the global generators were seen."""
        return self._runner.drew_above

    @property
    def inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._runner.inherited

    @property
    def inner(self) -> Any:
        """What the loader's iterator forwards unknown attributes to."""
        return self._runner.inner

    @property
    def batches(self) -> int:
        """The outputs given to the user."""
        return self._given

    @property
    def counts(self) -> list[Counts]:
        """What each worker gave, also what the user was not given."""
        return self._runner.counts

    @property
    def _not_given(self) -> int:
        # By the runner's count: an output may have been on its way to the user when Ctrl-C came.
        return self._runner.batches - self._given - self._dropped

    def next_ready(self) -> Any:
        """Return NOTHING: nobody looks ahead of this."""
        return NOTHING

    def pause(self) -> None:
        """Pause the runner; what it gave ahead of the user stays for after `resume`."""
        self._runner.pause()

    def resume(self) -> None:
        """Let the runner go on."""
        self._runner.resume()

    def states(self, without: int = 0) -> dict[int, StreamState]:
        """Return where each stream stands after the last output given to the user."""
        return self._runner.states(self._not_given + without)

    def stage_counts(self) -> dict[str, StageCounts]:
        """Return what the stages have skipped in this epoch."""
        return self._runner.stage_counts()


class DataLoader2Iterator(Iterator[T], Generic[T]):
    """Gives the outputs of one epoch; made by `iter(loader)`.

    After an error the epoch is over, and asking for more says so; a newer `iter(loader)` takes over, and asking the
    older iterator says so too. Neither ends silently.
    """

    def __init__(self, loader: DataLoader2[T], runner: Runner) -> None:
        # None after an error: the traceback, which notebooks keep, must not keep the loader and its workers.
        self._loader: DataLoader2[T] | None = loader
        self._runner = runner
        # What the runner has given when this iterator has given what it has.
        self._given = runner.batches
        self.ended = self._paused = False
        # Whether a thread is inside `__next__`.
        self._inside = False
        self._limit: int | None = None
        self._left: int | None = None
        self._over: BaseException | None = None

    def __next__(self) -> T:
        if self._over is not None:
            raise self._over
        if self._inside and not self._runner.inherited:
            raise busy()
        if self.ended or self._paused:
            raise StopIteration
        if self._left is not None:
            if self._left == 0:
                self.pause()
                raise StopIteration
            self._left -= 1
        assert self._loader is not None
        self._loader._advanced = True
        try:
            self._inside = True
            output: T = self._runner.next()
        except StopIteration:
            # Another thread may have shut the loader down meanwhile: that is no end of the epoch.
            self._check()
            self.ended = True
            tell(self._runner.stage_counts())
            self._loader._epoch_ended()
            raise
        except BaseException as error:
            # Ctrl-C comes at any moment, also between the runner's count and this one.
            self._loader._not_given = self._runner.batches - self._given
            self._loader = None
            failed = RuntimeError(
                f"this iterator failed with {type(error).__name__} and gives no more; iter(loader) begins the next "
                "epoch, and state_dict() tells where it stood before the error"
            )
            failed.__cause__ = error
            self._over = failed
            raise
        finally:
            self._inside = False
        self._given += 1
        return output

    @property
    def paused(self) -> bool:
        """Whether `next` ends, until `resume`, because of `pause` or `limit`."""
        return self._paused

    def pause(self) -> None:
        """End the iteration until `resume` goes on in the same epoch; the workers finish what they make and rest.

        A loader's state saved meanwhile is that after the last output given, as always. `iter(loader)` begins the next
        epoch instead.
        """
        self._check()
        if not self._paused and not self.ended:
            self._paused = True
            self._runner.pause()

    def resume(self) -> None:
        """Go on after `pause`, or with the next outputs after `limit`, in the same epoch."""
        self._check()
        self._left = self._limit
        if self._paused:
            self._paused = False
            self._runner.resume()

    def limit(self, num_batches: int | None) -> None:
        """Pause after `num_batches` further outputs, and after as many again at each `resume`; None ends that.

        Asking for one more raises StopIteration and pauses. Raises ValueError for a number below 1.
        """
        self._check()
        num_batches = whole_or_none("num_batches", num_batches)
        if num_batches is not None and num_batches < 1:
            raise ValueError(f"limit takes a number of outputs of at least 1, or None, not {num_batches}")
        self._limit = self._left = num_batches

    def _check(self) -> None:
        if self._over is not None:
            raise self._over

    def __getattr__(self, name: str) -> Any:
        # As in torchdata: what an iterator of the graph, or of a service's own object, has beyond these methods.
        if not name.startswith("_"):
            inner = self._runner.inner
            if not (isinstance(inner, IterDataPipe) and hasattr(IterDataPipe, name)):
                return getattr(inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def replace(self, why: str) -> None:
        """Make every further use say that the iterator is no longer valid."""
        self._over = StaleIteratorError(f"this iterator of the loader is no longer valid: {why}")
