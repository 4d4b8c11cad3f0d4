"""`iter(pipe)` outside a loader: one live iterator a pipe, and torch's DataLoader."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import warnings
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from pipes import IterDataPipe
from pipes.errors import GraphError, StaleIteratorError
from pipes.iter import IterableWrapper
from pipes.node import walk
from pipes.shares import sharded_by_hand
from pipes.stages.sharding import SHARDING_PRIORITIES


def numbers(size: int) -> IterableWrapper[int]:
    return IterableWrapper(range(size))


def test_the_newer_iterator_of_a_pipe_takes_over() -> None:
    pipe = numbers(5).map(str).batch(2)
    old = iter(pipe)
    assert next(old) == ["0", "1"]
    new = iter(pipe)
    with pytest.raises(StaleIteratorError, match=r"iterator of \S+ took over; .* use \.fork\(\)"):
        next(old)
    assert list(new) == [["0", "1"], ["2", "3"], ["4"]]
    assert next(old, "ended") == "ended"


@pytest.mark.parametrize("consume", [list, tuple, lambda it: next(it, "silently")])
def test_the_older_iterator_never_ends_silently(consume: Any) -> None:
    pipe = numbers(5)
    old = iter(pipe)
    next(old)
    list(pipe)
    with pytest.raises(StaleIteratorError):
        consume(old)


def test_an_unstarted_older_iterator_raises_too() -> None:
    pipe = numbers(5).shuffle(3)
    old = iter(pipe)
    list(pipe)
    with pytest.raises(StaleIteratorError):
        next(old)


def test_builtin_zip_over_two_iterators_of_one_pipe() -> None:
    pipe = numbers(5)
    with pytest.raises(StaleIteratorError, match=r"\.fork\(\)"):
        list(zip(pipe, pipe, strict=False))


def test_iterating_a_part_ends_the_whole_and_the_other_way_round() -> None:
    source = numbers(5)
    pipe = source.map(str)
    whole = iter(pipe)
    next(whole)
    part = iter(source)
    assert next(part) == 0
    with pytest.raises(StaleIteratorError, match="0:IterableWrapper took over"):
        next(whole)
    next(iter(pipe))
    with pytest.raises(StaleIteratorError):
        next(part)


@pytest.mark.parametrize("use", [list, lambda source: list(source.map(str))])
def test_iterating_what_a_fork_reads_ends_its_children(use: Any) -> None:
    source = numbers(5)
    left, right = source.demux(2, lambda x: x % 2)
    first, second = iter(left), iter(right)
    assert [next(first), next(second)] == [0, 1]
    use(source)
    for child in (first, second):
        with pytest.raises(StaleIteratorError, match="0:IterableWrapper took over"):
            list(child)
    assert [list(right), list(left)] == [[1, 3], [0, 2, 4]]


def test_a_pipe_beside_its_own_children_is_refused() -> None:
    for join in (
        lambda source, left, right: source.zip(left, right),
        lambda source, left, right: left.zip(source, right),
        lambda source, left, right: left.zip(source.map(str)),
    ):
        source = numbers(5)
        pipe = join(source, *source.demux(2, lambda x: x % 2))
        with pytest.raises(GraphError, match="0:IterableWrapper feeds two stages of one graph"):
            list(pipe)


def test_graphs_without_a_pipe_in_common_do_not_disturb_each_other() -> None:
    first, second = iter(numbers(3).map(str)), iter(numbers(3).map(str))
    assert [next(first), next(second), next(first), next(second)] == ["0", "0", "1", "1"]


def test_a_finished_iterator_stays_finished() -> None:
    pipe = numbers(2)
    iterator = iter(pipe)
    assert list(iterator) == [0, 1]
    assert list(pipe) == [0, 1]
    assert next(iterator, "ended") == "ended"


def test_a_function_that_iterates_its_own_graph_gets_an_error_in_the_end() -> None:
    pipe: Any = None

    def meddle(x: int) -> int:
        if x == 2:
            list(numbers(3))
            next(iter(pipe.datapipe))
        return x

    pipe = numbers(5).map(meddle)
    with pytest.raises(StaleIteratorError):
        list(pipe)


# torch's DataLoader.


def tagged(x: int) -> tuple[int, int]:
    info = get_worker_info()
    return x, -1 if info is None else info.id


def load(pipe: Any, **options: Any) -> list[Any]:
    return list(DataLoader(pipe, batch_size=None, **options))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_torchs_loader_gives_every_element_once(workers: int) -> None:
    pipe = numbers(50).shuffle(20).sharding_filter().map(tagged)
    got = load(pipe, num_workers=workers)
    assert sorted(x for x, _ in got) == list(range(50))
    assert len({worker for _, worker in got}) == max(1, workers)


def fork_and_zip() -> IterDataPipe[Any]:
    left, right = numbers(30).shuffle(9).fork(2)
    # No lambda: torch's loader pickles the graph plainly where it does not fork, as from Python 3.14 on.
    return left.zip(right.map(str)).map(itemgetter(0))


@pytest.mark.filterwarnings("ignore:the graph has no sharding_filter")
@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers(30),
        lambda: numbers(30).shuffle(9),
        lambda: numbers(30).shuffle(9).map(abs).batch(4).unbatch(),
        lambda: numbers(20).shuffle(9).concat(IterableWrapper(range(20, 30))),
        fork_and_zip,
    ],
)
def test_torchs_loader_gives_every_element_once_also_without_a_sharding_filter(make: Any) -> None:
    assert sorted(load(make(), num_workers=2)) == list(range(30))


@pytest.mark.parametrize("persistent", [False, True])
def test_torchs_loader_reshuffles_each_epoch_and_follows_the_seed(persistent: bool) -> None:
    def epochs() -> list[list[int]]:
        torch.manual_seed(3)
        loader: Any = DataLoader(
            numbers(40).shuffle(40).sharding_filter(), batch_size=None, num_workers=2, persistent_workers=persistent
        )
        return [list(loader) for _ in range(3)]

    first = epochs()
    assert [sorted(each) for each in first] == [list(range(40))] * 3
    assert first[0] != first[1] != first[2] != first[0]
    assert epochs() == first


def shard_by_hand(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.apply_sharding(info.num_workers, worker)


class ByItself(IterDataPipe[int]):
    """Shards the way torch's documentation of IterableDataset tells."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, 20, step)


