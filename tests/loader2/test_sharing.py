"""What main reads once for all streams: listings and long lists."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from loading import loader_of, take, through_json

from pipes import IterDataPipe
from pipes.errors import ChangedDataError, RemoteError
from pipes.iter import FileLister, IterableWrapper
from pipes.loader2.sharing import list_once
from pipes.map import SequenceWrapper

pytestmark = [pytest.mark.usefixtures("no_residue"), pytest.mark.timeout(120)]

LONG = [f"s3://bucket/train/part-{number:07}.tar" for number in range(40_000)]


def folder_of(folder: Path, names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)
    return folder


def lister(folder: Path) -> IterDataPipe[str]:
    return FileLister(str(folder)).sharding_filter().map(os.path.basename)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_streams_and_epochs_see_what_was_listed_first(tmp_path: Path, workers: int) -> None:
    folder = folder_of(tmp_path / "data", "abcdef")
    with loader_of(lister(folder), workers, 2) as loader:
        iterator = iter(loader)
        assert next(iterator) == "a"
        # The second stream has not started in process, and workers are at work: none of them lists again.
        shutil.rmtree(folder)
        assert list(iterator) == list("bcdef")
        assert list(loader) == list("abcdef")


def test_a_restarted_worker_sees_what_was_listed_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", "abcdefghij")
    with loader_of(lister(folder), 2, prefetch=1) as loader:
        iterator = iter(loader)
        first = take(iterator, 3)
        shutil.rmtree(folder)
        os.kill(loader.stats()["workers"][1], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="started again"):
            assert first + list(iterator) == list("abcdefghij")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_listing_is_raised_by_iter_and_tried_again(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "data"
    with loader_of(lister(folder), workers, 2) as loader:
        with pytest.warns(UserWarning, match="cannot list"), pytest.raises(FileNotFoundError) as caught:
            iter(loader)
        assert any("in stage 0:FileLister built at" in note for note in caught.value.__notes__)
        folder_of(folder, "ab")
        assert list(loader) == ["a", "b"]


class Closed(OSError):
    """Refuses to be pickled, as errors of store clients may."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a connection")


def list_on(rank: int, folder: Path, told: list[bytes], patch: pytest.MonkeyPatch) -> Any:
    """Return what `list_once` gives on a rank of two; `told` is what rank 0 has broadcast."""

    def broadcast(objects: list[Any], src: int) -> None:
        assert src == 0
        if rank == 0:
            told.append(pickle.dumps(objects[0]))
        else:
            objects[:] = [pickle.loads(told.pop(0))]

    answers = {"is_initialized": True, "get_world_size": 2, "get_rank": rank}
    for name, answer in answers.items():
        patch.setattr(dist, name, lambda answer=answer: answer)
    patch.setattr(dist, "broadcast_object_list", broadcast)
    return list_once(lister(folder))


def test_rank_0_lists_for_all_and_tells_each_why_it_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []
    for rank, folder in enumerate((folder_of(tmp_path / "data", "ab"), tmp_path / "absent")):
        listed = list_on(rank, folder, told, monkeypatch)
        assert [Path(name).name for name in listed["0:FileLister"].names] == ["a", "b"]
    assert list_once(IterableWrapper(["a"])) == {}
    for error, kind in ((OSError("no disk"), OSError), (Closed("no disk"), RemoteError)):
        failed = Mock(side_effect=error)
        monkeypatch.setattr("pipes.loader2.sharing.listing_of", failed)
        with pytest.raises(type(error), match="no disk"):
            list_on(0, tmp_path, told, monkeypatch)
        with pytest.raises(kind, match="no disk") as caught:
            list_on(1, tmp_path, told, monkeypatch)
        assert "in stage 0:FileLister built at" in caught.value.__notes__[0]
        assert caught.value.__notes__[1:] == ["raised in rank 0"]
        assert (failed.call_count, told) == (1, [])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_resume_over_another_listing_is_refused(tmp_path: Path, workers: int) -> None:
    folder = folder_of(tmp_path / "data", "abcdef")
    with loader_of(lister(folder), workers, 2, snapshot_every=1) as loader:
        iterator = iter(loader)
        assert take(iterator, 3) == list("abc")
        state = through_json(loader.state_dict())
    with loader_of(lister(folder), workers) as same:
        same.load_state_dict(state)
        assert list(same) == list("def")
    (folder / "c").unlink()
    with loader_of(lister(folder), workers) as changed:
        changed.load_state_dict(state)
        with pytest.raises(ChangedDataError, match=r"5 names.*saved with 6"):
            list(changed)


