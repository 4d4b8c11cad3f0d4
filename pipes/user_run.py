"""How a user's own pipe class, written as a plain `__iter__`, takes part in a run.

Three kinds, by what the class says of itself:
- `state_dict()` and `load_state_dict(state)`: its state is saved beside that of what it reads;
- `stateless = True`: it passes each element on before it takes the next, so what it reads says it all;
- neither: a restore replays it from the start of the epoch, and a warning names it once. Numbers that it keeps on
  itself (a count of epochs, as a seed) are set to what they were then, and `as_built` says what else is kept.

While its `__iter__` runs, `iter()` of a pipe that it reads joins the running graph. A second `iter()` of the same pipe
within the epoch is a new round: shuffles in it draw anew. `super().__iter__()` in a subclass of a built-in stage runs
that stage. A graph that is built inside `__iter__` runs too, but nobody can save where it stands.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipes.as_built import as_built, check_numbers
from pipes.context import Context
from pipes.errors import StateError
from pipes.iteration import expect, stop_expecting
from pipes.run import Node, Run, inputs_of, walk
from pipes.state import Capture, Position, Table, Ticks, count_from, damaged

__all__ = ["UserRun"]

_SUPER = "super"
_warned: set[type] = set()


class _Slot:
    """The latest round of a pipe that the user's stage reads."""

    __slots__ = ("claimed", "round", "run")

    def __init__(self, round_: int, run: Run) -> None:
        self.round, self.run, self.claimed = round_, run, False


def _by_next(pipe: Any) -> Iterator[Any]:
    """Iterate a pipe whose `__iter__` returned the pipe itself."""
    while True:
        try:
            element = pipe.__next__()
        except StopIteration:
            return
        yield element


