"""Equal batches in equal order for any number of workers and ranks, and a resume from any of them to any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from loading import loader_of, plain, take, through_json, with_draws

from pipes import IterDataPipe
from pipes.errors import StateError
from pipes.iter import IterableWrapper
from pipes.loader2 import GatheredState

pytestmark = pytest.mark.usefixtures("no_residue")

STREAMS = 8
N = 100


def graph() -> IterDataPipe[Any]:
    return IterableWrapper(range(N)).shuffle(20).sharding_filter().shuffle(4).map(with_draws).batch(3)


def tails() -> IterDataPipe[Any]:
    """Streams of very different lengths, so that some end long before the others."""
    pipe = IterableWrapper(range(N)).shuffle(20).sharding_filter().map(lambda x, rng: (x, rng.random()), rng=True)
    pipe = pipe.batch(3).filter(lambda batch: sum(x for x, _ in batch) % 4 > 0).unbatch().shuffle(4)
    return pipe.batch(2, drop_last=True).map(lambda batch: [with_draws(x) for x in batch])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives the loader of one rank: it stands for torch.distributed."""

    def make(pipe: IterDataPipe[Any], workers: int, rank: int, world: int, streams: int | None = STREAMS) -> Any:
        monkeypatch.setattr("pipes.loader2.loader.rank_and_world", lambda: (rank, world))
        return loader_of(pipe, workers, streams, prefetch=2, snapshot_every=3)

    return make


def epochs_of(loader: Any) -> list[Any]:
    with loader:
        return [plain(list(loader)), plain(list(loader))]


def merged(streams: dict[int, list[Any]], given: dict[int, int]) -> list[Any]:
    """Return what the streams have yet to give: always from the one that gave least, the lowest number first."""
    given, order = dict(given), []
    while living := [number for number in streams if given[number] < len(streams[number])]:
        number = min(living, key=lambda each: (given[each], each))
        order.append(streams[number][given[number]])
        given[number] += 1
    return order


def by_stream(pipe: IterDataPipe[Any], ranks: Any) -> list[dict[int, list[Any]]]:
    """Return what each stream gives in two epochs: that of a rank that runs no other."""
    both = {number: epochs_of(ranks(pipe, 0, number, STREAMS)) for number in range(STREAMS)}
    return [{number: epochs[place] for number, epochs in both.items()} for place in (0, 1)]


@pytest.mark.parametrize("make", [graph, tails])
def test_the_order_is_the_same_for_any_numbers(make: Any, ranks: Any) -> None:
    streams = by_stream(make(), ranks)
    whole = [merged(each, dict.fromkeys(each, 0)) for each in streams]
    assert len(whole[0]) > 15
    assert len({len(each) for each in streams[0].values()}) > 1
    for workers, world in ((0, 1), (1, 1), (2, 1), (3, 1), (8, 1), (0, 2), (3, 2), (0, 4), (2, 4)):
        parts = [epochs_of(ranks(make(), workers, rank, world)) for rank in range(world)]
        for epoch in (0, 1):
            for rank in range(world):
                own = {number: each for number, each in streams[epoch].items() if number % world == rank}
                assert parts[rank][epoch] == merged(own, dict.fromkeys(own, 0)), (workers, world, rank)
            if make is graph:  # whose streams differ by one batch at most: ranks in turn give the order of one
                turns = zip_longest(*(part[epoch] for part in parts))
                assert [batch for turn in turns for batch in turn if batch is not None] == whole[epoch]
            elif world == 1:
                assert parts[0][epoch] == whole[epoch]


@pytest.mark.parametrize(("workers", "world"), [(0, 1), (3, 1), (8, 1), (2, 2), (0, 2), (1, 4)])
def test_a_resume_goes_from_any_numbers_to_any_other(workers: int, world: int, ranks: Any) -> None:
    streams, second = by_stream(tails(), ranks)
    at = 3
    states: list[Any] = []
    given: dict[int, int] = {}
    for rank in range(world):
        with ranks(tails(), workers, rank, world) as loader:
            take(iter(loader), at)
            states.append(through_json(loader.state_dict()))
        given.update({int(number): each["given"] for number, each in states[-1]["streams"].items()})
    assert sum(given.values()) == at * world
    for workers_then, world_then in ((0, 1), (2, 1), (3, 2), (0, 4)):
        for rank in range(world_then):
            loader = ranks(tails(), workers_then, rank, world_then, None)
            loader.load_state_dict(states if world > 1 else states[0])
            own = [number for number in range(STREAMS) if number % world_then == rank]
            assert epochs_of(loader) == [
                merged({number: streams[number] for number in own}, given),
                merged({number: second[number] for number in own}, dict.fromkeys(own, 0)),
            ], (at, workers_then, world_then, rank)


def test_the_state_of_one_rank_is_enough_for_the_same_world(ranks: Any) -> None:
    with ranks(graph(), 0, 1, 2) as loader:
        whole = plain(list(loader))
        loader.seed(3)
        take(iter(loader), 6)
        state = through_json(loader.state_dict())
    with ranks(graph(), 2, 1, 2, None) as loader:
        loader.load_state_dict(state)
        assert plain(list(loader)) == whole[6:]
    with (
        ranks(graph(), 0, 0, 2, None) as loader,
        pytest.raises(StateError, match=r"lacks streams \[0, 2, 4, 6\] of rank 0"),
    ):
        loader.load_state_dict(state)
    with ranks(graph(), 0, 0, 3, None) as loader, pytest.raises(StateError, match="8 streams cannot be spread over 3"):
        loader.load_state_dict(state)


