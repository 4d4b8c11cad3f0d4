"""One element in, one out, by several threads: `.threadpool_map`.

Contract
- Order: outputs come in the order of their inputs, whichever call ends first.
- Bound: at most `scheduled_tasks` inputs are taken and not yet given, finished or not. Inputs are taken, and `on_error`
  is called, in the thread that iterates; only `fn` (and `initializer`) run in the pool's threads.
- Failure: what `fn` raises comes at its element's place, after all outputs before it, with the stage's note; what a
  stage above raises comes after the outputs of what it gave before. Ctrl-C comes at once.
- Stop: the threads begin with the first output that is asked for, in the process that asks. However an iteration ends
  (end, error, `close`), calls not begun are dropped, calls that run are waited for (Python cannot stop them), and no
  thread is left. A forked child, which has none of the threads, leaves them alone.
- State: the number of inputs done and an anchor of what is upstream, max(16, scheduled_tasks / 8) inputs older at most.
  A resume takes the inputs from there again and calls `fn` for those that were not given.
- Draws: `rng=True` is keyed by the element and so exact. The global generators are shared by the threads: what `fn`
  draws from them depends on timing, and no resume repeats it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar, TypeVar

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of, refuse_length
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.run import Run
from pipes.seeds import KeyedGenerator
from pipes.shares import read_whole, reads_a_share
from pipes.stages.columns import apply_to_columns, check_columns
from pipes.stages.mapping import AppliedRun
from pipes.stages.wrapping import as_pipe
from pipes.state import Anchors, Capture, Position, damaged
from pipes.tallies import Tally

__all__ = ["ThreadPoolMapper"]

R = TypeVar("R")

_ANCHOR_EVERY = 16

Calls = Generator[tuple[Any, "Future[Any]"], None, None]


class _ThreadPoolRun(AppliedRun):
    """`taken` counts the inputs whose outputs were given, or that were skipped; those in flight are not in it."""

    anchored = True
    count_fields = ("taken",)

    def check(self, position: Position) -> None:
        super().check(position)
        if position["anchor"]["taken"] > position["taken"]:
            raise damaged(f"the counts of stage {self.stage} contradict each other")

    def restore(self, position: Position) -> None:
        window: int = self.pipe.scheduled_tasks
        self.anchor_every = max(_ANCHOR_EVERY, window // 8)
        self.anchors = Anchors(self.upstream, window // self.anchor_every + 2)
        self.taken = 0
        if position is None:
            self.anchors.note(0)
            return
        taken, anchor = position["taken"], position["anchor"]["taken"]
        self.anchors.note(anchor)
        self.inputs[0].replay(taken - anchor, [])
        self.taken = taken

    def _strict(self) -> Iterator[Any]:
        with closing(self._scheduled(self._numbered())) as calls:
            for element, call in calls:
                self.taken += 1
                yield self._result(element, call)

    def _going_on(self, tally: Tally) -> Iterator[Any]:
        with closing(self._scheduled(self._numbered())) as calls:
            for (element, call), _ in zip(calls, tally.ticks, strict=False):
                self.taken += 1
                try:
                    result = call.result()
                except BaseException as error:
                    result = tally.handle(error, element)
                    if result is None:
                        continue
                yield result

    def _result(self, element: Any, call: Future[Any]) -> Any:
        try:
            return call.result()
        except BaseException as error:
            self.note(error, element)
            raise

    def _numbered(self) -> Iterator[tuple[Any, int]]:
        number, every = self.taken, self.anchor_every
        for element in self.inputs[0]:
            yield element, number
            number += 1
            if number % every == 0:
                self.anchors.note(number)

    def _scheduled(self, numbered: Iterable[tuple[Any, int]]) -> Calls:
        """Give the elements with their calls, in order, while the calls of those that follow run."""
        source, call = iter(numbered), self._in_thread()
        waiting: deque[tuple[Any, Future[Any]]] = deque()
        late: Exception | None = None
        more, process, window = True, os.getpid(), self.pipe.scheduled_tasks
        # A process before this one died of an element, of one in flight at most.
        one_by_one = window if self.context.one_by_one else 0
        pool = ThreadPoolExecutor(self.pipe.max_workers, self.pipe.thread_name_prefix or f"pipes {self.stage}")
        try:
            while True:
                while more and len(waiting) < (1 if one_by_one > 0 else window):
                    try:
                        element, number = next(source)
                    except StopIteration:
                        more = False
                    except Exception as error:
                        more, late = False, error
                    else:
                        waiting.append((element, pool.submit(call, element, number)))
                if not waiting:
                    break
                yield waiting.popleft()
                one_by_one -= 1
            if late is not None:
                raise late
        finally:
            late = None
            if os.getpid() == process:
                pool.shutdown(cancel_futures=True)

    def _in_thread(self) -> Callable[[Any, int], Any]:
        """Return what a thread calls with an element and its number."""
        pipe, function, local, in_a_share = self.pipe, self.function(), threading.local(), reads_a_share()
        key = self.context.key(self.stage, pipe) if pipe.rng else 0

        def call(element: Any, number: int) -> Any:
            mine = local.__dict__
            if "generators" not in mine:  # this thread's first call
                if in_a_share:
                    read_whole()
                if pipe.initializer is not None:
                    pipe.initializer(*pipe.initargs)
                mine["generators"] = KeyedGenerator(key)
            return function(element, rng=mine["generators"].at(number)) if pipe.rng else function(element)

        return call

    def capture(self) -> Capture:
        return self.taken, self.anchors.entries

    def describe(self, captured: Capture) -> Position:
        taken, entries = captured
        return {"taken": taken, "anchor": self.anchors.describe(entries, taken)}

    def replay(self, count: int, wanted: Sequence[int]) -> list[Any]:
        if self.tolerant is not None:
            return Run.replay(self, count, wanted)
        start = self.taken
        elements = self.inputs[0].replay(count, wanted)
        self.taken = start + count
        self.anchors.note(self.taken)
        numbered = zip(elements, [start + offset for offset in wanted], strict=True)
        with closing(self._scheduled(numbered)) as calls:
            return [self._result(element, call) for element, call in calls]


@functional_datapipe("threadpool_map")
class ThreadPoolMapper(IterDataPipe[R]):
    """Give what `.map` gives, in the same order, with up to `max_workers` calls of `fn` at a time, each in a thread.

    Worth it where `fn` waits (requests, disks) or lets other threads run (Pillow decodes without the GIL). It must
    be safe to call from several threads. At most `scheduled_tasks` elements are read ahead, finished ones included.
    `max_workers` is the processors + 4, 32 at most, by default; each worker process of a loader has as many threads.
    `initializer(*initargs)` runs in each thread before its first call. `rng`, `on_error` and `max_errors` are those of
    `.map`: draw from `rng`, for what is drawn from the global generators in threads cannot be repeated.

    Raises ValueError for numbers below 1, else what `.map` does.

    >>> from pipes.iter import IterableWrapper
    >>> list(IterableWrapper(["a", "bb"]).threadpool_map(len, max_workers=2))
    [1, 2]
    """

    run_class = _ThreadPoolRun
    _calls = ("fn", "initializer")
    _levels = 3
    _chained_overloads: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "fn: Callable[..., R], *, scheduled_tasks: int = 128, max_workers: int | None = None, "
            "thread_name_prefix: str = '', initializer: Callable[..., Any] | None = None, "
            "initargs: tuple[Any, ...] = (), rng: bool = False, on_error: OnError = 'raise', "
            "max_errors: MaxErrors = 0.1",
            "ThreadPoolMapper[R]",
        ),
        (
            "fn: Callable[..., Any], input_col: Any, output_col: Any = None, scheduled_tasks: int = 128, "
            "max_workers: int | None = None, *, thread_name_prefix: str = '', "
            "initializer: Callable[..., Any] | None = None, initargs: tuple[Any, ...] = (), rng: bool = False, "
            "on_error: OnError = 'raise', max_errors: MaxErrors = 0.1",
            "ThreadPoolMapper[Any]",
        ),
    )

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        fn: Callable[..., R],
        input_col: Any = None,
        output_col: Any = None,
        scheduled_tasks: int = 128,
        max_workers: int | None = None,
        *,
        thread_name_prefix: str = "",
        initializer: Callable[..., Any] | None = None,
        initargs: Sequence[Any] = (),
        rng: bool = False,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
    ) -> None:
        check_columns(fn, input_col, output_col, rng=rng)
        check_policy(on_error, max_errors)
        scheduled_tasks = whole("scheduled_tasks", scheduled_tasks)
        max_workers = whole_or_none("max_workers", max_workers)
        if scheduled_tasks < 1:
            raise ValueError(f"scheduled_tasks must be 1 or more, not {scheduled_tasks}")
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers must be 1 or more, or None for the default, not {max_workers}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer is a function, not {initializer!r}")
        self.source_datapipe = as_pipe(source_datapipe)
        self.fn = fn
        self.input_col = input_col
        self.output_col = output_col
        self.scheduled_tasks = scheduled_tasks
        self.max_workers = max_workers
        self.thread_name_prefix = thread_name_prefix
        self.initializer = initializer
        self.initargs = initargs
        self.rng = rng
        self.on_error = on_error
        self.max_errors = max_errors

    def function(self) -> Callable[..., Any]:
        """Return the function of one whole element that this stage applies."""
        return apply_to_columns(self.fn, self.input_col, self.output_col)

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        refuse_length(self)
        return length_of(self.source_datapipe, shard)
