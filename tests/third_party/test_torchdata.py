"""torchdata 0.11: its StatefulDataLoader over a pipe, a pipe as the source of its nodes, a node as our source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchdata.nodes as nodes
from loading import loader_of, take
from torchdata.stateful_dataloader import StatefulDataLoader

from pipes import IterDataPipe
from pipes.errors import StateError
from pipes.iter import IterableWrapper

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

N = 60


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


class TestStatefulDataLoader:
    @staticmethod
    def graph() -> IterDataPipe[Any]:
        return IterableWrapper(range(N)).shuffle(20).sharding_filter().map(lambda x, rng: x + rng.random(), rng=True)

    def loader(self, workers: int, pipe: Any = None, **options: Any) -> Any:
        context = "fork" if workers else None
        pipe = pipe or self.graph().shuffle(5)
        return StatefulDataLoader(pipe, batch_size=4, num_workers=workers, multiprocessing_context=context, **options)

    @pytest.fixture(autouse=True)
    def _seed(self) -> Iterator[None]:
        seed, state = torch.initial_seed(), torch.get_rng_state()
        torch.manual_seed(7)
        yield
        torch.default_generator.manual_seed(seed)
        torch.set_rng_state(state)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_it_goes_on_in_mid_epoch(self, workers: int) -> None:
        loader = self.loader(workers)
        list(loader)
        iterator, states, batches = iter(loader), [], []
        for batch in iterator:
            batches.append(batch.tolist())
            states.append(loader.state_dict())
        assert len(batches) >= N // 4
        for at in (0, 1, 6, *range(len(batches) - 3, len(batches) - 1)):
            torch.manual_seed(99)
            again = self.loader(workers)
            again.load_state_dict(states[at])
            assert [batch.tolist() for batch in again] == batches[at + 1 :], at

    def test_a_graph_that_forks(self) -> None:
        def graph() -> Any:
            one, two = IterableWrapper(range(N)).shuffle(9).fork(2)
            return one.zip(two.map(lambda x: 10 * x)).sharding_filter()

        loader = self.loader(2, graph())
        iterator = iter(loader)
        take(iterator, 5)
        state = loader.state_dict()
        rest = [[part.tolist() for part in batch] for batch in iterator]
        again = self.loader(2, graph())
        again.load_state_dict(state)
        assert [[part.tolist() for part in batch] for batch in again] == rest

    def test_chained_resumes(self) -> None:
        loader = self.loader(2)
        iterator = iter(loader)
        given, state = take(iterator, 3), loader.state_dict()
        rest = [plain(batch) for batch in iterator]
        again = self.loader(2)
        again.load_state_dict(state)
        middle = [plain(batch) for batch in take(iter(again), 4)]
        last = self.loader(2)
        last.load_state_dict(again.state_dict())
        assert middle + [plain(batch) for batch in last] == rest
        assert len(given) + len(rest) == 16

    def test_it_goes_straight_there(self) -> None:
        made: list[int] = []

        def made_of(x: int) -> int:
            made.append(x)
            return x

        def graph() -> Any:
            return IterableWrapper(range(100_000)).map(made_of)

        loader = self.loader(0, graph())
        take(iter(loader), 10_000)
        state = loader.state_dict()
        made.clear()
        again = self.loader(0, graph())
        again.load_state_dict(state)
        assert next(iter(again)).tolist() == [40_000, 40_001, 40_002, 40_003]
        assert len(made) < 100

    def test_another_number_of_workers_is_refused(self) -> None:
        loader = self.loader(1)
        take(iter(loader), 2)
        state = loader.state_dict()
        # torchdata itself compares the number; what gets past it is compared here.
        snapshot = state["_snapshot"]
        snapshot["_main_snapshot"]["_num_workers"] = 2
        snapshot["_worker_snapshots"]["worker_1"] = snapshot["_worker_snapshots"]["worker_0"]
        again = self.loader(2)
        again.load_state_dict(state)
        with pytest.raises(StateError, match=r"saved in stream 0 of 1 .*and this is stream . of 2"):
            list(again)


class TestNodes:
    @staticmethod
    def pipe(above: bool = True) -> IterDataPipe[Any]:
        source: IterDataPipe[Any] = IterableWrapper(range(N)).shuffle(20)
        source = source if above else source.sharding_filter()
        return source.map(lambda x, rng: (x, rng.random()), rng=True)

    @pytest.mark.parametrize("kind", ["pipe", "loader in process", "loader with workers"])
    def test_a_pipe_or_loader_as_the_source(self, kind: str) -> None:
        def make() -> Any:
            source: Any = self.pipe()
            if kind != "pipe":
                source = loader_of(self.pipe(above=False), 2 if kind == "loader with workers" else 0, 2)
            return source, nodes.Loader(nodes.Batcher(nodes.IterableWrapper(source), 4, drop_last=False))

        source, loader = make()
        first = list(loader)
        iterator = iter(loader)
        given = take(iterator, 5)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(iterator)
        assert sorted(x for batch in given + rest for x, _ in batch) == list(range(N))
        assert given + rest != first
        fresh, again = make()
        again.load_state_dict(state)
        assert list(again) == rest
        for each in (source, fresh):
            if kind != "pipe":
                each.shutdown()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_node_as_our_source(self, workers: int) -> None:
        def make() -> Any:
            source = nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(N)), 3))
            return loader_of(IterableWrapper(source).shuffle(5).sharding_filter(), workers, 2)

        with make() as loader:
            whole = list(loader)
            assert sorted(x for batch in whole for x in batch) == list(range(N))
            second = iter(loader)
            given = take(second, 7)
            state = json.loads(json.dumps(loader.state_dict()))
            rest = list(second)
        assert given + rest != whole
        with make() as again:
            again.load_state_dict(state)
            assert list(again) == rest
