"""Ranks that end their epochs together: real processes with gloo, that run out, fail, die, leave and come too late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.race

PROLOGUE = """
import json, os, signal, sys, threading, time
rank, store = int(sys.argv[1]), sys.argv[2]
import torch, torch.distributed as dist
from loading import through_json
from pipes.errors import RankError, RankTimeoutError
from pipes.iter import IterableWrapper
from pipes.loader2 import (
    DataLoader2, DistributedReadingService, MultiProcessingReadingService, SequentialReadingService,
)
from pipes.loader2.process import stop_forkserver
from residue import Holdings, settled
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
signal.signal(signal.SIGINT, signal.default_int_handler)
def loader_of(graph, workers=0, timeout=60, **options):
    service = SequentialReadingService(DistributedReadingService(timeout), MultiProcessingReadingService(workers))
    loader = DataLoader2(graph, reading_service=service, **options)
    loader.seed(5)
    return loader
def numbers(count):
    return IterableWrapper(range(count)).sharding_filter()
def raised(kind, function):
    try:
        function()
    except kind as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError("nothing was raised")
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.02)
found = []
"""
EPILOGUE = """
print(json.dumps(found), flush=True)
"""


class Ranks:
    """Two processes that run one program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def run(self, body: str, codes: tuple[int, int] = (0, 0)) -> list[Any]:
        """Run the program on both ranks; return what each has found."""
        script = self.folder / "rank.py"
        script.write_text(PROLOGUE + textwrap.dedent(body) + EPILOGUE)
        tests = Path(__file__).parents[1]
        path = os.pathsep.join((str(tests.parent), str(tests)))
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, "-W", "error", script, str(rank), str(self.folder / "store")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            self.processes.append(process)
        outputs = [process.communicate(timeout=100) for process in self.processes]
        assert tuple(process.returncode for process in self.processes) == codes, [error for _, error in outputs]
        return [json.loads(output) if output else None for output, _ in outputs]

    def end(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture
def ranks(tmp_path: Path, no_residue: None) -> Any:
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.end()


def test_all_end_with_the_shortest_and_resume_there(ranks: Ranks) -> None:
    first, second = ranks.run(
        """
        before = Holdings.now()
        # rank 0 has 4 batches of the 7 elements, rank 1 has 3
        for workers in (0, 2):
            with loader_of(numbers(7), workers) as loader:
                assert len(loader) == 3
                found += [list(loader), list(loader), loader.epoch]
                iterator = iter(loader)
                found += [next(iterator), next(iterator)]
                state = through_json(loader.state_dict())
                # one that was left at the same output on all ranks
                iterator = iter(loader)
                found += [next(iterator), loader.stats()["batches"]]
            with loader_of(numbers(7), 2 - workers) as loader:
                loader.load_state_dict(state)
                found += [list(loader), loader.epoch, list(loader)]
        with loader_of(numbers(7), 2, device="cpu", memory="pageable") as loader:
            found.append(list(loader))
        with loader_of(numbers(4).filter(lambda x: x == 0)) as loader:
            found.append(list(loader))
        loader.shutdown()
        stop_forkserver()
        assert settled(before, 10), Holdings.now().news_since(before)
        """
    )
    for rank, given in enumerate((first, second)):
        own = [rank, rank + 2, rank + 4]
        part = [own, own, 2, *own[:2], own[0], 9, own[2:], 3, own]
        assert given == [*part, *part, own, []]


def test_one_that_fails_is_told_to_the_other(ranks: Ranks) -> None:
    first, second = ranks.run(
        """
        def fails(x):
            if x == 5:
                raise ValueError(f"no {x}, token=abc")
            return x
        for workers in (0, 1):
            with loader_of(numbers(20).map(fails), workers) as loader:
                for _ in range(2):
                    iterator = iter(loader)
                    found.append([next(iterator), next(iterator)])
                    at = json.dumps(loader.state_dict()["streams"])
                    found.append(raised((RankError, ValueError)[rank], lambda: next(iterator)))
                    assert json.dumps(loader.state_dict()["streams"]) == at
                found.append(loader.epoch)
        def reset(pipe, info, seeds):
            if rank == 0:
                raise OSError("no disk")
            return pipe
        place = MultiProcessingReadingService(0, worker_reset_fn=reset)
        service = SequentialReadingService(place, DistributedReadingService())
        with DataLoader2(numbers(9), reading_service=service) as loader:
            loader.seed(5)
            found.append(raised((OSError, RankError)[rank], lambda: iter(loader)))
        """
    )
    message = (
        "rank 1 of 2 failed at output 2 of epoch {}, so this epoch is over on all ranks: ValueError: no 5, token=***"
    )
    part = [x for epoch in range(2) for x in ([0, 2], message.format(epoch))]
    assert first == [*part, 1, *part, 1, "no disk"]
    part = [x for epoch in range(2) for x in ([1, 3], "no 5, token=abc")]
    begun = "rank 0 of 2 failed at the start of the epoch, so this epoch is over on all ranks: OSError: no disk"
    assert second == [*part, 1, *part, 1, begun]


def test_one_that_is_killed(ranks: Ranks) -> None:
    first, _ = ranks.run(
        """
        before = Holdings.now()
        with loader_of(numbers(20), 1) as loader:
            iterator = iter(loader)
            found.append(next(iterator))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            found.append(raised(RankError, lambda: next(iterator)))
            assert time.monotonic() - began < 30
            again = DataLoader2(numbers(20), num_streams=2)
            again.load_state_dict(loader.state_dict())
            found.append(next(iter(again)))
            found.append(raised(RankError, lambda: iter(loader)))
        again.shutdown()
        stop_forkserver()
        assert settled(before, 10), Holdings.now().news_since(before)
        """,
        (0, -9),
    )
    lost, later = first.pop(1), first.pop()
    assert first == [0, 2]
    assert lost.startswith(
        "rank 0 of 2 lost another rank at output 1 of epoch 0: it ended, or shut its loader down. The"
    )
    assert later.startswith("the ranks are no longer in step since one of them was lost or interrupted")


def test_one_that_is_in_another_epoch_shuts_down_or_comes_too_late(ranks: Ranks) -> None:
    first, second = ranks.run(
        """
        loader = loader_of(numbers(20))
        iterator = iter(loader)
        next(iterator)
        found.append(raised(RankError, (lambda: iter(loader), lambda: next(iterator))[rank]))
        # all agree what comes next, and go on
        loader.seed(5)
        found.append(list(loader))
        loader.seed(5 + rank)
        found.append(raised(RankError, lambda: iter(loader)))
        loader.seed(5)
        iterator = iter(loader)
        if rank == 0:
            found.append(raised(RankError, lambda: next(iterator)))
        loader.shutdown()

        loader = loader_of(numbers(20), timeout=1)
        iterator = iter(loader)
        if rank == 0:
            found.append(raised(RankTimeoutError, lambda: next(iterator)))
            open(store + ".told", "w").close()
        else:
            wait_for(store + ".told")
            found.append(raised(RankError, lambda: next(iterator)))
        # before the loader, as programs do
        dist.destroy_process_group()
        loader.shutdown()
        """
    )
    differs = "the ranks do not iterate the same epoch: the {} is not the same on all of them{}. Call iter(loader), "
    for given, rank in ((first, 0), (second, 1)):
        assert given[0].startswith(differs.format("epoch", ", but 0 to 1"))
        assert given[1] == list(range(rank, 20, 2))
        assert given[2].startswith(differs.format("seed", ""))
    assert first[3].startswith(
        "rank 0 of 2 lost another rank at output 0 of epoch 0: it ended, or shut its loader down"
    )
    assert first[4].startswith("rank 0 of 2 waited 1 s at output 0 of epoch 0 for the other ranks, and one of them did")
    assert second[3].startswith("rank 1 of 2 lost another rank at output 0 of epoch 0")


def test_a_wait_is_ended_by_ctrl_c_and_by_another_thread(ranks: Ranks) -> None:
    first, second = ranks.run(
        """
        loaders = [loader_of(numbers(20)) for _ in range(2)]
        iterators = [iter(loader) for loader in loaders]
        found.append([next(iterator) for iterator in iterators])
        if rank == 0:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            raised(KeyboardInterrupt, lambda: next(iterators[0]))
            # what the other rank knows nothing of was not given
            again = DataLoader2(numbers(20), num_streams=2)
            again.load_state_dict(loaders[0].state_dict())
            found.append(next(iter(again)))
            found.append(raised(RankError, lambda: iter(loaders[0])))
            threading.Timer(0.3, loaders[1].shutdown).start()
            found.append(raised(RuntimeError, lambda: next(iterators[1])))
            began = time.monotonic()
            loaders[0].shutdown()
            assert time.monotonic() - began < 5
            open(store + ".told", "w").close()
        else:
            wait_for(store + ".told")
            # the other one had asked for these
            found += [next(iterator) for iterator in iterators]
        """
    )
    assert first[:2] == [[0, 0], 2]
    assert first[2].startswith("the ranks are no longer in step")
    assert first[3] == "the loader was shut down while this iterator waited for the other ranks"
    assert second == [[1, 1], 3, 3]
