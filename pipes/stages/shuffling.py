"""A shuffle through a buffer, with a state of two counts and one anchor: `.shuffle`; one inside batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from pipes.arguments import whole
from pipes.context import Context
from pipes.datapipe import DataChunk, IterDataPipe, Shard, functional_datapipe, length_of
from pipes.errors import StateError
from pipes.run import Run
from pipes.seeds import Draws, KeyedGenerator
from pipes.stages.batching import UnBatcher
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, Ticks, damaged

__all__ = ["InBatchShuffler", "Reseeded", "Reshuffled", "Shuffler"]

T = TypeVar("T")

_LEAST_BLOCK = 64
# An element stays in a buffer of B for more than 40 B further inputs once in e**40 times; then the first anchor serves.
_KEPT_ANCHORS = 40


def held_inputs(draws: Draws, buffer_size: int, taken: int, given: int) -> list[int]:
    """Return, slot by slot, the numbers of the inputs that a shuffle holds after `taken` inputs and `given` outputs.

    While inputs last, output g leaves slot `draw(g)` and input `buffer_size + g` moves in, so the holder of a slot
    is found by walking the draws backwards to the last one that hit it. After that, outputs leave a shrinking list.
    """
    size = min(buffer_size, taken)
    swaps = taken - size
    slots: npt.NDArray[np.int64] = np.full(size, -1, dtype=np.int64)
    end = swaps
    block = max(4 * size, 1024)
    while end > 0 and (slots < 0).any():
        start = max(0, end - block)
        draws.seek(start)
        hit = draws.integers(size, end - start)
        found = np.full(size, -1, dtype=np.int64)
        found[hit] = np.arange(start, end) + size
        slots = np.where(slots < 0, found, slots)
        end = start
    held: list[int] = np.where(slots < 0, np.arange(size), slots).tolist()
    left = given - swaps
    draws.seek(swaps)
    for slot in draws.below(np.arange(size, size - left, -1), left):
        last = held.pop()
        if slot < len(held):
            held[slot] = last
    return held


class _ShufflerRun(Run):
    """Draw number g decides output g; the anchors lie one buffer length (at least 64 inputs) apart."""

    anchored = True
    count_fields = ("taken", "given")

    def check(self, position: Position) -> None:
        super().check(position)
        taken, given, size = position["taken"], position["given"], self.pipe.buffer_size
        if given > taken or taken - given > size or position["anchor"]["taken"] > taken:
            raise damaged(f"the counts of stage {self.stage} contradict each other")
        self.held = held_inputs(self.draws(), size, taken, given)
        if min(self.held, default=taken) < position["anchor"]["taken"]:
            raise damaged(f"the anchor of stage {self.stage} is too young")

    def restore(self, position: Position) -> None:
        self.size: int = self.pipe.buffer_size
        self.anchors = Anchors(self.upstream, _KEPT_ANCHORS)
        self.buffer: list[Any] = []
        self.ticks = Ticks(0)
        # The number of inputs taken where it does not follow from the outputs: at the start, and after the input's end.
        self.fixed: int | None = 0
        if position is None:
            self.anchors.note(0)
            return
        taken, given, anchor = position["taken"], position["given"], position["anchor"]["taken"]
        held = self.held
        order = sorted(range(len(held)), key=held.__getitem__)
        self.anchors.note(anchor)
        elements = self.inputs[0].replay(taken - anchor, [held[slot] - anchor for slot in order])
        self.buffer = [None] * len(held)
        for slot, element in zip(order, elements, strict=True):
            self.buffer[slot] = element
        self.ticks = Ticks(given)
        self.fixed = None if given and len(held) == self.size else taken

    def elements(self) -> Iterator[Any]:
        buffer, size, source = self.buffer, self.size, iter(self.inputs[0])
        draws = self.draws(self.ticks.count)
        if not self.fixed:
            buffer.extend(islice(source, size - len(buffer)))
            self.fixed = None if len(buffer) == size else len(buffer)
        else:
            self._check_end(source)
        if self.fixed is None:
            length, ticks = max(size, _LEAST_BLOCK), self.ticks
            while True:
                start = ticks.count
                self.anchors.note(start + size)
                for slot, element, _ in zip(draws.below(size, length), source, ticks, strict=False):
                    chosen = buffer[slot]
                    buffer[slot] = element
                    yield chosen
                if ticks.count - start < length:
                    break
            self.fixed = ticks.count + size
        yield from self._drain()

    def _check_end(self, source: Iterator[Any]) -> None:
        """Go to the end of the input of a run that was restored beyond it: what is skipped there counts, too."""
        for _ in source:
            raise StateError(
                f"stage {self.stage} has more elements than when the state was saved (after {self.fixed}); the data "
                "changed: resume with the data the state was made from, or start afresh"
            )

    def _drain(self) -> Iterator[Any]:
        buffer = self.buffer
        bounds = np.arange(len(buffer), 0, -1)
        slots = self.draws(self.ticks.count).below(bounds, len(bounds))
        for slot, _ in zip(slots, self.ticks, strict=False):
            chosen = last = buffer.pop()
            if slot < len(buffer):
                chosen, buffer[slot] = buffer[slot], last
            yield chosen

    def capture(self) -> Capture:
        given = self.ticks.count
        return given + self.size if self.fixed is None else self.fixed, given, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, given, entries = captured
        held = held_inputs(self.draws(), self.size, taken, given)
        return {
            "taken": taken,
            "given": given,
            "anchor": self.anchors.describe(entries, min(held, default=taken)),
        }


class _InOrderRun(Run):
    """A shuffle that was switched off."""

    def elements(self) -> Iterator[Any]:
        return iter(self.inputs[0])

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        return self.inputs[0].replay(count, wanted)


class Reseeded:
    """A stage with draws of its own, to which a seed can be given."""

    _seed: int | None = None
    _seed_epoch: int | None

    def set_seed(self, seed: int) -> Self:
        """Use `seed` for this stage, from its next iteration on as epoch 0; returns the pipe."""
        self._seed, self._seed_epoch = whole("seed", seed), None
        return self


class Reshuffled(Reseeded):
    """The switches that every stage with a random order of its own has."""

    _enabled = True

    def set_shuffle(self, shuffle: bool = True) -> Self:
        """Switch the shuffle on or off (then elements pass in order); returns the pipe."""
        self._enabled = shuffle
        return self


@functional_datapipe("shuffle")
class Shuffler(Reshuffled, IterDataPipe[T]):
    """Shuffle through a buffer of `buffer_size` elements: each new one takes the place of a random one, which is given.

    The order is a function of (seed, epoch, stage, stream) alone, so a resume draws the same numbers without replaying
    them. No element is given more than `buffer_size` places early. `unbatch_level` opens batches first, as `.unbatch`.
    Raises AssertionError for a buffer_size below 1.

    >>> from pipes.iter import IterableWrapper
    >>> pipe = IterableWrapper(range(8)).shuffle(4).set_seed(1)
    >>> first = list(pipe)
    >>> sorted(first) == list(range(8)), list(pipe.set_seed(1)) == first
    (True, True)
    """

    _levels = 2

    def __init__(self, datapipe: IterDataPipe[T], buffer_size: int = 10000, unbatch_level: int = 0) -> None:
        buffer_size, unbatch_level = whole("buffer_size", buffer_size), whole("unbatch_level", unbatch_level)
        assert buffer_size > 0, f"buffer_size must be at least 1, not {buffer_size}"
        source = as_pipe(datapipe)
        self.datapipe = source if unbatch_level == 0 else UnBatcher(source, unbatch_level)
        self.buffer_size = buffer_size
        self.unbatch_level = unbatch_level
        self._made_above = unbatch_level != 0

    def _make_run(self, context: Context, stage: str) -> Run:
        return _ShufflerRun(self, context, stage) if self._enabled else _InOrderRun(self, context, stage)

    def _length(self, shard: Shard) -> int:
        return length_of(self.datapipe, shard)


class _InBatchRun(Run):
    """The order inside a batch follows from the batch's number."""

    stateful = True
    count_fields = ("taken",)

    def restore(self, position: Position) -> None:
        self.ticks = Ticks(0 if position is None else position["taken"])
        self.generators = KeyedGenerator(self.context.key(self.stage, self.pipe))

    def elements(self) -> Iterator[Any]:
        for batch, number in zip(self.inputs[0], self.ticks, strict=False):
            yield self._mixed(batch, number)

    def _mixed(self, batch: Any, number: int) -> DataChunk[Any]:
        try:
            elements = list(batch)
        except BaseException as error:
            self.note(error, batch)
            raise
        draws = self.generators.at(number).bit_generator.random_raw(len(elements))
        return DataChunk([elements[place] for place in np.argsort(draws, kind="stable")])

    def capture(self) -> Capture:
        return self.ticks.count

    def describe(self, captured: Capture) -> Position:
        return {"taken": captured}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        start = self.ticks.count
        batches = self.inputs[0].replay(count, wanted)
        self.ticks = Ticks(start + count)
        return [self._mixed(batch, start + offset) for batch, offset in zip(batches, wanted, strict=True)]


@functional_datapipe("in_batch_shuffle")
class InBatchShuffler(Reshuffled, IterDataPipe[DataChunk[T]]):
    """Shuffle the elements inside each batch, and leave the batches in their order.

    The order is a function of (seed, epoch, stage, stream, number of the batch) alone.

    >>> from pipes.iter import IterableWrapper
    >>> batches = list(IterableWrapper(range(6)).batch(3).in_batch_shuffle())
    >>> [sorted(batch) for batch in batches]
    [[0, 1, 2], [3, 4, 5]]
    """

    _levels = 2

    def __init__(self, datapipe: IterDataPipe[Any]) -> None:
        self.datapipe = as_pipe(datapipe)

    def _make_run(self, context: Context, stage: str) -> Run:
        return _InBatchRun(self, context, stage) if self._enabled else _InOrderRun(self, context, stage)

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        return length_of(self.datapipe, shard)
