"""Where a graph runs: in this process, in worker processes, or as a user's own service decides."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, get_args

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe
from pipes.devices import Device
from pipes.errors import GraphError, UnpicklableStageError
from pipes.loader2.dealing import DealtSource
from pipes.loader2.engine import Engine
from pipes.loader2.in_process import InProcessEngine
from pipes.loader2.iterator import Runner
from pipes.loader2.process import Method, start_forkserver
from pipes.loader2.settings import Settings
from pipes.loader2.sharing import without_long_lists
from pipes.loader2.shipping import find_unpicklable, ship
from pipes.loader2.worker import WorkerInfo
from pipes.run import stage_names, walk

__all__ = [
    "BuiltIn",
    "InProcessReadingService",
    "MultiProcessingReadingService",
    "ReadingServiceInterface",
    "WorkerInfo",
]


class ReadingServiceInterface(ABC):
    """Base of users' own services, with torchdata's hooks: adapt the graph, then each epoch, then clean up.

    >>> class Doubled(ReadingServiceInterface):
    ...     def initialize(self, datapipe): return datapipe.map(lambda x: 2 * x)
    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> list(DataLoader2(IterableWrapper([1, 2]), reading_service=Doubled()))
    [2, 4]
    """

    @abstractmethod
    def initialize(self, datapipe: Any) -> Any:
        """Return the graph to iterate; called once, before the first epoch."""

    def initialize_iteration(
        self, seed_generator: Any, iter_reset_fn: Callable[[Any], Any] | None = None
    ) -> Callable[[Any], Any] | None:
        """Called before each epoch; may return a function that is applied to the graph for that epoch."""
        return None

    def finalize_iteration(self) -> None:  # noqa: B027
        """Called at the end of each epoch."""

    def finalize(self) -> None:  # noqa: B027
        """Called at shutdown."""


class BuiltIn(ABC):
    """Base of our own services, which a loader asks for what runs the graph."""

    num_workers = 0
    #: Whether an epoch ends on all ranks at once, so that it is as long as that of the shortest.
    ends_together = False

    @property
    def changes_graph(self) -> bool:
        """Whether the graph that runs may be another than the loader's."""
        return False

    def check(self, graph: IterDataPipe[Any]) -> None:  # noqa: B027
        """Raise when the graph cannot run there; without workers nothing has to travel."""

    def prepare(self) -> None:  # noqa: B027
        """Called when a loader is made."""

    @abstractmethod
    def start(self, graph: IterDataPipe[Any], streams: int, device: Device | None = None) -> Runner:
        """Return what runs the graph, of which this rank has `streams` streams."""

    def around(self, runner: Runner) -> Runner:
        """Return what stands above `runner`, that of `start` or the feeder of a device above it."""
        return runner


class InProcessReadingService(BuiltIn):
    """Run the graph in the calling process.

    `init_fn(datapipe, worker_info)` may adapt the graph once, `reset_fn(datapipe, worker_info, seed_generator)` before
    each epoch; both return it. `prefetch_cnt` is accepted for code written against torchdata, which never used it;
    one process cannot work ahead of itself, so a number above 0 warns.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> list(DataLoader2(IterableWrapper(range(4)).batch(2), reading_service=InProcessReadingService()))
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        prefetch_cnt: int = 0,
        init_fn: Callable[[Any, WorkerInfo], Any] | None = None,
        reset_fn: Callable[[Any, WorkerInfo, Any], Any] | None = None,
    ) -> None:
        prefetch_cnt = whole("prefetch_cnt", prefetch_cnt)
        if prefetch_cnt:
            warnings.warn(
                "prefetch_cnt has no effect in one process; MultiProcessingReadingService(num_workers=1) works ahead",
                stacklevel=2,
            )
        self.prefetch_cnt = prefetch_cnt
        self.init_fn = init_fn
        self.reset_fn = reset_fn

    @property
    def changes_graph(self) -> bool:
        """Whether the graph that runs may be another than the loader's."""
        return self.init_fn is not None or self.reset_fn is not None

    def start(self, graph: IterDataPipe[Any], streams: int, device: Device | None = None) -> InProcessEngine:
        """Return the engine that runs the graph."""
        return InProcessEngine(graph, self.init_fn, self.reset_fn)


