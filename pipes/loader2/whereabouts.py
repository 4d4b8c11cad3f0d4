"""What a worker is doing, on a page of memory that it shares with main and that outlives it.

Contract
- The worker writes where it is as it goes: a few words of memory an output, no system call. Main may read at any time;
  what it reads of a worker that was killed in the middle of a write may be that of the moment before, or garbled.
- After a death the next process traces the output that the last one died at: it notes each stage that is asked for an
  element and each element that a stage gets, just before. Other outputs, and all outputs of other workers, run without.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pipes.context import Context
from pipes.errors import brief
from pipes.loader2.ledger import LEDGER_BYTES, Ledger
from pipes.loader2.segments import create_segment, map_segment
from pipes.run import Node, Run, inputs_of

__all__ = ["Page", "Phase", "Place", "TracedContext", "Tracing", "Whereabouts"]

_SIZE = 4096
# phase, stream, output, length of the stage's name, length of the element's text; then both texts
_HEAD = struct.Struct("qqqII")
_LENGTHS, _LENGTHS_AT = struct.Struct("II"), struct.calcsize("qqq")
_LONGEST = 1000

Note = Callable[..., None]
#: A stream, and the number of one of its outputs.
Place = tuple[int, int]


class Phase(IntEnum):
    """What a worker can be busy with."""

    STARTING = 0
    UNPICKLING = 1
    INIT_FN = 2
    WAITING = 3
    RESET_FN = 4
    OUTPUT = 5
    SENDING = 6


_WORDS = {
    Phase.STARTING: "starting",
    Phase.UNPICKLING: "unpickling the graph",
    Phase.INIT_FN: "in worker_init_fn",
    Phase.WAITING: "waiting for main",
    Phase.RESET_FN: "in worker_reset_fn",
    Phase.OUTPUT: "making output {output} of stream {stream}",
    Phase.SENDING: "sending output {output} of stream {stream}",
}


@dataclass(frozen=True)
class Whereabouts:
    """Where a worker is: outputs are counted from 0; stage and element are "" where they are not known.

    >>> str(Whereabouts(Phase.OUTPUT, 2, 7, "1:Mapper", "'a.jpg'"))
    "making output 7 of stream 2, in stage 1:Mapper, on element 'a.jpg'"
    """

    phase: Phase
    stream: int = -1
    output: int = -1
    stage: str = ""
    element: str = ""

    @property
    def place(self) -> Place | None:
        """The stream and output that are made, if any."""
        return (self.stream, self.output) if self.phase == Phase.OUTPUT else None

    def __str__(self) -> str:
        text = _WORDS[self.phase].format(output=self.output, stream=self.stream)
        if self.stage:
            text += f", in stage {self.stage}"
        return f"{text}, on element {self.element}" if self.element else text


class Page:
    """The page; `descriptor` is closed when it is mapped.

    >>> page = Page(create_segment(4096))
    >>> page.move(Phase.OUTPUT, 0, 3)
    >>> page.note("2:Mapper", {"name": "cat"})
    >>> str(page.read())
    "making output 3 of stream 0, in stage 2:Mapper, on element {'name': 'cat'}"
    """

    def __init__(self, descriptor: int) -> None:
        try:
            memory = memoryview(map_segment(descriptor, _SIZE)).cast("B")
        finally:
            os.close(descriptor)
        self._memory = memory[: _SIZE - LEDGER_BYTES]
        #: What the worker may do, on the other half of the page.
        self.ledger = Ledger(memory[_SIZE - LEDGER_BYTES :])

    @classmethod
    def create(cls) -> tuple[Page, int]:
        """Return a new page and a descriptor of it for the worker."""
        descriptor = create_segment(_SIZE)
        try:
            return cls(os.dup(descriptor)), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def move(self, phase: Phase, stream: int = -1, output: int = -1) -> None:
        """Say what the worker does from now on."""
        _HEAD.pack_into(self._memory, 0, phase, stream, output, 0, 0)

    def note(self, stage: str, *element: Any) -> None:
        """Say which stage runs from now on, and on which element."""
        name = stage.encode()[:_LONGEST]
        text = brief(element[0]).encode(errors="replace")[:_LONGEST] if element else b""
        _LENGTHS.pack_into(self._memory, _LENGTHS_AT, 0, 0)
        self._memory[_HEAD.size : _HEAD.size + len(name) + len(text)] = name + text
        _LENGTHS.pack_into(self._memory, _LENGTHS_AT, len(name), len(text))

    def read(self) -> Whereabouts:
        """Return where the worker is, or was when it ended."""
        phase, stream, output, stage, element = _HEAD.unpack_from(self._memory)
        text = bytes(self._memory[_HEAD.size : _HEAD.size + stage + element])
        names = text[:stage].decode(errors="replace"), text[stage:].decode(errors="replace")
        return Whereabouts(Phase(phase), stream, output, *names)


class Tracing:
    """Notes what the stages of one stream get, until it is told to stop."""

    def __init__(self, page: Page) -> None:
        self.on = True
        self._page = page

    def trace(self, run: Run, reader: str) -> None:
        """Note what `run` is asked for and what it gives, to the stage named `reader`, from its first element on."""
        elements, replay = run.elements, run.replay

        def replayed(count: int, wanted: Sequence[int]) -> list[Any]:
            self._note(run.stage)
            return _Noted(replay(count, wanted), lambda element: self._note(reader, element))

        run.elements = lambda: self._noted(elements(), run.stage, reader)  # type: ignore[method-assign]
        run.replay = replayed  # type: ignore[method-assign]

    def _note(self, stage: str, *element: Any) -> None:
        if self.on:
            self._page.note(stage, *element)

    def _noted(self, elements: Iterator[Any], stage: str, reader: str) -> Iterator[Any]:
        try:
            self._note(stage)
            for element in elements:
                self._note(reader, element)
                yield element
                if not self.on:
                    yield from elements
                    return
                self._note(stage)
        finally:
            close = getattr(elements, "close", None)
            if close is not None:
                close()


class _Noted(list[Any]):
    """Elements that are noted one by one as a stage goes through them."""

    def __init__(self, elements: list[Any], note: Note) -> None:
        super().__init__(elements)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            self._note(element)
            yield element


class TracedContext(Context):
    """A context whose stages are traced."""

    one_by_one = True

    def __init__(self, tracing: Tracing, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tracing = tracing

    def _new_run(self, pipe: Node) -> Run:
        run = super()._new_run(pipe)
        readers = [self.names[id(node)] for node in self.nodes if any(source is pipe for source in inputs_of(node))]
        self._tracing.trace(run, " or ".join(readers) or "the end of the graph")
        return run
