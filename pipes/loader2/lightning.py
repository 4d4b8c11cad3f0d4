"""A loader for Lightning's Trainer, whose checkpoints ask for a state at moments of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from pipes.loader2.loader import DataLoader2
from pipes.loader2.ranks import of_all_ranks

__all__ = ["LightningLoader"]

T = TypeVar("T")


class LightningLoader(Generic[T]):
    """Give the outputs of `loader` to Lightning's Trainer, with a state that fits the batch the Trainer works on.

    Lightning takes one batch ahead from a loader without a length, and after the last batch of an epoch it asks for
    the state before it saw the end. So this takes one output ahead itself, and its state is that after the batch in
    work; after the last, that of the next epoch's start. Asks the loader for a state at every output. Lightning keeps
    the state of rank 0, so with several ranks it is the list of all their states, which all of them ask for at once.

    >>> from pipes.iter import IterableWrapper
    >>> loader = LightningLoader(DataLoader2(IterableWrapper(range(3))))
    >>> iterator = iter(loader)
    >>> [next(iterator), next(iterator), next(iterator)], loader.state_dict()["epoch"]
    ([0, 1, 2], 1)
    """

    def __init__(self, loader: DataLoader2[T]) -> None:
        self.loader = loader
        #: The states after the newest outputs given, as far back as the reader may be.
        self._states: deque[dict[str, Any]] = deque(maxlen=1)

    def __iter__(self) -> Iterator[T]:
        try:
            len(self.loader)
        except TypeError:
            ahead = 1
        else:
            ahead = 0
        outputs = iter(self.loader)
        states = self._states = deque([self.loader.state_dict()], maxlen=1 + ahead)
        return self._outputs(outputs, states)

    def _outputs(self, outputs: Iterator[T], states: deque[dict[str, Any]]) -> Iterator[T]:
        held: list[tuple[T, dict[str, Any]]] = []
        for following in outputs:
            for given, state in held:
                states.append(state)
                yield given
            held = [(following, self.loader.state_dict())]
        # The end was seen, so this is the state of the next epoch's start.
        end = self.loader.state_dict()
        for given, _ in held:
            states.append(end)
            yield given
        states.append(end)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> Any:
        """Return the loader's state after the batch that the reader works on, or the list of those of all ranks."""
        return of_all_ranks(lambda: self._states[0] if self._states else self.loader.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Go on, from the next `iter` on, where `state` was saved."""
        self._states.clear()
        self.loader.load_state_dict(state)
