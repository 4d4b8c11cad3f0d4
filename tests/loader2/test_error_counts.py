"""`on_error` in a loader: the same elements, counts and errors for any number of workers, over resumes and deaths."""

from __future__ import annotations

import io
import logging
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import loader_of, take, through_json
from tars import hard_archive, make_tar

from pipes import IterDataPipe
from pipes.errors import ErrorBudgetExceeded, StateError
from pipes.iter import IterableWrapper

pytestmark = pytest.mark.usefixtures("no_residue")

N = 60


def fail_on(numbers: set[int]) -> Callable[[int], int]:
    def check(x: int) -> int:
        if x in numbers:
            raise ValueError(f"bad {x}")
        return x

    return check


BAD = {0, 5, 6, 7, 23, 41, 59}


def graph(bad: set[int] = BAD, **policy: Any) -> IterDataPipe[Any]:
    policy = {"on_error": "skip", "max_errors": 99, **policy}
    return IterableWrapper(range(N)).shuffle(8).sharding_filter().map(fail_on(bad), **policy).shuffle(5).batch(3)


def skipped(loader: Any) -> int:
    return sum(entry["skipped"] for entry in loader.stats()["errors"].values())


@pytest.fixture(scope="module")
def expected() -> tuple[list[Any], list[int]]:
    """The batches of an epoch, and how many elements were skipped after each."""
    with loader_of(graph(), 0, 3) as loader:
        batches, counts = [], [0]
        for batch in loader:
            batches.append(batch)
            counts.append(skipped(loader))
        counts.append(skipped(loader))
    return batches, counts


