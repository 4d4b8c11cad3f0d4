"""A worker dies at each named moment of its life: each output still comes once, in the same order."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import WAYS, Fault, label, log_points, stress_round
from loading import loader_of, with_draws

from pipes import IterDataPipe
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.loader2.fault_points import POINTS
from pipes.loader2.messages import Kind

pytestmark = [pytest.mark.usefixtures("no_residue"), pytest.mark.race]

STREAMS = 3


def with_bulk(batch: list[Any]) -> Any:
    """Return the batch with a leaf that travels in a slab and, now and then, what does not fit into the socket."""
    number = batch[0][0]
    small = [np.full(60_000, i, np.uint8) for i in range(20)] if number % 3 == 0 else []
    return batch, torch.full((70_000,), number, dtype=torch.uint8), small


def outline(outputs: list[Any]) -> list[Any]:
    return [(batch, tensor[0].item(), len(tensor), [array[-1] for array in small]) for batch, tensor, small in outputs]


def regular() -> IterDataPipe[Any]:
    return IterableWrapper(range(54)).shuffle(7).sharding_filter().map(with_draws).batch(3).map(with_bulk)


def dealt() -> IterDataPipe[Any]:
    return IterableWrapper(x for x in range(60)).map(lambda x: x * x)


def failing() -> IterDataPipe[Any]:
    return IterableWrapper(range(30)).sharding_filter().map(lambda x: 1 // (x - 20))


def with_pauses(loader: DataLoader2[Any]) -> list[Any]:
    """Return the outputs of an epoch that is broken by pauses."""
    iterator, given = iter(loader), []
    for count in (2, 3, 100):
        given += itertools.islice(iterator, count)
        if not iterator.ended:
            iterator.pause()
            iterator.resume()
    return given


def points_with(*kinds: Kind) -> list[tuple[str, Kind | None]]:
    return [point for point in POINTS if point[1] in kinds]


SPECIAL = points_with(Kind.NEED, Kind.DEAL, Kind.ERROR, Kind.PAUSE, Kind.RESUME, Kind.STOP)
REGULAR = [point for point in POINTS if point not in SPECIAL]
#: What a worker does once in an epoch, or in its life.
ONCE = [point for point in POINTS if point[0] in ("at the start", "ready") or "unpickled" in point[0]]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with loader_of(regular(), 0, STREAMS) as loader:
        return [outline(epoch) for epoch in (list(loader), list(loader))]


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "worker . .* is started again", RuntimeWarning)
        warnings.filterwarnings("ignore", ".* wraps a generator", UserWarning)
        yield caught


def test_every_point_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_points(monkeypatch, tmp_path)
    with loader_of(regular(), 1, STREAMS, snapshot_every=2) as loader:
        with_pauses(loader)
        next(iter(loader))
        # Nobody reads meanwhile, so that what does not fit into the socket has to wait.
        deadline = time.monotonic() + 60
        while not (tmp_path / "in the middle of a message").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    with loader_of(dealt(), 1) as loader, pytest.warns(UserWarning, match="wraps a generator"):
        list(loader)
    with loader_of(failing(), 1) as loader, pytest.raises(ZeroDivisionError):
        list(loader)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(label, POINTS))


def faults_at(point: tuple[str, Kind | None], folder: Path, most: int = 3) -> tuple[int, Fault]:
    """Return a number of workers, and three deaths in different ways at `point` for the `most`-th passing at most."""
    draw = random.Random(f"{label(point)} {stress_round()}")
    ways = tuple(draw.sample(WAYS, len(WAYS)))
    most = 1 if point in ONCE or point[1] in (Kind.EPOCH, Kind.END, Kind.STOP, Kind.ERROR) else most
    return draw.randint(1, 3), Fault(point, ways, tuple(draw.randint(1, most) for _ in ways), folder)


@pytest.mark.parametrize("point", REGULAR, ids=label)
def test_regular_outputs(
    point: tuple[str, Kind | None],
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[warnings.WarningMessage],
) -> None:
    workers, fault = faults_at(point, tmp_path)
    fault.inject(monkeypatch)
    with loader_of(regular(), workers, STREAMS, snapshot_every=2, prefetch=2, max_restarts=5) as loader:
        assert [outline(epoch) for epoch in (list(loader), list(loader))] == expected, (workers, fault)
        restarts = loader.stats()["restarts"]
    # A main that reads as fast as a worker writes leaves few messages cut in the middle.
    least = 1 if point[0] == "in the middle of a message" else 3
    assert least <= fault.deaths <= 3, (workers, fault)
    # One that died when all was sent may never be missed.
    assert len(told) == restarts <= fault.deaths, (workers, fault)
    assert restarts == fault.deaths or point == ("after sending", Kind.END), (workers, fault)


@pytest.mark.parametrize("point", points_with(Kind.NEED, Kind.DEAL), ids=label)
def test_a_source_that_main_reads(
    point: tuple[str, Kind | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[warnings.WarningMessage],
) -> None:
    workers, fault = faults_at(point, tmp_path, 8)
    fault.inject(monkeypatch)
    with loader_of(dealt(), workers, STREAMS, snapshot_every=3, max_restarts=5) as loader:
        assert list(loader) == [x * x for x in range(60)], (workers, fault)
        assert loader.stats()["restarts"] == len(told) == fault.deaths == 3, (workers, fault)


@pytest.mark.parametrize("point", points_with(Kind.ERROR), ids=label)
def test_an_error_on_its_way(
    point: tuple[str, Kind | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[warnings.WarningMessage],
) -> None:
    workers, fault = faults_at(point, tmp_path)
    fault.inject(monkeypatch)
    with loader_of(failing(), workers, snapshot_every=3) as loader:
        for _ in range(4):
            given = []
            with pytest.raises(ZeroDivisionError, match="division"):  # noqa: PT012
                for element in loader:
                    given.append(element)
            assert given == [1 // (x - 20) for x in range(20)], (workers, fault)
        assert loader.stats()["restarts"] == len(told) <= 3, (workers, fault)
    assert 1 <= fault.deaths <= 3


@pytest.mark.parametrize("point", points_with(Kind.PAUSE, Kind.RESUME), ids=label)
def test_pauses(
    point: tuple[str, Kind | None],
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[warnings.WarningMessage],
) -> None:
    workers, fault = faults_at(point, tmp_path, 1)
    fault.inject(monkeypatch)
    with loader_of(regular(), workers, STREAMS, snapshot_every=2, prefetch=2, max_restarts=5) as loader:
        assert [outline(with_pauses(loader)), outline(with_pauses(loader))] == expected, (workers, fault)
        assert loader.stats()["restarts"] == len(told) == fault.deaths == 3, (workers, fault)


@pytest.mark.parametrize("point", points_with(Kind.STOP), ids=label)
def test_at_the_end(
    point: tuple[str, Kind | None],
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[warnings.WarningMessage],
) -> None:
    _, fault = faults_at(point, tmp_path)
    fault.inject(monkeypatch)
    with loader_of(regular(), 3, STREAMS) as loader:
        assert outline(list(loader)) == expected[0]
    assert fault.deaths == 3
    assert told == []
