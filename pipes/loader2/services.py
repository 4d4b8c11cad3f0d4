"""Where a graph runs on several ranks, or as several services say; how a loader starts what a service says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from pipes.datapipe import IterDataPipe
from pipes.devices import Device
from pipes.errors import GraphError
from pipes.loader2.agreement import Agreement
from pipes.loader2.feeder import Feeder, Feeding
from pipes.loader2.full_sync import FullSync
from pipes.loader2.in_process import ServiceEngine
from pipes.loader2.iterator import Runner
from pipes.loader2.reading_service import (
    BuiltIn,
    InProcessReadingService,
    MultiProcessingReadingService,
    ReadingServiceInterface,
)
from pipes.shares import rank_and_world

__all__ = [
    "DistributedReadingService",
    "PrototypeMultiProcessingReadingService",
    "SequentialReadingService",
    "start_runner",
]


def start_runner(service: Any, graph: IterDataPipe[Any], streams: int, feeding: Feeding | None) -> Runner:
    """Return what runs the graph as `service` says, its outputs on the device of `feeding`."""
    if isinstance(service, BuiltIn):
        runner = service.start(graph, streams, None if feeding is None else feeding.device)
    else:
        runner = ServiceEngine(service, graph)
    try:
        if feeding is not None:
            runner = Feeder(runner, feeding)
        return service.around(runner) if isinstance(service, BuiltIn) else runner
    except BaseException:
        runner.close()
        raise


class DistributedReadingService(BuiltIn):
    """Run the graph in the calling process, and end each epoch on all ranks at once, when the shortest has no more.

    Ranks share the data without it. It is for training steps that wait for all ranks, as those of
    DistributedDataParallel do, when ranks may have unequal numbers of batches: what the others have beyond the shortest
    is dropped. All ranks call `iter(loader)` alike, and leave their loops at the same output.

    Raises RuntimeError at `iter` when there is no process group, RankError on all other ranks when one fails,
    RankTimeoutError when one comes to an output `timeout` seconds later than the others.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> service = SequentialReadingService(DistributedReadingService(), MultiProcessingReadingService(num_workers=2))
    >>> loader = DataLoader2(IterableWrapper(range(8)).sharding_filter(), reading_service=service)
    """

    ends_together = True

    def __init__(self, timeout: float = 1800) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
        if timeout <= 0:
            raise ValueError(f"timeout must be a number of seconds above 0, not {timeout}")
        self.timeout = timeout

    def check_group(self) -> None:
        """Raise RuntimeError when there is no process group."""
        import torch.distributed as dist

        if not dist.is_available():
            raise RuntimeError("DistributedReadingService needs torch.distributed, which this build of torch has not")
        if not dist.is_initialized():
            raise RuntimeError(
                "DistributedReadingService needs a process group, and there is none: start the program with torchrun "
                "and call torch.distributed.init_process_group() before iter(loader), or leave the service out for one "
                "process"
            )

    def start(self, graph: IterDataPipe[Any], streams: int, device: Device | None = None) -> Runner:
        """Return the engine that runs the graph."""
        self.check_group()
        return InProcessReadingService().start(graph, streams, device)

    def around(self, runner: Runner) -> Runner:
        """Return what lets the outputs of all ranks end together; one rank alone needs nothing."""
        rank, world = rank_and_world()
        return runner if world == 1 else FullSync(runner, Agreement(rank, world, self.timeout))


class SequentialReadingService(BuiltIn):
    """Run the graph as several services say together: a DistributedReadingService, one of workers, and users' own.

    Users' own adapt the graph in their order, each epoch too, and are finalized in reverse; they run in the calling
    process. Raises GraphError for services that cannot be combined, TypeError for what is no service.

    >>> class Plus(ReadingServiceInterface):
    ...     def __init__(self, number): self.number = number
    ...     def initialize(self, datapipe): return datapipe.map(lambda x: (x, self.number))
    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> list(DataLoader2(IterableWrapper("ab"), reading_service=SequentialReadingService(Plus(1), Plus(2))))
    [(('a', 1), 2), (('b', 1), 2)]
    """

    def __init__(self, *reading_services: Any) -> None:
        self.reading_services = reading_services
        self._flat: list[Any] = []
        flat = self._flat
        for service in reading_services:
            flat.extend(service._flat if isinstance(service, SequentialReadingService) else [service])
        for service in flat:
            if isinstance(service, type) or not (
                isinstance(service, BuiltIn) or callable(getattr(service, "initialize", None))
            ):
                raise TypeError(f"SequentialReadingService takes reading services, not {service!r}")
        places = [
            each for each in flat if isinstance(each, BuiltIn) and not isinstance(each, DistributedReadingService)
        ]
        together = [each for each in flat if isinstance(each, DistributedReadingService)]
        self._own = [each for each in flat if not isinstance(each, BuiltIn)]
        if len(places) > 1 or len(together) > 1:
            names = ", ".join(type(each).__name__ for each in (places if len(places) > 1 else together))
            raise GraphError(f"a graph runs in one place, and ends on all ranks once: leave one of {names}")
        self._place: BuiltIn = places[0] if places else InProcessReadingService()
        self._together = together[0] if together else None
        if self._own and (self._place.num_workers or self._place.changes_graph):
            raise GraphError(
                f"{type(self._own[0]).__name__} adapts the graph in the calling process, and "
                f"{type(places[0]).__name__} runs or changes it elsewhere: use worker_init_fn= and worker_reset_fn= of "
                "the latter instead"
            )

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        """The number of worker processes."""
        return self._place.num_workers

    @property
    def ends_together(self) -> bool:  # type: ignore[override]
        """Whether an epoch ends on all ranks at once."""
        return self._together is not None

    @property
    def changes_graph(self) -> bool:
        """Whether the graph that runs may be another than the loader's."""
        return bool(self._own) or self._place.changes_graph

    def check(self, graph: IterDataPipe[Any]) -> None:
        """Raise what the service of workers has against the graph."""
        self._place.check(graph)

    def prepare(self) -> None:
        """Start what workers are forked from."""
        self._place.prepare()

    def start(self, graph: IterDataPipe[Any], streams: int, device: Device | None = None) -> Runner:
        """Return what runs the graph."""
        if self._together is not None:
            self._together.check_group()
        return ServiceEngine(_Chain(self._own), graph) if self._own else self._place.start(graph, streams, device)

    def around(self, runner: Runner) -> Runner:
        """Return what lets the outputs of all ranks end together, when it is asked for."""
        return runner if self._together is None else self._together.around(runner)