def test_what_is_sharded_by_hand_is_not_sharded_again() -> None:
    assert sorted(load(numbers(20).sharding_filter(), num_workers=2, worker_init_fn=shard_by_hand)) == list(range(20))
    assert sorted(load(ByItself(), num_workers=2)) == list(range(20))
    assert sorted(load(ByItself().map(abs).batch(3).unbatch(), num_workers=2)) == list(range(20))


@pytest.mark.parametrize(
    ("group", "expected"), [(1, (False, True)), (2, (False, True)), (3, (True, False)), (7, (False, True))]
)
def test_levels_by_hand(group: int, expected: tuple[bool, bool]) -> None:
    pipe = numbers(20).sharding_filter()
    assert sharded_by_hand(walk(pipe), 2, 4) == (False, False)
    pipe.apply_sharding(2, 0, group)
    assert sharded_by_hand(walk(pipe.map(str)), 2, 4) == expected
    assert int(SHARDING_PRIORITIES.MULTIPROCESSING) == 3


def test_automatic_sharding_warns_once_in_one_worker(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.data import DataLoader\n"
        "from pipes.iter import IterableWrapper\n"
        "if __name__ == '__main__':\n"
        "    pipe = IterableWrapper(range(9)).map(str)\n"
        "    loader = DataLoader(pipe, batch_size=None, num_workers=2, persistent_workers=True)\n"
        "    print(sorted(loader), sorted(loader))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, env=environment())
    assert done.stdout.count("'8'") == 2
    assert done.stderr.count("UserWarning: the graph has no sharding_filter, so it is split after stage 0:Iter") == 1
    assert "train.py:4" in done.stderr
    assert "Put .sharding_filter()" in done.stderr


def test_one_process_is_not_told_about_sharding() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(numbers(3), num_workers=0) == [0, 1, 2]


RANK = """
import json, sys
import torch.distributed as dist
from torch.utils.data import DataLoader
from pipes.iter import IterableWrapper

def main():
    rank, port = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    import torch
    torch.manual_seed(5)
    pipe = IterableWrapper(range(40)).shuffle(40).sharding_filter()
    alone = list(pipe)
    torch.manual_seed(5)
    loaded = list(DataLoader(pipe, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    spawned = list(DataLoader(pipe, batch_size=None, num_workers=1, multiprocessing_context="spawn"))
    pipe.apply_sharding(2, rank, 2)
    print(json.dumps([alone, loaded, spawned, list(pipe)]))
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def test_a_rank_that_was_pickled_long_ago_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pipes.shares.rank_and_world", lambda: (1, 2))
        saved = pickle.dumps(numbers(9).sharding_filter())
    pipe = pickle.loads(saved)
    assert list(pipe) == list(range(9))
    for method in ("fork", "spawn"):
        assert load(pipe, num_workers=1, multiprocessing_context=method) == list(range(9))


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def test_ranks_share_the_elements(tmp_path: Path) -> None:
    import json

    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], [error for _, error in outputs]
    results = [json.loads(output) for output, _ in outputs]
    for kind in range(4):
        assert Counter(results[0][kind] + results[1][kind]) == Counter(range(40)), kind