class TestAGroupThatBeginsLater:
    """Trainers begin the process group when they have been given the loader."""

    def begin(self, monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
        monkeypatch.setattr("pipes.loader2.loader.rank_and_world", lambda: (rank, world))

    def test_the_loader_takes_its_share(self, monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
        for streams in (None, STREAMS):
            expected = epochs_of(ranks(graph(), 2, 1, 2, streams))
            self.begin(monkeypatch, 0, 1)
            loader = loader_of(graph(), 2, streams)
            assert len(loader) == 2 * len(expected[0]) or streams is None
            self.begin(monkeypatch, 1, 2)
            assert len(loader) == len(expected[0])
            assert epochs_of(loader) == expected

    def test_a_state_that_was_loaded_before(self, monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
        with ranks(graph(), 0, 0, 1) as loader:
            take(iter(loader), 6)
            state = loader.state_dict()
        for rank in (0, 1):
            with ranks(graph(), 0, rank, 2, None) as loader:
                loader.load_state_dict(state)
                expected = plain(list(loader))
            with ranks(graph(), 0, 0, 1, None) as loader:
                loader.load_state_dict(state)
                self.begin(monkeypatch, rank, 3)
                with pytest.raises(StateError, match="8 streams cannot be spread over 3"):
                    iter(loader)
                self.begin(monkeypatch, rank, 2)
                assert plain(list(loader)) == expected

    def test_one_that_was_iterated_before_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with loader_of(graph(), 0, 2) as loader:
            take(iter(loader), 2)
            self.begin(monkeypatch, 1, 2)
            for use in (lambda: iter(loader), lambda: loader.load_state_dict(loader.state_dict())):
                with pytest.raises(RuntimeError, match="iterated by rank 0 of 1, and this is now rank 1 of 2"):
                    use()

    def test_the_end_of_a_group_changes_nothing(self, monkeypatch: pytest.MonkeyPatch, ranks: Any) -> None:
        expected = epochs_of(ranks(graph(), 0, 1, 2))
        with ranks(graph(), 0, 1, 2) as loader:
            first = plain(list(loader))
            self.begin(monkeypatch, 0, 1)
            assert [first, plain(list(loader))] == expected
            assert sorted(loader.state_dict()["streams"]) == ["1", "3", "5", "7"]


RANK = """
import json, sys
import torch, torch.distributed as dist
from loading import plain, through_json, with_draws
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, GatheredState, LightningLoader, MultiProcessingReadingService
rank, store = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(40 + rank)
graph = IterableWrapper(range(50)).shuffle(7).sharding_filter().map(with_draws).batch(3)
def loader_of_rank():
    return DataLoader2(graph, reading_service=MultiProcessingReadingService(2 * rank), num_streams=4)
with loader_of_rank() as loader:
    # as trainers do, which begin the group when they are given the loader; a state asked for before tells nothing
    loader.state_dict()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    first = plain(list(loader))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    states = GatheredState(loader).state_dict()
    assert LightningLoader(loader).state_dict() == states and states[rank] == state
    rest = plain(list(iterator))
torch.manual_seed(60 + rank)
with loader_of_rank() as loader:
    loader.load_state_dict(through_json(states))
    again = [plain(list(loader)) for _ in range(2)]
print(json.dumps([first, state, rest, *again]))
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(tmp_path: Path) -> list[Any]:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    tests = Path(__file__).parents[1]
    path = os.pathsep.join((str(tests.parent), str(tests)))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [error for _, error in outputs]
    return [json.loads(output) for output, _ in outputs]


def test_ranks_of_a_process_group(tmp_path: Path) -> None:
    """Rank and world size are read from the group, the seed is rank 0's, and the states of both resume anywhere."""
    found = run_ranks(tmp_path)
    one = IterableWrapper(range(50)).shuffle(7).sharding_filter().map(with_draws).batch(3)
    with loader_of(one, 0, 4, seed=40) as loader:
        first, second, third = (plain(list(loader)) for _ in range(3))
    wholes, states, rests, resumed, next_epochs = zip(*found, strict=True)
    assert [state["seed"] for state in states] == [40, 40]
    assert [sorted(state["streams"]) for state in states] == [["0", "2"], ["1", "3"]]

    def in_turn(parts: Sequence[Any]) -> list[Any]:
        return [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]

    assert in_turn(wholes) == first
    assert in_turn(rests) == second[6:]
    with loader_of(one, 0, seed=1) as loader:
        loader.load_state_dict(list(states))
        assert plain(list(islice(loader, 4))) == second[6:10]
    assert in_turn(resumed) == second[6:]
    assert in_turn(next_epochs) == third


def test_a_rank_without_a_state_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def gather(states: list[Any], own: Any) -> None:
        told.append(own)
        states[:] = told if len(told) == 2 else [own, {}]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    for rank in range(2):
        monkeypatch.setattr("pipes.loader2.ranks.rank_and_world", lambda rank=rank: (rank, 2))
        with loader_of(graph(), 0, 2) as loader:
            if rank == 0:
                monkeypatch.setattr(loader, "state_dict", Mock(side_effect=StateError("no state")))
            with pytest.raises(StateError, match="no state") as caught:
                GatheredState(loader).state_dict()
    assert caught.value.__notes__ == ["raised in rank 0"]
    assert isinstance(told[1], dict)
