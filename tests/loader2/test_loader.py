"""The order of a loader, its lengths, its ranks, its automatic sharding, and what cannot travel."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
from loading import GRAPHS, N, loader_of, plain, source, take, through_json, two_epochs

from pipes import IterDataPipe
from pipes.errors import UnpicklableStageError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.map import SequenceWrapper
from pipes.stages.sharding import SHARDING_PRIORITIES

pytestmark = pytest.mark.usefixtures("no_residue")


RANK, WORKER = SHARDING_PRIORITIES.DISTRIBUTED, SHARDING_PRIORITIES.MULTIPROCESSING


class TestOrder:
    @pytest.mark.parametrize("name", GRAPHS)
    def test_it_is_the_same_for_any_number_of_workers(self, name: str) -> None:
        make = GRAPHS[name]
        for streams in (1, 3):
            with loader_of(make(), 0, streams) as loader:
                expected = two_epochs(loader)
            for workers in (1, 2, 3)[: 3 if streams == 3 else 1]:
                with loader_of(make(), workers, streams) as loader:
                    assert two_epochs(loader) == expected, (workers, streams)

    def test_streams_share_the_elements_out(self) -> None:
        with loader_of(source().sharding_filter().batch(2), 2, 4) as loader:
            batches = list(loader)
        # stream s has s, s + 4, ...; a batch comes from each in turn
        assert batches[:5] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
        assert sorted(itertools.chain(*batches)) == list(range(N))

    def test_epochs_differ_and_seeds_decide(self) -> None:
        make = GRAPHS["both"]
        runs = []
        for seed in (1, 1, 2):
            with loader_of(make(), 2, 2, seed=seed) as loader:
                runs.append(two_epochs(loader))
        assert runs[0] == runs[1]
        elements = [[[x[0] for batch in epoch for x in batch] for epoch in run] for run in runs]
        assert elements[0][0] != elements[0][1] != elements[2][1] != elements[2][0] != elements[0][0]
        draws = [[tuple(x[1:]) for epoch in run for batch in epoch for x in batch] for run in (runs[0], runs[2])]
        assert not set(draws[0]) & set(draws[1])

    def test_seed_again_repeats_the_epochs(self) -> None:
        with loader_of(GRAPHS["both"](), 2, 2, seed=5) as loader:
            first = two_epochs(loader)
            loader.seed(5)
            assert loader.epoch == 0
            assert two_epochs(loader) == first

    def test_without_a_seed_torch_s_decides(self) -> None:
        def run() -> list[Any]:
            with DataLoader2(GRAPHS["both"]()) as loader:
                return two_epochs(loader)

        own = torch.initial_seed()
        state = torch.default_generator.get_state()
        try:
            torch.manual_seed(5)
            first = run()
            torch.manual_seed(6)
            other = run()
            torch.manual_seed(5)
            assert run() == first != other
        finally:
            torch.manual_seed(own)
            torch.default_generator.set_state(state)

    @pytest.mark.parametrize("seed", [-1, 2**64])
    def test_a_seed_has_64_bits(self, seed: int) -> None:
        loader = DataLoader2(source())
        with pytest.raises(ValueError, match="2\\*\\*64"):
            loader.seed(seed)
        loader.seed(2**64 - 1)
        assert len(list(loader)) == N
        assert len(list(loader)) == N

    def test_a_seed_in_mid_epoch_begins_with_the_next(self) -> None:
        loader = loader_of(GRAPHS["shuffled data"](), seed=4)
        expected = two_epochs(loader)
        loader.seed(8)
        iterator = iter(loader)
        take(iterator, 3)
        loader.seed(4)
        for _ in iterator:
            pass
        assert two_epochs(loader) == expected


class Ranks:
    """Stands for torch.distributed: every loader made inside is that of one rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def set(self, rank: int, world: int) -> None:
        self.patch.setattr("pipes.loader2.loader.rank_and_world", lambda: (rank, world))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