class _Chain(ReadingServiceInterface):
    """Users' services one after the other."""

    def __init__(self, services: list[Any]) -> None:
        self._services = services
        # Those that were initialized, and those whose epoch has begun.
        self._ready: list[Any] = []
        self._begun: list[Any] = []

    def initialize(self, datapipe: Any) -> Any:
        try:
            for service in self._services:
                datapipe = service.initialize(datapipe)
                self._ready.append(service)
        except BaseException:
            self.finalize()
            raise
        return datapipe

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Callable[[Any], Any]:
        functions = []
        for service in self._services:
            self._begun.append(service)
            functions.append(service.initialize_iteration(seed_generator))

        def adapt(datapipe: Any) -> Any:
            for function in functions:
                datapipe = datapipe if function is None else function(datapipe)
            return datapipe

        return adapt

    def finalize_iteration(self) -> None:
        if self._begun:
            try:
                self._begun.pop().finalize_iteration()
            finally:
                self.finalize_iteration()

    def finalize(self) -> None:
        if self._ready:
            try:
                self._ready.pop().finalize()
            finally:
                self.finalize()

    def _pause(self) -> None:
        for service in self._services:
            getattr(service, "_pause", _nothing)()

    def _resume(self) -> None:
        for service in self._services:
            getattr(service, "_resume", _nothing)()


def _nothing() -> None:
    pass


class PrototypeMultiProcessingReadingService(MultiProcessingReadingService):
    """torchdata's older name of MultiProcessingReadingService; warns, and is that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        warnings.warn(
            "PrototypeMultiProcessingReadingService is an old name: use MultiProcessingReadingService, the same",
            stacklevel=2,
        )
        super().__init__(*args, **options)
