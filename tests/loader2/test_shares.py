"""What each stream reads: its own keys only, and no more of a limit than all streams together may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loading import loader_of, logged_calls, take, through_json

from pipes import IterDataPipe
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.map import SequenceWrapper

pytestmark = pytest.mark.usefixtures("no_residue")


def numbers(size: int = 40) -> IterDataPipe[int]:
    return IterableWrapper(range(size))


class TestNumbers:
    """Stages that go by an element's number give under automatic sharding what one process gives."""

    @pytest.mark.filterwarnings("ignore:the graph has no sharding_filter")
    @pytest.mark.parametrize("streams", [1, 2, 3])
    def test_limits_and_numbers_hold_for_the_whole_graph(self, streams: int) -> None:
        graphs = (
            numbers().header(7).map(str),
            numbers().filter(lambda x: x % 2 > 0).skip(3).batch(1),
            numbers().map(str).enumerate().map(list),
            numbers().header(20).shuffle(3).header(5).map(str),
        )
        for graph in graphs:
            with loader_of(graph) as loader:
                expected = list(loader)
            with loader_of(graph, 0, streams) as loader:
                found = list(loader)
            assert sorted(map(str, found)) == sorted(map(str, expected))
            assert len(expected) > 4


def rows(number: int) -> IterDataPipe[int]:
    return numbers(4).map(lambda row: 10 * number + row)


class TestNested:
    """A pipe that a function iterates for one element is read whole on every rank."""

    @pytest.mark.filterwarnings("ignore:the graph has no sharding_filter")
    @pytest.mark.parametrize(
        "graph",
        [
            lambda: numbers(3).sharding_filter().flatmap(rows),
            lambda: numbers(3).sharding_filter().threadpool_map(lambda number: list(rows(number))).unbatch(),
            lambda: IterableWrapper(numbers(3).flatmap(rows)),
            lambda: IterableWrapper(iter(range(3)), deepcopy=False).flatmap(rows).sharding_filter(),
            lambda: numbers(3).sharding_filter().flatmap(lambda number: list(DataLoader2(rows(number)))),
            lambda: IterableWrapper(DataLoader2(numbers(3).flatmap(rows))).sharding_filter(),
        ],
        ids=["flatmap", "threads", "wrapped", "dealt", "loader", "loader wrapped"],
    )
    def test_no_rank_loses_rows(self, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[int] = []
        for rank in range(2):
            for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", 2)):
                monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
            with loader_of(graph(), 0) as loader:
                found += loader
            # Outside of it, a rank has its share again.
            assert len(list(numbers(4))) == 2
        assert sorted(found) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


class TestKeys:
    """A map pipe right above the shard point: each stream reads its own keys."""

    @pytest.mark.parametrize("workers", [0, 1, 2])
    @pytest.mark.parametrize("shuffled", [False, True])
    def test_each_element_is_made_once_and_a_resume_goes_on(self, workers: int, shuffled: bool, tmp_path: Path) -> None:
        pipe: Any = SequenceWrapper(list(range(41))).map(logged_calls(tmp_path))
        keys = pipe.shuffle() if shuffled else pipe.to_iter_datapipe()
        # A batch of one is a unit of draws, from which a resume need not make anything again.
        graph = keys.map(str).batch(1).map("".join)
        with loader_of(graph, workers, 3, snapshot_every=1, prefetch=2) as loader:
            first = list(loader)
            assert (tmp_path / "calls").stat().st_size == 41
            assert sorted(map(int, first)) == list(range(41))
            assert shuffled or first == list(map(str, range(41)))
            iterator = iter(loader)
            second = take(iterator, 17)
            state = through_json(loader.state_dict())
            rest = list(iterator)
        with loader_of(graph, 0) as again:
            again.load_state_dict(state)
            (tmp_path / "calls").unlink()
            assert list(again) == rest
            assert (tmp_path / "calls").stat().st_size == 41 - 17
        assert sorted(map(int, second + rest)) == list(range(41))