class TestRanks:
    def test_any_world_gives_the_same_global_order(self, ranks: Ranks) -> None:
        make = GRAPHS["shuffled data"]
        orders = {}
        for world in (1, 2, 4):
            parts = []
            for rank in range(world):
                ranks.set(rank, world)
                with loader_of(make(), 0, 4) as loader:
                    parts.append(plain(list(loader)))
            orders[world] = [part for group in itertools.zip_longest(*parts) for part in group if part is not None]
        assert orders[1] == orders[2] == orders[4]
        assert len(orders[1]) == 18

    def test_the_default_is_workers_times_ranks(self, ranks: Ranks) -> None:
        ranks.set(1, 4)
        assert loader_of(source(), 3).num_streams == 12
        assert loader_of(source(), 0).num_streams == 4
        with pytest.raises(ValueError, match="multiple of the world size 4"):
            loader_of(source(), 3, 6)

    def test_every_element_comes_once_over_ranks_and_workers(self, ranks: Ranks) -> None:
        seen, orders = [], []
        for rank in range(2):
            ranks.set(rank, 2)
            with loader_of(IterableWrapper(range(1000)).shuffle(1000).sharding_filter(), 3) as loader:
                epochs = [list(loader), list(loader)]
            seen += epochs[0]
            orders.append(epochs)
            assert epochs[0] != epochs[1]
        assert sorted(seen) == list(range(1000))

    def test_states_of_all_ranks_resume_in_another_world(self, ranks: Ranks) -> None:
        make = GRAPHS["shuffled data"]
        ranks.set(0, 1)
        loader = loader_of(make(), 0, 4)
        whole = [plain(list(loader)), plain(list(loader))]
        states = []
        for rank in range(2):
            ranks.set(rank, 2)
            loader = loader_of(make(), 0, 4)
            take(iter(loader), 3)
            states.append(through_json(loader.state_dict()))
        ranks.set(0, 1)
        with loader_of(make(), 2) as loader:
            loader.load_state_dict(states)
            assert two_epochs(loader) == [whole[0][6:], whole[1]]
        with pytest.raises(ValueError, match=r"lacks streams \[1, 3\] of rank 0.*states of all ranks"):
            loader.load_state_dict(states[0])


