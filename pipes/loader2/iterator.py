"""The iterator of one epoch of a DataLoader2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pipes.errors import StaleIteratorError
from pipes.loader2.dealing import Dealer
from pipes.loader2.streams import Plan, StreamState

if TYPE_CHECKING:
    from pipes.loader2.loader import DataLoader2

__all__ = ["DataLoader2Iterator", "Runner"]

T = TypeVar("T")


class Runner(Protocol):
    """What runs the graph: workers, this process, or a user's service."""

    waited: float
    batches: int
    nbytes: int
    restarts: int

    @property
    def drew_above(self) -> str | None: ...
    @property
    def copied(self) -> int: ...
    @property
    def pids(self) -> list[int]: ...
    def begin(self, plan: Plan, states: dict[int, StreamState], dealer: Dealer | None) -> None: ...
    def next(self) -> Any: ...
    def states(self) -> dict[int, StreamState]: ...
    def close(self) -> None: ...


class DataLoader2Iterator(Iterator[T], Generic[T]):
    """Gives the outputs of one epoch; made by `iter(loader)`.

    After an error the epoch is over, and asking for more says so; a newer `iter(loader)` takes over, and asking the
    older iterator says so too. Neither ends silently.
    """

    def __init__(self, loader: DataLoader2[T], runner: Runner) -> None:
        # None after an error: the traceback, which notebooks keep, must not keep the loader and its workers.
        self._loader: DataLoader2[T] | None = loader
        self._runner = runner
        self.ended = False
        self._over: BaseException | None = None

    def __next__(self) -> T:
        if self._over is not None:
            raise self._over
        if self.ended:
            raise StopIteration
        assert self._loader is not None
        self._loader._advanced = True
        try:
            output: T = self._runner.next()
        except StopIteration:
            self.ended = True
            self._loader._epoch_ended()
            raise
        except BaseException as error:
            self._loader = None
            failed = RuntimeError(
                f"this iterator failed with {type(error).__name__} and gives no more; iter(loader) begins the next "
                "epoch, and state_dict() tells where it stood before the error"
            )
            failed.__cause__ = error
            self._over = failed
            raise
        return output

    def replace(self, why: str) -> None:
        """Make every further use say that the iterator is no longer valid."""
        self._over = StaleIteratorError(f"this iterator of the loader is no longer valid: {why}")