class MultiProcessingReadingService(BuiltIn):
    """Run the graph in `num_workers` worker processes; 0 runs it in the calling process.

    Arguments beyond torchdata's:
    - `prefetch`: outputs that each worker works ahead (default 4); one that has made them all goes on when half of them
      were given. torchdata's `worker_prefetch_cnt` and `main_prefetch_cnt` set it, when given, to their larger one.
    - `in_order`: False gives whatever a worker has ready, so that a slow element holds up its own worker alone. Each
      output still comes once, also across deaths and resumes; their order is not promised. As torch's DataLoader. Not
      for sources that can be read only once.
    - `max_bytes_in_flight`: bytes that all workers together work ahead; one output a worker is always allowed, and the
      last output of each may go beyond it.
    - `max_held`: shared-memory blocks of one worker that kept batches may hold before further batches are copied.
    - `timeout`: seconds without an output after which `next` raises WorkerTimeoutError with the worker's Python stack.
    - `on_worker_death`: "restart" goes on exactly where a dead worker was, "raise" raises WorkerDiedError.
    - `max_restarts`: restarts of one worker in one epoch.
    - `snapshot_every`: outputs of a stream between two snapshots; a resume or restart draws at most so many again.
    `multiprocessing_context` is "forkserver" (the default), "spawn" or "fork", or a context of multiprocessing.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> pipe = IterableWrapper(range(8)).sharding_filter().map(lambda x: x * x).batch(2)
    >>> with DataLoader2(pipe, reading_service=MultiProcessingReadingService(num_workers=2)) as loader:
    ...     list(loader)
    [[0, 4], [1, 9], [16, 36], [25, 49]]
    """

    def __init__(
        self,
        num_workers: int = 0,
        multiprocessing_context: str | BaseContext | None = None,
        worker_prefetch_cnt: int | None = None,
        main_prefetch_cnt: int | None = None,
        worker_init_fn: Callable[[Any, WorkerInfo], Any] | None = None,
        worker_reset_fn: Callable[[Any, WorkerInfo, Any], Any] | None = None,
        *,
        prefetch: int | None = None,
        in_order: bool = True,
        max_bytes_in_flight: int = 1 << 30,
        max_held: int | None = None,
        timeout: float | None = None,
        on_worker_death: str = "restart",
        max_restarts: int = 3,
        snapshot_every: int = 16,
    ) -> None:
        num_workers = whole("num_workers", num_workers)
        if num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, not {num_workers}")
        if isinstance(multiprocessing_context, BaseContext):
            multiprocessing_context = multiprocessing_context.get_start_method()
        if multiprocessing_context is not None and multiprocessing_context not in get_args(Method):
            raise ValueError(
                f"multiprocessing_context must be one of {', '.join(get_args(Method))}, not {multiprocessing_context!r}"
            )
        if on_worker_death not in ("restart", "raise"):
            raise ValueError(f"on_worker_death must be 'restart' or 'raise', not {on_worker_death!r}")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be a number of seconds above 0, or None, not {timeout}")
        snapshot_every = whole("snapshot_every", snapshot_every)
        max_bytes_in_flight = whole("max_bytes_in_flight", max_bytes_in_flight)
        for name, value in (("snapshot_every", snapshot_every), ("max_bytes_in_flight", max_bytes_in_flight)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        prefetch, max_held = whole_or_none("prefetch", prefetch), whole_or_none("max_held", max_held)
        if prefetch is not None and prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, not {prefetch}")
        if max_held is not None and max_held < 0:
            raise ValueError(f"max_held must be 0 (every output is copied) or more, not {max_held}")
        given = {"worker_prefetch_cnt": worker_prefetch_cnt, "main_prefetch_cnt": main_prefetch_cnt}
        counts = [whole(name, count) for name, count in given.items() if count is not None]
        self.num_workers = num_workers
        self.prefetch = prefetch or max([1, *counts] if counts else [4])
        self._settings = Settings(
            num_workers=num_workers,
            method=multiprocessing_context or "forkserver",  # type: ignore[arg-type]
            prefetch=self.prefetch,
            in_order=in_order,
            max_bytes_in_flight=max_bytes_in_flight,
            max_held=max_held if max_held is not None else 2 * self.prefetch + 8,
            snapshot_every=snapshot_every,
            timeout=timeout,
            max_restarts=whole("max_restarts", max_restarts),
            recover=on_worker_death == "restart",
            init_fn=worker_init_fn,
            reset_fn=worker_reset_fn,
        )

    @property
    def changes_graph(self) -> bool:
        """Whether the graph that runs may be another than the loader's."""
        return self._settings.init_fn is not None or self._settings.reset_fn is not None

    def check(self, graph: IterDataPipe[Any]) -> None:
        """Raise UnpicklableStageError, naming stage and attribute, when the graph cannot travel to a worker.

        Raises GraphError for in_order=False over a source that the main process reads and deals.
        """
        if self.num_workers == 0:
            return
        if not self._settings.in_order and any(isinstance(node, DealtSource) for node in walk(graph)):
            raise GraphError(
                "in_order=False cannot be had for a source that can be read only once, such as a generator: main reads "
                "it and deals its elements, and those of a slow worker would pile up. Wrap a list, or a class whose "
                "__iter__ starts afresh"
            )
        graph = without_long_lists(graph)
        try:
            ship(graph)
        except UnpicklableStageError:
            names = stage_names(graph)
            for node in walk(graph):
                alone = {name: value for name, value in vars(node).items() if id(value) not in names}
                found = find_unpicklable(alone, f"stage {names[id(node)]}")
                if found:
                    raise UnpicklableStageError(
                        f"the graph cannot be sent to worker processes: {found}. Make it inside the worker (at the "
                        "first use, or when iteration starts), or leave it out in __getstate__"
                    ) from None
            raise

    def prepare(self) -> None:
        """Start what workers are forked from: it imports for seconds, in which the program can build its model."""
        if self.num_workers and self._settings.method == "forkserver":
            start_forkserver()

    def start(self, graph: IterDataPipe[Any], streams: int, device: Device | None = None) -> Engine | InProcessEngine:
        """Return the engine that runs the graph in at most `streams` workers; `device` page-locks their memory."""
        settings = self._settings
        if self.num_workers == 0:
            return InProcessEngine(graph, settings.init_fn, settings.reset_fn)
        return Engine(graph, settings, min(self.num_workers, streams), device)