class TestLength:
    @pytest.mark.parametrize("streams", [1, 3, 4])
    @pytest.mark.parametrize("count", [0, 1, 3, 10, 50])
    def test_it_is_what_comes(self, streams: int, count: int) -> None:
        def source() -> IterDataPipe[int]:
            return IterableWrapper(range(count))

        two = source().fork(2)
        graphs = [
            source().sharding_filter().batch(4),
            source().sharding_filter().batch(4, drop_last=True),
            source().batch(4).sharding_filter(),
            source().batch(4),
            source().shuffle(5).batch(2).map(len).header(3),
            source().zip(source()).batch(3),
            source().sharding_filter().enumerate().skip(1),
            source().sharding_filter().batch(2, drop_last=True).concat(source().sharding_filter().batch(3)),
            source().sharding_filter().mux(source().skip(2).sharding_filter()),
            source().sharding_filter(RANK).sharding_filter(WORKER).batch(3),
            two[0].zip(two[1]).sharding_filter().batch(2),
        ]
        for graph in graphs:
            for sharding in ("auto", "replicate"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    loader = loader_of(graph, 0, streams, sharding=sharding)
                    assert len(loader) == len(list(loader)), (repr(graph), sharding)

    def test_unknown_names_the_stage(self) -> None:
        loader = loader_of(source().sharding_filter().filter(lambda x: x > 3).batch(2), 0, 2)
        with pytest.raises(TypeError, match=r"Filter.*has no length"):
            len(loader)
        loader = loader_of(IterableWrapper(iter(range(9))).batch(2), 0, 2)
        with pytest.raises(TypeError, match=r"IterableWrapper .built at .*test_loader.py.*range_iterator"):
            len(loader)


@pytest.mark.filterwarnings("ignore:.*elements to share among")
class TestSmallData:
    @pytest.mark.parametrize("workers", [0, 1, 3])
    @pytest.mark.parametrize("count", [0, 1, 2, 5])
    def test_fewer_elements_than_workers_or_streams(self, workers: int, count: int) -> None:
        for streams in (3, 6):
            with loader_of(IterableWrapper(range(count)).shuffle().sharding_filter(), workers, streams) as loader:
                assert sorted(loader) == list(range(count))
                state = through_json(loader.state_dict())
                assert sorted(loader) == list(range(count))
                loader.load_state_dict(state)
                assert loader.epoch == 1
                assert sorted(loader) == list(range(count))

    def test_more_workers_than_streams_are_not_started(self) -> None:
        with loader_of(source().sharding_filter(), 3, 2) as loader:
            assert sorted(loader) == list(range(N))
            assert len(loader.stats()["workers"]) == 2


class TestAutomaticSharding:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_nothing_comes_twice(self, workers: int) -> None:
        two = source().fork(2)
        graphs = [
            source().map(abs).batch(3).unbatch(),
            source().concat(IterableWrapper(range(N, 80))),
            source().mux(IterableWrapper(range(N, 2 * N))),
            source().zip(IterableWrapper(range(N))).map(lambda pair: pair[0]),
            two[0].zip(two[1]).map(lambda pair: pair[0]),
        ]
        for graph in graphs:
            expected = sorted(loader_of(graph, 0, 1))
            with loader_of(graph, workers, 2) as loader:
                with pytest.warns(UserWarning, match="no sharding_filter, so it is split after stage") as caught:
                    assert sorted(loader) == expected
                assert len(caught) == 1
                assert sorted(loader) == expected

    def test_replicate_gives_all_to_every_stream(self) -> None:
        with loader_of(source(), 2, 2, sharding="replicate") as loader:
            assert sorted(loader) == sorted([*range(N), *range(N)])
            assert len(loader) == 2 * N

    def test_other_words_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'auto' or 'replicate'"):
            loader_of(source(), sharding="none")


class Pair:
    def __init__(self, value: int) -> None:
        self.value = value


class TestShipping:
    def test_what_cannot_travel_is_refused_when_the_loader_is_built(self) -> None:
        lock = threading.Lock()

        class Holder(IterDataPipe[int]):
            def __init__(self, datapipe: Any) -> None:
                self.datapipe, self.guard = datapipe, lock

            def __iter__(self) -> Any:
                yield from self.datapipe

        with pytest.raises(UnpicklableStageError, match=r"stage 1:Holder.*guard.*lock"):
            loader_of(source().then(Holder).batch(2), 1)
        with pytest.raises(UnpicklableStageError, match=r"stage 1:Mapper.*fn.*'lock'"):
            loader_of(source().map(lambda x: (lock, x)[1]), 1)
        assert len(list(loader_of(source().map(lambda x: (lock, x)[1])))) == N

    def test_closures_and_classes_of_the_script_travel(self) -> None:
        offset = 100

        with loader_of(source().sharding_filter().map(lambda x: Pair(x + offset)), 2) as loader:
            pairs = list(loader)
        assert [pair.value for pair in pairs] == list(range(100, 100 + N))
        assert {type(pair) for pair in pairs} == {Pair}

    def test_what_is_no_pipe_is_refused(self) -> None:
        with pytest.raises(TypeError, match="graph of pipes, not a list"):
            DataLoader2([1, 2])  # type: ignore[arg-type]

    def test_map_pipes_and_adapters(self) -> None:
        pipe = SequenceWrapper([3, 4, 5])
        assert list(DataLoader2(pipe)) == [3, 4, 5]
        loader = DataLoader2(pipe, lambda graph: graph.map(str))
        assert list(loader) == ["3", "4", "5"]
        loader = DataLoader2(pipe, [lambda graph: graph.map(str), lambda graph: graph.batch(2)])
        assert list(loader) == [["3", "4"], ["5"]]

    def test_later_changes_to_the_pipe_do_not_reach_the_loader(self) -> None:
        pipe = source().batch(5)
        loader = DataLoader2(pipe)
        pipe.batch_size = 1
        assert len(list(loader)) == 10
        assert len(list(pipe)) == N
