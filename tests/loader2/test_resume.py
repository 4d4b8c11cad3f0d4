"""A loader goes on exactly where its state was saved: at every batch, from any number of workers to any other."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
from loading import N, loader_of, plain, source, take, through_json, two_epochs, with_draws

from pipes import IterDataPipe, MapDataPipe
from pipes.errors import StaleIteratorError, StateError
from pipes.iter import IterableWrapper
from pipes.map import SequenceWrapper
from pipes.saved import sealed

pytestmark = pytest.mark.usefixtures("no_residue")


class TestResume:
    """D11: N=50 -> shuffle(7) -> shard -> map with draws -> batch 3, whatever the number of workers."""

    STREAMS = 3

    @staticmethod
    def make() -> IterDataPipe[Any]:
        return IterableWrapper(range(N)).shuffle(7).sharding_filter().map(with_draws).batch(3)

    def clean(self) -> list[Any]:
        with loader_of(self.make(), 0, self.STREAMS) as loader:
            return two_epochs(loader)

    @pytest.mark.parametrize(("workers", "then"), [(0, 1), (1, 3), (3, 0), (2, 2)])
    def test_at_every_batch(self, workers: int, then: int) -> None:
        expected = self.clean()
        count = len(expected[0])
        states = []
        with loader_of(self.make(), workers, self.STREAMS, prefetch=4, snapshot_every=4) as loader:
            iterator = iter(loader)
            for k in range(count + 1):
                state = loader.state_dict()
                assert len(json.dumps(state)) < 100_000
                states.append(through_json(state))
                assert plain(next(iterator, None)) == (expected[0][k] if k < count else None)
            states.append(through_json(loader.state_dict()))
            assert loader.epoch == 1
        with loader_of(self.make(), then, prefetch=4, seed=99) as loader:
            for k, state in enumerate(states):
                loader.load_state_dict(state)
                assert loader.epoch == (0 if k <= count else 1)
                assert loader.state_dict() == state
                if k <= count:
                    assert plain(list(loader)) == expected[0][k:], k
                assert plain(list(loader)) == expected[1], k

    def test_in_new_processes(self, tmp_path: Path) -> None:
        expected = self.clean()
        states = []
        with loader_of(self.make(), 3, self.STREAMS) as loader:
            iterator = iter(loader)
            for _ in expected[0]:
                states.append(loader.state_dict())
                next(iterator)
            states.append(loader.state_dict())
            assert next(iterator, None) is None
            states.append(loader.state_dict())
        script = tmp_path / "resume.py"
        script.write_text(
            textwrap.dedent("""
            import json, random, sys, numpy, torch
            from pipes.iter import IterableWrapper
            from pipes.loader2 import DataLoader2, MultiProcessingReadingService
            def with_draws(x):
                return x, random.random(), float(numpy.random.rand()), torch.rand(1).item()
            with_draws.__module__ = "loading"
            graph = IterableWrapper(range(50)).shuffle(7).sharding_filter().map(with_draws).batch(3)
            loaders = [DataLoader2(graph, reading_service=MultiProcessingReadingService(n)) for n in (0, 1, 3)]
            runs = []
            for number, state in enumerate(json.load(sys.stdin)):
                loader = loaders[number % 3]
                loader.load_state_dict(state)
                runs.append([list(loader), list(loader)])
            for loader in loaders:
                loader.shutdown()
            print(json.dumps(runs))
            """)
        )
        found = subprocess.run(
            [sys.executable, "-W", "error", str(script)],
            input=json.dumps(states),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 0, found.stderr
        runs = json.loads(found.stdout)
        assert [run[0] for run in runs[:-1]] == [expected[0][k:] for k in range(len(states) - 1)]
        assert [run[1] for run in runs[:-1]] == [expected[1]] * (len(states) - 1)
        # the end was seen before the last state was saved
        assert runs[-1][0] == expected[1]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_chains(self, workers: int) -> None:
        expected = self.clean()[0]
        with loader_of(self.make(), workers, self.STREAMS) as loader:
            given: list[Any] = []
            for count in (5, 4, 1, 0, 3):
                iterator = iter(loader)
                given += take(iterator, count)
                state = through_json(loader.state_dict())
                loader.load_state_dict(state)
                assert loader.state_dict() == state
            assert plain(given + list(loader)) == expected

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_load_after_iter_is_honoured(self, workers: int) -> None:
        expected = self.clean()
        with loader_of(self.make(), workers, self.STREAMS) as loader:
            iterator = iter(loader)
            take(iterator, 6)
            state = through_json(loader.state_dict())
            take(iterator, 2)
            loader.load_state_dict(state)
            with pytest.raises(StaleIteratorError, match="load_state_dict"):
                next(iterator)
            # an iterator that was never asked does not use the state up
            iter(loader)
            assert through_json(loader.state_dict())["streams"].keys() == state["streams"].keys()
            assert two_epochs(loader) == [expected[0][6:], expected[1]]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_refused_load_leaves_a_running_epoch_alone(self, workers: int) -> None:
        expected = self.clean()
        with loader_of(self.make(), workers, self.STREAMS) as loader:
            iterator = iter(loader)
            given = take(iterator, 6)
            state = through_json(loader.state_dict())
            for bad in (None, {}, {**state, "seed": 4}, sealed({**state, "streams": {"0": state["streams"]["1"]}})):
                with pytest.raises(StateError):
                    loader.load_state_dict(bad)
                assert through_json(loader.state_dict()).keys() == state.keys()
                given += take(iterator, 1)
            assert [plain(given + list(iterator)), plain(list(loader))] == expected

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_load_after_iter_before_the_first_batch(self, workers: int) -> None:
        expected = self.clean()
        with loader_of(self.make(), workers, self.STREAMS) as loader:
            take(iter(loader), 6)
            state = through_json(loader.state_dict())
            iterator = iter(loader)
            loader.load_state_dict(state)
            with pytest.raises(StaleIteratorError, match="load_state_dict"):
                next(iterator)
            assert two_epochs(loader) == [expected[0][6:], expected[1]]

    def test_draws_above_a_buffer(self) -> None:
        def make(rng: bool) -> IterDataPipe[Any]:
            function: Any = (lambda x, rng: (x, rng.random())) if rng else (lambda x: (x, random.random()))
            return source().sharding_filter().map(function, rng=rng).shuffle(7).batch(3)

        def ids(epochs: list[Any]) -> list[Any]:
            return [[[x[0] for x in batch] for batch in epoch] for epoch in epochs]

        for workers in (0, 1, 3):
            for rng in (True, False):
                with loader_of(make(rng), workers, 3) as loader:
                    expected = two_epochs(loader)
                    told: list[str] = []
                    for k in range(0, len(expected[0]) + 1, 1 if rng else 6):
                        loader.seed(3)
                        take(iter(loader), k)
                        with warnings.catch_warnings(record=True) as caught:
                            warnings.simplefilter("always")
                            state = loader.state_dict()
                            loader.state_dict()
                        told += [str(warning.message) for warning in caught]
                        loader.load_state_dict(through_json(state))
                        rest = two_epochs(loader)
                        assert ids(rest) == ids([expected[0][k:], expected[1]])
                        assert not rng or rest == [expected[0][k:], expected[1]]
                assert len(told) == (0 if rng else 1)
                if not rng:
                    assert "above stage 3:Shuffler draw from the global generators" in told[0]
                    assert "rng=True" in told[0]

    def test_functions_that_draw_nothing_or_below_the_buffer_are_not_told(self) -> None:
        make = source().sharding_filter().map(str).shuffle(7).map(with_draws).batch(3)
        with loader_of(make, 2, 2) as loader:
            take(iter(loader), 3)
            loader.state_dict()

    def test_the_source_is_iterated_once_a_load(self) -> None:
        opened = []

        class Source:
            def __iter__(self) -> Any:
                opened.append(1)
                return iter(range(N))

        make = IterableWrapper(Source(), deepcopy=False).sharding_filter().shuffle(7).batch(3)
        loader = loader_of(make)
        expected = list(loader)
        loader.seed(3)
        take(iter(loader), 9)
        state = loader.state_dict()
        opened.clear()
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert list(loader) == expected[9:]
        assert opened == [1]

    @pytest.mark.filterwarnings("ignore:.*stands above 4.ShardingFilter")
    @pytest.mark.parametrize("place", ["above", "below"])
    def test_a_million_elements_are_not_replayed(self, place: str, tmp_path: Path) -> None:
        count, size, at = 1_000_000, 100, 9_000
        log = tmp_path / "calls"

        class Source(MapDataPipe[int]):
            def __len__(self) -> int:
                return count

            def __getitem__(self, index: int) -> int:
                with log.open("ab") as file:
                    file.write(b".")
                return index

        def called(element: int) -> int:
            with log.open("ab") as file:
                file.write(b".")
            return element

        def graph(source: Any, function: Any) -> IterDataPipe[Any]:
            pipe = source.to_iter_datapipe()
            if place == "above":
                return pipe.map(function).shuffle(1000).sharding_filter().map(function).batch(size)
            return pipe.sharding_filter().map(function).shuffle(1000).map(function).batch(size)

        # an equal graph without the cost tells where the run stands and what follows
        light = loader_of(graph(SequenceWrapper(range(count)), abs), 0, 2)
        iterator = iter(light)
        for _ in itertools.islice(iterator, at):
            pass
        state = json.loads(json.dumps(light.state_dict()).replace("0:SequenceWrapper", "0:Source"))
        expected = take(iterator, 10)
        for workers in (0, 2):
            with loader_of(graph(Source(), called), workers, 2, prefetch=1) as loader:
                state = sealed({**state, "graph": loader.state_dict()["graph"]})
                log.write_bytes(b"")
                loader.load_state_dict(state)
                assert take(iter(loader), 10) == expected
            assert 2000 <= log.stat().st_size <= 15_000