class UserRun(Run):
    """Runs the `__iter__` that a user wrote."""

    def __init__(self, pipe: Any, context: Context, stage: str) -> None:
        super().__init__(pipe, context, stage)
        cls = type(pipe)
        self.remembers = cls._remembers()
        self.replays = cls._is_replayed(pipe)
        self.sources = {str(place): source for place, source in enumerate(inputs_of(pipe))}
        self.maker = cls._stage_maker
        if self.maker is not None:
            self.sources[_SUPER] = pipe
        self.slots: dict[str, _Slot] = {}
        self.ticks = Ticks()
        self.skip = 0
        # What `_changed` gave at the start of the epoch.
        self.numbers: dict[str, Any] = {}
        self.saved: str | None = None
        self.started = self.ended = False
        # How many iterators of each source are open, and how many graphs the user's code built so far.
        self.reading = dict.fromkeys(self.sources, 0)
        self.nested = 0
        self.thread = 0

    def input_pipes(self) -> Sequence[Node]:
        return ()

    def open(self, position: Position, table: Table | None) -> None:
        self.segment = (self,)
        if position is not None:
            self.check(position)
        fresh, position = position is None, position or {}
        self.ended = position.get("ended", False)
        saved = position.get("sources", {})
        # What another source reads is opened for that one, and once more only when the user asks for it, too.
        read = {id(node) for source in self.sources.values() for node in walk(source)[:-1]}
        for name, source in sorted(self.sources.items(), key=lambda each: id(each[1]) in read):
            if name in saved:
                self._open(name, saved[name].get("again", 0), saved[name]["table"])
            # Whether a subclass of a built-in stage reads its source or asks its base to do so shows later.
            elif _SUPER not in self.sources and type(source)._iterable and id(source) not in read:
                self._open(name, 0, None)
        if self.replays and not self.ended:
            self.skip = position.get("given", 0)
            self.numbers = as_built(self.pipe).numbers(self.pipe) if fresh else position.get("numbers", {})
        if "state" in position:
            self.saved = json.dumps(position["state"])

    def check(self, position: Position) -> None:
        if not isinstance(position, dict) or not isinstance(position.get("ended", False), bool):
            raise damaged(f"stage {self.stage} does not say where it stands")
        if self.replays and not position.get("ended", False):
            count_from(position, "given", self.stage)
            check_numbers(self.pipe, position.get("numbers", {}), self.stage)
            return
        sources = position.get("sources")
        if not isinstance(sources, dict):
            raise damaged(f"stage {self.stage} does not say where its sources stand")
        for name, entry in sources.items():
            if name not in self.sources or not isinstance(entry, dict) or not isinstance(entry.get("table"), dict):
                raise damaged(f"stage {self.stage} has no source {name!r}")
            if "again" in entry:
                count_from(entry, "again", self.stage)

    def check_upstream(self, position: Position) -> None:
        for name, entry in position.get("sources", {}).items():
            with self._asked(name, entry.get("again", 0)) as run:
                run.check_table(entry["table"], f"source {name} of {self.stage}")

    def _open(self, name: str, round_: int, table: Table | None) -> _Slot:
        """Open round `round_` of a source; the first stands in the context itself, the others in one of their own."""
        pipe = self.sources[name]
        slot = self.slots[name] = _Slot(round_, self._run_of(name, pipe, round_, table))
        self.inputs = [each.run for each in self.slots.values()]
        return slot

    def _run_of(self, name: str, pipe: Node, round_: int, table: Table | None) -> Run:
        context = self.context
        fresh = round_ == 0 and (name == _SUPER or not self._is_read(pipe))
        if name != _SUPER:
            return context.open(pipe, table) if fresh else context.again(pipe, round_).start(table)
        if not fresh or any(id(source) in context.runs for source in inputs_of(pipe)):
            context = context.again(pipe, round_)
            context.table = table
        run: Run = self.maker(pipe, context, f"{self.stage}+super")
        context.at_close.append(run.close)
        return context.open_run(pipe, run, table)

    def _is_read(self, pipe: Node) -> bool:
        """Return whether the context has a run of `pipe`, or of what it reads, which it may not share."""
        pending, seen = [pipe], set[int]()
        while pending:
            node = pending.pop()
            if id(node) not in seen and not type(node)._shared:
                seen.add(id(node))
                pending += inputs_of(node)
        return not seen.isdisjoint(self.context.runs)

    def executing(self) -> bool:
        """Return whether the user's code is running now, in this thread or another."""
        return bool(getattr(self._iterator, "gi_running", False))

    def claim(self, pipe: Node) -> Iterator[Any] | None:
        """Return the iterator for `iter(pipe)`, or None if this stage is not the one that asks."""
        name = next((name for name, source in self.sources.items() if source is pipe), None)
        if name is None:
            return None
        slot = self.slots.get(name)
        if not self.executing() and (self.thread == threading.get_ident() or (slot is not None and slot.claimed)):
            return None
        if slot is None:
            slot = self._open(name, 0, None)
        elif slot.claimed:
            slot = self._open(name, slot.round + 1, None)
        slot.claimed = True
        return self._read(name, slot.run)

    def _read(self, name: str, run: Run) -> Iterator[Any]:
        self.reading[name] += 1
        try:
            yield from run
        finally:
            self.reading[name] -= 1

    def nest(self, pipe: Node) -> Iterator[Any]:
        """Return the iterator for `iter(pipe)` where the graph of `pipe` was built by the user's code while it ran."""
        child = self.context.nested(pipe, self, self.nested)
        self.nested += 1
        return self._read_nested(child, child.start())

    def _read_nested(self, child: Context, run: Run) -> Iterator[Any]:
        try:
            yield from run
        finally:
            self.context.leave(child)

    def elements(self) -> Iterator[Any]:
        if self.ended:
            return
        self.thread = threading.get_ident()
        self.started = True
        expect(self)
        source: Iterator[Any] = iter(())
        try:
            source = self.begun(self._own, self.pipe)
            if self.skip:
                skip, self.skip = self.skip, 0
                for _ in zip(range(skip), source, strict=False):
                    pass
                self.ticks = Ticks(skip)
            for element, _ in zip(source, self.ticks, strict=False):
                yield element
            self.ended = True
        except GeneratorExit:
            raise
        except BaseException as error:
            self.note_once(error)
            raise
        finally:
            stop_expecting(self)
            if isinstance(source, Generator):
                source.close()

    def _own(self) -> Iterator[Any]:
        """Begin what the user wrote."""
        pipe = self.pipe
        if self.replays:
            as_built(pipe).set_numbers(pipe, self.numbers)
        reset = getattr(type(pipe), "reset", None)
        if callable(reset):
            reset(pipe)
        if self.saved is not None:
            self._load_own(json.loads(self.saved))
        iterator = type(pipe)._own_iter(pipe)
        return _by_next(pipe) if iterator is pipe else iter(iterator)

    def _load_own(self, state: Any) -> None:
        try:
            self.pipe.load_state_dict(state)
        except Exception as error:
            raise StateError(
                f"load_state_dict() of stage {self.stage} failed: {type(error).__name__}: {error}"
            ) from error

    def capture(self) -> Capture:
        if self.replays and not self.ended:
            return self.skip or self.ticks.count, False, self.numbers, ()
        if not self.ended:
            self._check_known()
        sources = tuple([(name, slot.round, slot.run.captures()) for name, slot in self.slots.items()])
        return 0, self.ended, self._own_state() if self.remembers and not self.ended else None, sources

    def _check_known(self) -> None:
        """Refuse to say where the stage stands when what it has done does not fit what its class says of itself."""
        if self.nested:
            raise StateError(
                f"stage {self.stage} iterates a pipe that its __iter__ builds, so nobody knows where that stands; "
                "build it in __init__ and keep it as an attribute, or give up `stateless` and state_dict()"
            )
        for name, slot in self.slots.items():
            if self.reading[name] > 1 or (slot.round and not self.remembers):
                why = (
                    "which state_dict() cannot tell while both are open" if self.remembers else "so it is not stateless"
                )
                raise StateError(
                    f"stage {self.stage} iterates {type(self.sources[name]).__name__} more than once within an "
                    f"epoch, {why}"
                )

    def _own_state(self) -> str | None:
        """Return state_dict() as JSON text; before the first element, what was loaded last (None: nothing)."""
        if not self.started:
            return self.saved
        try:
            return json.dumps(self.pipe.state_dict(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise StateError(f"state_dict() of stage {self.stage} is not JSON data: {error}") from error

    def describe(self, captured: Capture) -> Position:
        given, ended, state, sources = captured
        if self.replays and not ended:
            self._warn()
            return {"given": given, "numbers": state} if state else {"given": given}
        position: dict[str, Position] = {"ended": True} if ended else {}
        if state is not None:
            position["state"] = json.loads(state)
        position["sources"] = {name: self._described(name, round_, each) for name, round_, each in sources}
        return position

    def _described(self, name: str, round_: int, captures: Any) -> Position:
        with self._asked(name, round_) as run:
            table = run.table(captures)
        return {"again": round_, "table": table} if round_ else {"table": table}

    @contextmanager
    def _asked(self, name: str, round_: int) -> Iterator[Run]:
        """Give a run of that round of a source, to ask it about positions: the one that is open, or another."""
        slot = self.slots.get(name)
        if slot is not None and slot.round == round_:
            yield slot.run
            return
        context = self.context.again(self.context.last)
        try:
            yield UserRun(self.pipe, context, self.stage)._run_of(name, self.sources[name], round_, None)
        finally:
            self.context.leave(context)

    def _warn(self) -> None:
        if type(self.pipe) not in _warned:
            _warned.add(type(self.pipe))
            warnings.warn(
                f"stage {self.stage} has no state of its own, so a resume replays it from the start of the epoch, as "
                "it was built but for the numbers that it keeps on itself; give "
                f"{type(self.pipe).__name__} state_dict() and load_state_dict(), or set `stateless = True` on it "
                "when it passes each element on before it takes the next",
                stacklevel=2,
            )