class TestCounts:
    @pytest.mark.parametrize("workers", [0, 1, 2, 3])
    def test_are_the_same_for_any_number_of_workers(self, workers: int, expected: Any, caplog: Any) -> None:
        batches, counts = expected
        with loader_of(graph(), workers, 3) as loader, caplog.at_level(logging.WARNING, logger="pipes"):
            for epoch in range(2):
                given = []
                for batch in loader:
                    given.append(batch)
                    assert epoch or skipped(loader) == counts[len(given)]
                assert epoch or given == batches
                assert skipped(loader) == len(BAD)
            (entry,) = loader.stats()["errors"].values()
            assert entry["taken"] == N
            assert "ValueError: bad " in entry["first"]
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == 2, texts
        assert all(f"3:Mapper skipped {len(BAD)} of the {N} elements it took in this epoch" in text for text in texts)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_are_exact_after_resumes(self, workers: int, expected: Any) -> None:
        batches, counts = expected
        with loader_of(graph(), workers, 3, **({"snapshot_every": 4} if workers else {})) as loader:
            states = [through_json(loader.state_dict())]
            for _ in loader:
                states.append(through_json(loader.state_dict()))
        for k in range(0, len(batches), 3):
            with loader_of(graph(), 2 - workers, 3) as loader:
                loader.load_state_dict(states[k])
                given = list(batches[:k])
                for batch in loader:
                    given.append(batch)
                    assert skipped(loader) == counts[len(given)], f"resumed at {k}, at {len(given)}"
                assert given == batches
                assert skipped(loader) == len(BAD)

    def test_are_exact_after_a_worker_died(self, expected: Any, tmp_path: Path) -> None:
        batches, counts = expected

        def kill_once(batch: Any) -> Any:
            if 41 not in batch and len(batch) == 3 and 30 in batch:
                try:
                    (tmp_path / "killed").touch(exist_ok=False)
                except FileExistsError:
                    return batch
                os.kill(os.getpid(), signal.SIGKILL)
            return batch

        with (
            loader_of(graph().map(kill_once), 2, 3, snapshot_every=3) as loader,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            given = []
            for batch in loader:
                given.append(batch)
                assert skipped(loader) == counts[len(given)]
            assert given == batches
            assert skipped(loader) == len(BAD)
            assert loader.stats()["restarts"] == 1
        assert len(caught) == 1

    def test_of_streams_that_ended_stand_in_a_state(self) -> None:
        def short() -> IterDataPipe[Any]:
            return IterableWrapper([0, 1, 0, 2, 3, 4, 5, 6, 7]).sharding_filter().map(fail_on({0}), on_error="skip")

        with loader_of(short(), 0, 2) as loader:
            iterator = iter(loader)
            assert take(iterator, 5) == [3, 1, 5, 2, 7]
            state = through_json(loader.state_dict())
        with loader_of(short(), 1, 2) as loader:
            loader.load_state_dict(state)
            list(loader)
            assert skipped(loader) == 2

    def test_of_what_archives_leave_out(self, caplog: Any) -> None:
        def opened(number: int) -> Any:
            return f"{number}.tar", io.BytesIO(hard_archive() if number % 2 else make_tar([("README", b"x")]))

        pipe = IterableWrapper(range(4)).sharding_filter().map(opened).load_from_tar().webdataset()
        for workers in (0, 2):
            caplog.clear()
            with loader_of(pipe.map(len), workers, 2) as loader, caplog.at_level(logging.INFO, logger="pipes"):
                assert len(list(loader)) == 4
                assert loader.stats()["left_out"] == {
                    "3:TarArchiveLoader": {"directory": 2, "symbolic link": 2},
                    "4:WebDataset": {"no extension": 2},
                }
                assert loader.stats()["errors"] == {}
            texts = [record.getMessage() for record in caplog.records if record.name == "pipes"]
            assert any("3:TarArchiveLoader left out 2 (directory), 2 (symbolic link)" in text for text in texts)

    def test_of_what_main_reads_itself(self) -> None:
        pipe = IterableWrapper(iter(range(9))).map(fail_on({3}), on_error="skip").sharding_filter().map(abs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with loader_of(pipe, 2) as loader:
                assert list(loader) == [0, 1, 2, 4, 5, 6, 7, 8]
                assert loader.stats()["errors"]["dealt/1:Mapper"]["skipped"] == 1


class TestBudget:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_is_that_of_all_streams_and_exceeded_in_order(self, workers: int, expected: Any) -> None:
        batches, counts = expected
        with loader_of(graph(max_errors=4), workers, 3) as loader:
            given: list[Any] = []
            with pytest.raises(ErrorBudgetExceeded) as caught:  # noqa: PT012
                for batch in loader:
                    given.append(batch)
            assert given == batches[: next(at for at, count in enumerate(counts) if count > 4) - 1]
            text = str(caught.value)
            assert "stage 3:Mapper skipped " in text
            assert "more than max_errors=4" in text
            assert "The first: ValueError: bad " in text
            assert "; the last: ValueError: bad " in text
            state = through_json(loader.state_dict())
        with loader_of(graph(), workers, 3) as loader:
            # a larger budget may go on where the smaller one ended
            loader.load_state_dict(state)
            assert list(loader) == batches[len(given) :]
            assert skipped(loader) == len(BAD)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_fraction_is_of_all_streams(self, workers: int) -> None:
        def pipe(share: float) -> IterDataPipe[Any]:
            # all bad elements lie in one of two streams
            bad = set(range(0, 400, 20))
            return IterableWrapper(range(400)).sharding_filter().map(fail_on(bad), on_error="skip", max_errors=share)

        with loader_of(pipe(0.08).batch(8), workers, 2) as loader:
            assert sum(map(len, loader)) == 380
        with loader_of(pipe(0.04).batch(8), workers, 2) as loader, pytest.raises(ErrorBudgetExceeded, match="fraction"):
            list(loader)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_all_skipped(self, workers: int) -> None:
        with loader_of(graph(set(range(N)), max_errors=0.5), workers, 2) as loader:
            for _ in range(2):
                with pytest.raises(ErrorBudgetExceeded, match="skipped"):
                    list(loader)
        with loader_of(graph(set(range(N)), max_errors=None), workers, 2) as loader:
            assert list(loader) == []
            assert skipped(loader) == N


class TestStates:
    def test_a_run_that_failed_goes_on_with_skip(self) -> None:
        for workers in (0, 2):
            with loader_of(graph({23}, on_error="raise", max_errors=0.1), workers, 3) as loader:
                given = []
                with pytest.raises(ValueError, match="bad 23"):  # noqa: PT012
                    for batch in loader:
                        given.append(batch)
                state = through_json(loader.state_dict())
            with loader_of(graph({23}), 0, 3) as loader:
                whole = list(loader)
            with loader_of(graph({23}, max_errors=0.3), 1, 3) as loader:
                loader.load_state_dict(state)
                assert [*given, *loader] == whole
                assert skipped(loader) == 1

    def test_another_policy_than_raise_may_not_change(self) -> None:
        with loader_of(graph(), 0, 3) as loader:
            take(iter(loader), 4)
            state = through_json(loader.state_dict())
        for policy in ({"on_error": "raise", "max_errors": 0.1}, {"on_error": abs}):
            with loader_of(graph(**policy), 0, 3) as loader, pytest.raises(StateError, match="on_error='skip'"):
                loader.load_state_dict(state)
