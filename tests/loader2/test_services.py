"""Services made of others: what can be combined, in which order, with which state; the end that ranks agree on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from loading import take, through_json

from pipes.errors import GraphError, RankError
from pipes.iter import IterableWrapper
from pipes.loader2 import (
    DataLoader2,
    DistributedReadingService,
    InProcessReadingService,
    MultiProcessingReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)
from pipes.loader2.adapter import Shuffle
from pipes.loader2.fake_device import FakeDevice
from pipes.loader2.full_sync import FullSync
from pipes.loader2.in_process import InProcessEngine
from pipes.loader2.reading_service import BuiltIn

pytestmark = pytest.mark.usefixtures("no_residue")

COUNT = 12


class Own(ReadingServiceInterface):
    """Adds its name to every element, and to a list at every call."""

    calls: list[str]

    def __init__(self, name: str, fails_in: str = "") -> None:
        self.name, self.fails_in = name, fails_in

    def note(self, hook: str) -> None:
        self.calls.append(f"{hook} {self.name}")
        if hook == self.fails_in:
            raise OSError(self.name)

    def initialize(self, datapipe: Any) -> Any:
        self.note("initialize")
        return datapipe.map(lambda x: f"{x}{self.name}")

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        self.note("begin")
        return None if self.name == "a" else lambda pipe: pipe.map(lambda x: f"{x}-{self.name}")

    def finalize_iteration(self) -> None:
        self.note("end")

    def finalize(self) -> None:
        self.note("finalize")

    def _pause(self) -> None:
        self.note("pause")


@pytest.fixture(autouse=True)
def calls() -> list[str]:
    Own.calls = []
    return Own.calls


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def numbers() -> Any:
    return IterableWrapper(range(COUNT)).shuffle(5).sharding_filter()


class TestSequence:
    def test_own_ones_in_their_order_and_back(self, calls: list[str]) -> None:
        service = SequentialReadingService(
            Own("a"), SequentialReadingService(Own("b"), InProcessReadingService()), Own("c")
        )
        with DataLoader2(IterableWrapper(range(2)), reading_service=service) as loader:
            iterator = iter(loader)
            assert next(iterator) == "0abc-b-c"
            iterator.pause()
            assert list(loader) == ["0abc-b-c", "1abc-b-c"]
        hooks = [("initialize", "abc"), ("begin", "abc"), ("pause", "abc"), ("end", "cba"), ("begin", "abc")]
        hooks += [("end", "cba"), ("finalize", "cba")]
        assert calls == [f"{hook} {name}" for hook, names in hooks for name in names]

    def test_what_fails_is_undone(self, calls: list[str]) -> None:
        pipe = IterableWrapper(range(2))
        service = SequentialReadingService(Own("a"), Own("b", "initialize"), Own("c"))
        with DataLoader2(pipe, reading_service=service) as loader, pytest.raises(OSError, match="b"):
            iter(loader)
        assert calls == ["initialize a", "initialize b", "finalize a"]
        calls.clear()
        service = SequentialReadingService(Own("a", "finalize"), Own("b", "begin"), Own("c", "finalize"))
        loader = DataLoader2(pipe, reading_service=service)
        with pytest.raises(OSError, match="b"):
            iter(loader)
        with pytest.raises(OSError, match="a"):
            loader.shutdown()
        assert calls[3:] == ["begin a", "begin b", "end b", "end a", "finalize c", "finalize b", "finalize a"]

    def test_a_state_goes_on_under_any_of_them(self, alone: None) -> None:
        services: list[Any] = [
            InProcessReadingService(),
            SequentialReadingService(),
            DistributedReadingService(),
            SequentialReadingService(DistributedReadingService(), MultiProcessingReadingService(2)),
            SequentialReadingService(MultiProcessingReadingService(1), DistributedReadingService()),
        ]
        with DataLoader2(numbers(), num_streams=2) as loader:
            loader.seed(4)
            expected = list(loader)
        for first, second in itertools.pairwise([*services, services[0]]):
            with DataLoader2(numbers(), [Shuffle(True)], first, num_streams=2) as loader:
                loader.seed(4)
                given, state = take(iter(loader), 5), through_json(loader.state_dict())
            with DataLoader2(numbers(), reading_service=second) as loader:
                loader.load_state_dict(state)
                assert given + list(loader) == expected
        assert [getattr(each, "num_workers", 0) for each in services] == [0, 0, 0, 2, 1]

    @pytest.mark.parametrize(
        ("services", "kind", "message"),
        [
            (
                [MultiProcessingReadingService(1), InProcessReadingService()],
                GraphError,
                "leave one of MultiP.*, InProc",
            ),
            ([DistributedReadingService(), DistributedReadingService()], GraphError, "ends on all ranks once"),
            ([Own("a"), MultiProcessingReadingService(1)], GraphError, "Own adapts .* use worker_init_fn="),
            (
                [InProcessReadingService(reset_fn=print), Own("a")],
                GraphError,
                "InProcessReadingService runs or changes",
            ),
            ([MultiProcessingReadingService], TypeError, "takes reading services, not <class"),
            ([3], TypeError, "takes reading services, not 3"),
        ],
        ids=range(6),
    )
    def test_what_cannot_be_combined(self, services: list[Any], kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            SequentialReadingService(*services)

    def test_a_graph_that_cannot_travel_is_refused_with_the_loader(self) -> None:
        lock = threading.Lock()
        service = SequentialReadingService(MultiProcessingReadingService(1))
        with pytest.raises(GraphError, match="cannot be sent"):
            DataLoader2(IterableWrapper(range(4)).map(lambda x: (x, lock)), reading_service=service)


class TestDistributed:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_without_a_group_it_says_what_to_call(self, workers: int) -> None:
        service = SequentialReadingService(DistributedReadingService(), MultiProcessingReadingService(workers))
        with DataLoader2(numbers(), reading_service=service) as loader:
            assert len(loader) == COUNT
            with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) before iter"):
                iter(loader)

    def test_one_rank_needs_no_agreement(self, alone: None) -> None:
        with DataLoader2(numbers(), reading_service=DistributedReadingService()) as loader:
            assert sorted(loader) == list(range(COUNT))
            assert type(loader._runner) is InProcessEngine

    def test_the_timeout_is_a_number_of_seconds(self) -> None:
        with pytest.raises(ValueError, match="above 0, not 0"):
            DistributedReadingService(0)
        with pytest.raises(TypeError, match="number of seconds, not '5'"):
            DistributedReadingService("5")  # type: ignore[arg-type]


class Agreed(BuiltIn):
    """Ends together with ranks that are not there: `answers` stands for what they say at each output."""

    ends_together = True

    def __init__(self, workers: int, answers: list[Any]) -> None:
        self.place, self.num_workers = MultiProcessingReadingService(workers), workers
        self.answers, self.closed = answers, 0

    def start(self, *arguments: Any) -> Any:
        return self.place.start(*arguments)

    def around(self, runner: Any) -> Any:
        return FullSync(runner, self)  # type: ignore[arg-type]

    def begin(self, plan: Any) -> None:
        pass

    def agree(self, *, has: bool = True, what: str = "") -> bool:
        answer = self.answers.pop(0) if what and self.answers else has
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)

    def tell(self, error: BaseException, what: str = "") -> None:
        pass

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_above_a_device(workers: int) -> None:
    def loader(answers: list[Any]) -> DataLoader2[Any]:
        made: DataLoader2[Any] = DataLoader2(
            numbers().batch(2), None, Agreed(workers, answers), num_streams=2, device=FakeDevice()
        )
        made.seed(4)
        return made

    with loader([]) as first:
        epochs = [list(first), list(first)]
    with loader([True, True, False, True, KeyboardInterrupt()]) as first:
        iterator = iter(first)
        for number, batch in enumerate(iterator):
            assert batch == epochs[0][number]
            with loader([]) as second:
                second.load_state_dict(through_json(first.state_dict()))
                assert list(second) == epochs[0][number + 1 :]
        assert (first.epoch, number) == (1, 1)
        iterator = iter(first)
        assert next(iterator) == epochs[1][0]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        # the output that was there while they could not agree was not given
        with loader([]) as second:
            second.load_state_dict(through_json(first.state_dict()))
            assert list(second) == epochs[1][1:]
        assert first.stats()["batches"] == 3
    assert first.reading_service.closed == 1


def test_a_forked_child_is_told() -> None:
    service = Agreed(0, [])
    with DataLoader2(numbers(), reading_service=service) as loader:
        iterator = iter(loader)
        next(iterator)
        runner: Any = loader._runner
        runner._pid, own = 0, runner._pid
        for use in (lambda: next(iterator), lambda: iter(loader)):
            with pytest.raises(RuntimeError, match=r"was forked from a rank .* has no process group"):
                use()
        runner.close()
        assert service.closed == 0
        runner._pid = own
    assert service.closed == 1


def test_an_error_of_another_rank_ends_the_epoch() -> None:
    service = Agreed(0, [True, RankError("rank 1 failed", rank=1)])
    with DataLoader2(numbers(), reading_service=service) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(RankError) as raised:
            next(iterator)
        assert raised.value.rank == 1
        with pytest.raises(RuntimeError, match="failed with RankError"):
            next(iterator)
        assert len(list(loader)) == COUNT