GRAPHS: dict[str, Any] = {
    "in order": lambda: IterableWrapper(LONG).sharding_filter().batch(100),
    "shuffled": lambda: IterableWrapper(LONG).shuffle(500).sharding_filter().map(str.upper).batch(100),
    "not copied": lambda: IterableWrapper(tuple(LONG), deepcopy=False).sharding_filter().batch(300),
    "pairs": lambda: IterableWrapper([(name, {"n": len(name)}) for name in LONG]).sharding_filter().batch(500),
    "by position": lambda: SequenceWrapper(LONG).shuffle().sharding_filter().batch(400),
    "twice": lambda: IterableWrapper(LONG).zip(IterableWrapper(LONG[::-1])).sharding_filter().batch(400),
    "cycled": lambda: IterableWrapper(LONG).cycle(2).sharding_filter().batch(1000),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_long_list_gives_the_same_from_a_block_and_resumes(name: str) -> None:
    with loader_of(GRAPHS[name](), 0, 2) as plain:
        expected = [list(plain), list(plain)]
    with loader_of(GRAPHS[name](), 2, 2) as loader:
        first = list(loader)
        second = take(iter(loader), 7)
        state = through_json(loader.state_dict())
        assert [first, second] == [expected[0], expected[1][:7]]
        assert len(json.dumps(state)) < 10_000
    for workers in (0, 1):
        with loader_of(GRAPHS[name](), workers) as again:
            again.load_state_dict(state)
            assert list(again) == expected[1][7:]


def test_the_length_is_known_in_main_and_in_workers() -> None:
    pipe = IterableWrapper(LONG).sharding_filter().batch(100)
    with loader_of(pipe, 2) as loader:
        assert len(loader) == 400
        assert sum(1 for _ in loader) == 400


def test_elements_that_stages_edit_come_fresh_every_epoch() -> None:
    rows = [{"row": number, "seen": 0} for number in range(60_000)]
    pipe = IterableWrapper(rows).sharding_filter().map(mark).batch(1000)
    with loader_of(pipe, 2) as loader:
        for _ in range(2):
            assert {row["seen"] for batch in loader for row in batch} == {1}
    assert rows[0]["seen"] == 0


def mark(row: dict[str, int]) -> dict[str, int]:
    row["seen"] += 1
    return row


def test_a_long_list_does_not_multiply_by_the_workers() -> None:
    program = """
        import gc, json
        import psutil
        from pipes.iter import IterableWrapper
        from pipes.loader2 import DataLoader2, MultiProcessingReadingService

        def summed_pss(elements):
            pipe = IterableWrapper(elements).shuffle(100).sharding_filter().batch(1000)
            with DataLoader2(pipe, reading_service=MultiProcessingReadingService(4)) as loader:
                loader.seed(1)
                count = sum(len(batch) for batch in loader)
                assert count == len(elements)
                gc.collect()
                pids = [psutil.Process().pid, *loader.stats()["workers"]]
                return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)

        short = summed_pss([str(number) for number in range(4000)])
        gc.collect()
        before = psutil.Process().memory_full_info().pss
        elements = [f"s3://bucket/train/part-{number:07}.tar" for number in range(2_000_000)]
        gc.collect()
        size = psutil.Process().memory_full_info().pss - before
        print(json.dumps({"list": size, "growth": summed_pss(elements) - size - short}))
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["list"] > 150_000_000
    assert figures["growth"] < 0.1 * figures["list"], figures
