"""How a user's own pipe class, written as a plain `__iter__`, takes part in a run.

Three kinds, by what the class says of itself:
- `state_dict()` and `load_state_dict(state)`: its state is saved beside that of what is upstream;
- `stateless = True`: it passes each element on before it takes the next, so what is upstream says it all;
- neither: a restore replays it from the start of the epoch, and a warning names it once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

from pipes.errors import StateError
from pipes.iteration import await_user
from pipes.run import Context, Run
from pipes.state import Capture, Position, Table, Ticks, count_from

__all__ = ["UserRun"]

_warned: set[type] = set()


class UserRun(Run):
    """Runs the `__iter__` that a user wrote."""

    def __init__(self, pipe: Any, context: Context, stage: str) -> None:
        super().__init__(pipe, context, stage)
        self.remembers = callable(getattr(type(pipe), "state_dict", None)) and callable(
            getattr(type(pipe), "load_state_dict", None)
        )
        self.replays = not self.remembers and not pipe.stateless
        self.ticks = Ticks()
        self.skip = 0
        self.saved: Any = None

    def open(self, position: Position, table: Table | None) -> None:
        if self.replays:
            table = None
        self.inputs = [self.context.open(pipe, table) for pipe in self.input_pipes()]
        for run in self.inputs:
            await_user(self.context, run.pipe, run)
        self.link()
        if self.replays:
            self.segment = (self,)
        elif self.remembers:
            self.segment = (*self.upstream, self)
        self.restore(position)

    def restore(self, position: Position) -> None:
        if position is None:
            return
        if self.remembers:
            self.saved = position
        elif self.replays:
            self.skip = count_from(position, "given", self.stage)

    def elements(self) -> Iterator[Any]:
        pipe = self.pipe
        try:
            reset = getattr(type(pipe), "reset", None)
            if callable(reset):
                reset(pipe)
            if self.saved is not None:
                pipe.load_state_dict(self.saved)
            source = iter(type(pipe)._own_iter(pipe))
            if self.skip:
                skip, self.skip = self.skip, 0
                for _ in zip(range(skip), source, strict=False):
                    pass
                self.ticks = Ticks(skip)
            for element, _ in zip(source, self.ticks, strict=False):
                yield element
        except Exception as error:
            self.note(error)
            raise

    def capture(self) -> Capture:
        if self.remembers:
            state = self.pipe.state_dict()
            try:
                return json.dumps(state)
            except (TypeError, ValueError) as error:
                raise StateError(f"state_dict() of stage {self.stage} is not JSON data: {error}") from error
        return self.skip or self.ticks.count

    def describe(self, captured: Capture) -> Position:
        if self.remembers:
            return json.loads(captured)
        if type(self.pipe) not in _warned:
            _warned.add(type(self.pipe))
            warnings.warn(
                f"stage {self.stage} has no state of its own, so a resume replays it from the start of the epoch; give "
                f"{type(self.pipe).__name__} state_dict() and load_state_dict(), or set `stateless = True` on it when it "
                "passes each element on before it takes the next",
                stacklevel=2,
            )
        return {"given": captured}
