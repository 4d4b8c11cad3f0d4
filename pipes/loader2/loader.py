"""`DataLoader2`: iterate a graph, epoch after epoch, save where it stands and go on from there."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe, MapDataPipe, no_length
from pipes.devices import Memory
from pipes.error_policy import stats_of
from pipes.errors import StateError
from pipes.graph import clone
from pipes.loader2.checkpoint import Checkpoint, check_place, check_tables, read_state
from pipes.loader2.dealing import Dealer, check_read_once, cut
from pipes.loader2.feeder import take_off
from pipes.loader2.iterator import DataLoader2Iterator, Runner
from pipes.loader2.ownership import busy
from pipes.loader2.ranks import shared_seed
from pipes.loader2.reading_service import InProcessReadingService
from pipes.loader2.services import start_runner
from pipes.loader2.sharding import length_over_streams, warnings_of_sharding
from pipes.loader2.streams import Plan, StreamState, with_numbers
from pipes.node import walk
from pipes.shard_points import check_shard_points, splits_by_level
from pipes.shares import rank_and_world, reads_a_share
from pipes.stages.wrapping import as_pipe

__all__ = ["DataLoader2"]

T = TypeVar("T")
Adapter = Callable[[Any], Any]


class DataLoader2(Generic[T]):
    """Iterate a graph of pipes in this process or in workers, epoch after epoch, with exact state.

    The graph is copied, so later changes to the pipes do not reach the loader; functions and data are shared. The order
    depends on the seed, the epoch and `num_streams` alone (default: workers times ranks, at least 1), not on how many
    workers run the streams. A graph without `sharding_filter` is split after its source; `sharding="replicate"` gives
    every stream all elements instead.

    With `device`, batches come with their tensors there, copied ahead by way of page-locked memory; `memory="pinned"`
    without a device gives them in page-locked memory, for copies of your own. See `.to_device`. Raises TypeError for
    what is no pipe, UnpicklableStageError when the graph cannot travel to the workers, DeviceError for a device that is
    not there.

    >>> from pipes.iter import IterableWrapper
    >>> loader = DataLoader2(IterableWrapper(range(6)).shuffle().batch(2))
    >>> loader.seed(7)
    >>> iterator = iter(loader)
    >>> first, state = next(iterator), loader.state_dict()
    >>> rest = list(iterator)
    >>> again = DataLoader2(IterableWrapper(range(6)).shuffle().batch(2))
    >>> again.load_state_dict(state)
    >>> list(again) == rest
    True
    """

    def __init__(
        self,
        datapipe: IterDataPipe[T] | MapDataPipe[T],
        datapipe_adapter_fn: Adapter | Sequence[Adapter] | None = None,
        reading_service: Any = None,
        *,
        num_streams: int | None = None,
        sharding: str = "auto",
        device: Any = None,
        memory: Memory = "auto",
    ) -> None:
        self._closed = True
        if not isinstance(datapipe, IterDataPipe | MapDataPipe):
            raise TypeError(
                f"DataLoader2 reads a graph of pipes, not a {type(datapipe).__name__}"
                + (
                    "; a saved state holds no graph, so build it as before"
                    if datapipe is None
                    else "; see IterableWrapper"
                )
            )
        if sharding not in ("auto", "replicate"):
            raise ValueError(f"sharding must be 'auto' or 'replicate', not {sharding!r}")
        graph: Any = clone(as_pipe(datapipe))
        if any("_loaded" in node.__dict__ for node in walk(graph)):
            raise StateError("a state was loaded into a pipe of this graph; load a loader's state into the DataLoader2")
        adapters = datapipe_adapter_fn if isinstance(datapipe_adapter_fn, Sequence) else [datapipe_adapter_fn]
        for adapter in adapters:
            graph = graph if adapter is None else adapter(graph)
        self.datapipe: IterDataPipe[T] = graph
        self.reading_service = InProcessReadingService() if reading_service is None else reading_service
        self._replicate = sharding == "replicate"
        self._graph: IterDataPipe[Any]
        self._dealt: IterDataPipe[Any] | None
        workers = getattr(self.reading_service, "num_workers", 0)
        graph, self._feeding = take_off(graph, device, memory, has_workers=workers > 0)
        self._graph, self._dealt = (graph, None) if self._replicate else cut(graph)
        self._by_level = splits_by_level(self._graph)
        if hasattr(self.reading_service, "check"):
            self.reading_service.check(self._graph)
        self._explicit_streams = whole_or_none("num_streams", num_streams)
        self._rank, self._world = rank_and_world()
        self.num_streams = self._streams_for(self._world)
        self._seed: int | None = None
        self._drawn = False  # whether the seed is torch's, and not one that the user or a state brought
        self._epoch = 0
        self._loaded: Checkpoint | None = None
        # Where the streams stood when the newest iterator was made.
        self._begun: dict[int, StreamState] | None = None
        self._told_of_draws = False
        self._numbers: dict[int, Any] = {}  # what users' pipes had counted where the newest epoch ended, by stream
        self._on_changed_data = "raise"
        self._iterator: weakref.ref[DataLoader2Iterator[T]] | None = None
        self._fresh, self._advanced = True, False
        # The process that is inside `iter`: a child that another thread forks meanwhile may call it, too.
        self._beginning: int | None = None
        # Outputs of the runner that Ctrl-C kept from the user.
        self._not_given = 0
        self._runner: Runner | None = None
        self._finalizer: weakref.finalize[..., Any]
        self._closed = False
        if hasattr(self.reading_service, "prepare"):
            self.reading_service.prepare()

    @property
    def epoch(self) -> int:
        """The number of the epoch that runs, or of the next one when none does."""
        return self._epoch

    def _streams_for(self, world: int) -> int:
        """Return the number of streams of a new run of `world` ranks; raises when it or the graph does not allow it."""
        count = self._explicit_streams or max(1, getattr(self.reading_service, "num_workers", 0)) * world
        if count < 1 or count % world:
            raise ValueError(
                f"num_streams must be a positive multiple of the world size {world}, not {self._explicit_streams}"
            )
        check_shard_points(self._graph, count, world)
        return count

    def _join_group(self) -> None:
        """Take in a process group that began after the loader was made, as trainers begin theirs."""
        rank, world = rank_and_world()
        # A group that has ended leaves the loader as it was; inside an element it is read whole.
        if (world == 1 and not reads_a_share()) or (rank, world) == (self._rank, self._world):
            return
        if self._runner is not None:
            raise RuntimeError(
                f"the loader was iterated by rank {self._rank} of {self._world}, and this is now rank {rank} of "
                f"{world}: make it, or iterate it first, when the process group is there"
            )
        if self._loaded is None:
            self.num_streams = self._streams_for(world)
        else:
            check_place(self._loaded, rank, world, by_level=self._by_level)
            check_shard_points(self._graph, self.num_streams, world)
        if self._drawn:
            self._seed = None
        self._rank, self._world = rank, world

    def seed(self, seed: int) -> None:
        """Set the seed from the next `iter` on, as epoch 0; raises ValueError unless it fits 64 bits."""
        seed = whole("seed", seed)
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"a seed lies in [0, 2**64), not {seed}")
        self._seed, self._epoch, self._fresh, self._loaded, self._begun = seed, 0, True, None, None
        self._drawn = False

    def __iter__(self) -> DataLoader2Iterator[T]:
        if self._closed:
            raise RuntimeError("the loader was shut down; make a new one")
        if self._beginning == os.getpid():
            raise busy()
        try:
            self._beginning = os.getpid()
            iterator = self._begin()
        finally:
            self._beginning = None
        return iterator

    def _begin(self) -> DataLoader2Iterator[T]:
        self._join_group()
        previous = None if self._iterator is None else self._iterator()
        if previous is not None:
            previous.replace("iter(loader) was called again")
        if not self._fresh and self._advanced:
            # Whatever fails or interrupts below, the next call begins this epoch, or goes on from the loaded state.
            self._epoch_ended(given_up=True)
        runner = self._start() if self._runner is None or self._runner.inherited else self._runner
        states = self._states_to_run()
        dealer = None
        if self._dealt is not None:
            dealer = Dealer(self._dealt, self._plan(), any(state.given for state in states.values()))
        # In this process, the pipes themselves know, and the user may have set what they count.
        numbers = self._numbers if getattr(self.reading_service, "num_workers", 0) else {}
        runner.begin(self._plan(), with_numbers(states, numbers), dealer)
        iterator = DataLoader2Iterator(self, runner)
        self._iterator, self._begun, self._loaded = weakref.ref(iterator), states, None
        self._fresh = self._advanced = False
        self._not_given = 0
        return iterator

    def _start(self) -> Runner:
        if self.num_streams > 1:
            check_read_once(self._graph)
            for sentence in () if self._replicate else warnings_of_sharding(self._graph, self.num_streams):
                warnings.warn(sentence, stacklevel=4)
        runner = start_runner(self.reading_service, self._graph, self.num_streams // self._world, self._feeding)
        if self._runner is not None:
            self._finalizer.detach()
        self._runner = runner
        self._finalizer = weakref.finalize(self, _end, runner.close)
        # At exit before the forkserver ends, whose workers would seem to die; finalizers have no such order.
        self._finalizer.atexit = False
        atexit.register(runner.close)
        return runner

    def _plan(self) -> Plan:
        if self._seed is None:
            self._seed, self._drawn = shared_seed(), True
        return Plan(self._seed, self._epoch, self.num_streams, self._replicate, self._world, self._on_changed_data)

    def _states_to_run(self) -> dict[int, StreamState]:
        own = range(self._rank, self.num_streams, self._world)
        if self._loaded is None:
            return self._begun or {number: StreamState() for number in own}
        return {number: self._loaded.streams[number] for number in own}

    def _epoch_ended(self, *, given_up: bool = False) -> None:
        if not self._fresh:
            ended = {} if given_up or self._runner is None else self._runner.states()
            self._numbers = {number: state.numbers for number, state in ended.items() if state.ended}
            self._epoch += 1
            self._fresh, self._begun = True, None

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as plain JSON data: after the last output given, exactly.

        The state of an epoch whose end was seen is that of the start of the next one. Loading it into a loader of the
        same graph and `num_streams` gives the same outputs from there on, whatever the number of workers.
        """
        if self._runner is None:
            self._join_group()
        plan = self._plan()
        if self._loaded is not None:
            return self._loaded.to_json(self._graph)
        running = None if self._fresh else self._runner
        states = self._states_to_run() if running is None else running.states(self._not_given)
        if running is not None:
            self._warn_of_draws(running)
        streams = with_numbers(states, self._numbers)
        return Checkpoint(plan.seed, plan.epoch, plan.streams, plan.world, plan.replicate, streams).to_json(self._graph)

    def _warn_of_draws(self, runner: Runner) -> None:
        if runner.drew_above is not None and not self._told_of_draws:
            self._told_of_draws = True
            warnings.warn(
                f"functions above stage {runner.drew_above} draw from the global generators of random, numpy or torch; "
                "that stage keeps elements back, so a resume makes them again, with other draws (their order stays "
                "exact). Make such functions take their generator: .map(fn, rng=True)",
                stacklevel=3,
            )

    def load_state_dict(self, state: Any, *, on_changed_data: str = "raise") -> None:
        """Go on, from the next `iter` on, where `state` was saved; `state` is one rank's or the list of all ranks'.

        Data other than that which the state was made from (other files, sizes, times of change, ETags, lists) is
        refused, here or when it is met; with `on_changed_data="warn"` the positions are used on what is there now.

        An iterator in use is no longer valid. Raises StateError, and changes nothing, when the state is damaged, of
        another graph, of another explicit `num_streams`, or lacks streams of this rank.
        """
        if on_changed_data not in ("raise", "warn"):
            raise ValueError(f"on_changed_data must be 'raise' or 'warn', not {on_changed_data!r}")
        self._join_group()
        checkpoint = read_state(state, self._graph, on_changed_data)
        count = checkpoint.num_streams
        if self._explicit_streams not in (None, count):
            raise StateError(
                f"the state has num_streams={count}, the loader num_streams={self._explicit_streams}; leave it out"
            )
        check_place(checkpoint, self._rank, self._world, by_level=self._by_level)
        check_shard_points(self._graph, count, self._world)
        if checkpoint.replicate != self._replicate:
            raise StateError("the state and the loader differ in sharding='replicate'; use the same")
        if not getattr(self.reading_service, "changes_graph", True):
            # Else only those who run the changed graph can tell.
            plan = Plan(checkpoint.seed, checkpoint.epoch, count, checkpoint.replicate, self._world)
            own = range(self._rank, count, self._world)
            check_tables(self._graph, plan, {number: checkpoint.streams[number] for number in own})
        previous = None if self._iterator is None else self._iterator()
        if previous is not None:
            previous.replace("load_state_dict() was called; iter(loader) goes on from that state")
        self._loaded, self._seed, self._epoch, self.num_streams = checkpoint, checkpoint.seed, checkpoint.epoch, count
        self._fresh, self._iterator, self._begun, self._numbers = True, None, None, {}
        self._on_changed_data, self._drawn = on_changed_data, False

    def __len__(self) -> int:
        if self._runner is None:
            self._join_group()
        together = getattr(self.reading_service, "ends_together", False)
        lengths = []
        try:
            for rank in range(self._world) if together else [self._rank]:
                own = range(rank, self.num_streams, self._world)
                lengths.append(
                    length_over_streams(self._graph, own, self.num_streams, self._world, not self._replicate)
                )
            return min(lengths)
        except RecursionError:
            raise no_length(self, "its graph is too deep") from None

    def stats(self) -> dict[str, Any]:
        """Return counts since the loader was made.

        `batches` are outputs given, `bytes` what they held in memory, `copied_batches` those copied because many were
        kept, `restarts` workers started again after a death, `seconds_waited` the time in which `next` waited for an
        output that was not there. `workers` has the process ids, and `per_worker` the same counts of each worker, with
        the time waited for it; a batch made in this process is in the totals alone. `device` is where batches come
        ("cpu" without one) and `memory` the kind of memory that they come from.

        `errors` and `left_out` are those of the epoch that runs or ran last, a resumed one from its start, by stage:
        what `on_error` skipped and replaced of the elements taken, with the first and the last error; and what is left
        out by rule, such as the directories of archives, by kind.

        >>> from pipes.iter import IterableWrapper
        >>> loader = DataLoader2(IterableWrapper(range(6)).batch(2))
        >>> len(list(loader)), loader.stats()["batches"], loader.stats()["per_worker"]
        (3, 3, [])
        """
        counts = [] if self._runner is None else self._runner.counts
        return {
            "batches": 0 if self._runner is None else self._runner.batches,
            "bytes": sum(count.bytes for count in counts),
            "copied_batches": sum(count.copied_batches for count in counts),
            "seconds_waited": sum(count.seconds_waited for count in counts),
            "restarts": sum(count.restarts for count in counts),
            "workers": [count.pid for count in counts],
            "per_worker": [asdict(count) for count in counts],
            **self._place(),
            **stats_of({} if self._runner is None else self._runner.stage_counts()),
        }

    def _pause(self) -> None:
        """torchdata's way to pause the newest iterator."""
        self._newest().pause()

    def _resume(self) -> None:
        """torchdata's way to go on."""
        self._newest().resume()

    def _newest(self) -> DataLoader2Iterator[T]:
        iterator = None if self._iterator is None else self._iterator()
        if iterator is None:
            raise RuntimeError("no iterator of this loader is in use: keep iterator = iter(loader), then pause it")
        return iterator

    def shutdown(self) -> None:
        """End the workers and close every file; may be called twice. The loader cannot be iterated afterwards."""
        self._closed = True
        previous = None if self._iterator is None else self._iterator()
        if previous is not None:
            previous.replace("the loader was shut down")
        if self._runner is not None:
            _end(self._runner.close)
            self._finalizer.detach()

    close = shutdown

    def __enter__(self) -> DataLoader2[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _place(self) -> dict[str, str]:
        device = None if self._feeding is None else self._feeding.device
        if device is None:
            return {"device": "cpu", "memory": "pageable"}
        return {"device": "cpu" if device.name == "host" else device.name, "memory": device.memory}

    def __getstate__(self) -> dict[str, Any]:
        if self._runner is not None:
            raise TypeError(
                "a DataLoader2 that was iterated holds workers and files, and is neither copied nor pickled: make "
                "another one of the same graph, and load_state_dict(loader.state_dict()) into it to go on alike"
            )
        return self.__dict__

    def __repr__(self) -> str:
        place = "" if self._feeding is None else "".join(f", {name}={value}" for name, value in self._place().items())
        return f"DataLoader2(num_streams={self.num_streams}, epoch={self._epoch}{place})\n{self.datapipe!r}"


def _end(close: Callable[[], None]) -> None:
    close()
    atexit.unregister(close)
