"""Reading services: users' own, and the hooks of the workers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from loading import loader_of, take, through_json, with_draws

from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService, ReadingServiceInterface, process

pytestmark = pytest.mark.usefixtures("no_residue")


class Recorder(ReadingServiceInterface):
    """Notes every call of its hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seeds: list[int] = []

    def initialize(self, datapipe: Any) -> Any:
        self.calls.append("initialize")
        return datapipe.map(lambda x: x * 10)

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        self.calls.append("initialize_iteration")
        self.seeds.append(seed_generator.generate_shared_seed())
        number = len(self.seeds)
        return lambda pipe: pipe.map(lambda x: x + number)

    def finalize_iteration(self) -> None:
        self.calls.append("finalize_iteration")

    def finalize(self) -> None:
        self.calls.append("finalize")


EPOCH = ["initialize_iteration", "finalize_iteration"]


class TestOwnService:
    def test_hooks_of_whole_epochs(self) -> None:
        service = Recorder()
        with DataLoader2(IterableWrapper(range(3)), reading_service=service) as loader:
            loader.seed(1)
            assert service.calls == []
            assert list(loader) == [1, 11, 21]
            assert list(loader) == [2, 12, 22]
        loader.shutdown()
        assert service.calls == ["initialize", *EPOCH, *EPOCH, "finalize"]
        assert len(set(service.seeds)) == 2

    def test_an_epoch_that_is_given_up_is_finalized(self) -> None:
        service = Recorder()
        loader = DataLoader2(IterableWrapper(range(3)), reading_service=service)
        take(iter(loader), 1)
        take(iter(loader), 1)
        loader.shutdown()
        assert service.calls == ["initialize", *EPOCH, *EPOCH, "finalize"]

    def test_an_error_finalizes(self) -> None:
        service = Recorder()
        with DataLoader2(IterableWrapper([1, None]), reading_service=service) as loader, pytest.raises(TypeError):
            list(loader)
        assert service.calls == ["initialize", *EPOCH, "finalize"]

    def test_its_state(self) -> None:
        with DataLoader2(IterableWrapper(range(6)), reading_service=Recorder()) as loader:
            take(iter(loader), 2)
            state = through_json(loader.state_dict())
        with DataLoader2(IterableWrapper(range(6)), reading_service=Recorder()) as loader:
            loader.load_state_dict(state)
            assert list(loader) == [21, 31, 41, 51]

    def test_a_loaded_state_outlives_an_epoch_that_could_not_begin(self) -> None:
        class Reluctant(Recorder):
            def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
                self.seeds.append(0)
                if len(self.seeds) in (1, 3, 4):
                    raise OSError("not yet")

        loader = DataLoader2(IterableWrapper(range(6)), reading_service=Reluctant())
        with pytest.raises(OSError, match="not yet"):
            iter(loader)
        assert take(iter(loader), 2) == [0, 10]
        state = through_json(loader.state_dict())
        with pytest.raises(OSError, match="not yet"):
            iter(loader)
        # the epoch that was broken off is over, and the failure uses up no other
        assert loader.epoch == 1
        loader.load_state_dict(state)
        with pytest.raises(OSError, match="not yet"):
            iter(loader)
        assert loader.state_dict() == state
        assert list(loader) == [20, 30, 40, 50]

    def test_it_may_return_any_iterable(self) -> None:
        class Plain(ReadingServiceInterface):
            def initialize(self, datapipe: Any) -> Any:
                return [7, 8]

        assert list(DataLoader2(IterableWrapper([1]), reading_service=Plain())) == [7, 8]

    def test_without_initialize_it_cannot_be_made(self) -> None:
        with pytest.raises(TypeError, match="abstract"):
            type("Empty", (ReadingServiceInterface,), {})()


class TestWorkerHooks:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_init_adds_to_the_graph_of_every_worker(self, workers: int) -> None:
        def init(pipe: Any, info: Any) -> Any:
            return pipe.map(lambda x: (x, info.num_workers, info.worker_id)).batch(2)

        with loader_of(IterableWrapper(range(8)).sharding_filter(), workers, 2, worker_init_fn=init) as loader:
            batches = list(loader)
        count = max(1, workers)
        assert batches == [
            [(s + 4 * b + 2 * i, count, s % count) for i in range(2)] for b in range(2) for s in range(2)
        ]

    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_reset_gets_seeds_shared_and_own(self, workers: int) -> None:
        def reset(pipe: Any, info: Any, seeds: Any) -> Any:
            pair = seeds.generate_shared_seed(), seeds.generate_seed()
            return pipe.map(lambda x: (info.worker_id, *pair))

        pipe = IterableWrapper(range(4)).sharding_filter()
        runs = []
        for _ in range(2):
            with loader_of(pipe, workers, 2, worker_reset_fn=reset) as loader:
                runs.append([set(loader), set(loader)])
        assert runs[0] == runs[1]
        first, second = runs[0]
        assert len(first) == len(second) == max(1, workers)
        assert len({seed for _, seed, _ in first}) == 1
        assert len({seed for _, _, seed in first | second}) == 2 * max(1, workers)
        assert {seed for _, seed, _ in first} != {seed for _, seed, _ in second}

    @pytest.mark.parametrize("workers", [0, 2])
    def test_state_of_a_graph_that_the_hooks_changed(self, workers: int) -> None:
        def init(pipe: Any, info: Any) -> Any:
            return pipe.shuffle(5).map(with_draws).batch(2)

        def reset(pipe: Any, info: Any, seeds: Any) -> Any:
            return pipe.enumerate()

        def loader(workers: int) -> Any:
            pipe = IterableWrapper(range(40)).sharding_filter()
            options = {"worker_init_fn": init, "worker_reset_fn": reset, "snapshot_every": 3}
            return loader_of(pipe, workers, 2, **options)

        with loader(0) as first:
            expected = list(first)
        with loader(workers) as first, loader(0) as second:
            iterator = iter(first)
            for given in range(len(expected)):
                second.load_state_dict(through_json(first.state_dict()))
                assert list(second) == expected[given:]
                assert next(iterator) == expected[given]


def test_one_service_may_serve_several_loaders() -> None:
    service = MultiProcessingReadingService(1)
    pipe = IterableWrapper(range(5)).sharding_filter()
    with DataLoader2(pipe, reading_service=service) as first, DataLoader2(pipe, reading_service=service) as second:
        assert list(zip(first, second, strict=True)) == [(x, x) for x in range(5)]


def test_torchdata_s_prefetch_counts() -> None:
    assert MultiProcessingReadingService(2).prefetch == 4
    assert MultiProcessingReadingService(2, worker_prefetch_cnt=2, main_prefetch_cnt=7).prefetch == 7
    assert MultiProcessingReadingService(2, worker_prefetch_cnt=0, main_prefetch_cnt=0).prefetch == 1
    assert MultiProcessingReadingService(2, worker_prefetch_cnt=9, prefetch=3).prefetch == 3


def test_an_adapter_may_return_another_graph() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader2(IterableWrapper(range(5)), lambda pipe: pipe.shuffle().sharding_filter())
        assert sorted(loader) == list(range(5))


def test_what_workers_are_forked_from_starts_with_the_loader() -> None:
    process.stop_forkserver()
    pipe = IterableWrapper(range(4))
    with DataLoader2(pipe), DataLoader2(pipe, reading_service=MultiProcessingReadingService(1, "spawn")):
        assert process._server.pid is None
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(1)) as loader:
        server = process._server.pid
        assert server is not None
        assert list(loader) == [0, 1, 2, 3]
        assert process._server.pid == server
