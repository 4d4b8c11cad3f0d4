"""Where a stream stands for the user, for a new worker, and before the outputs that nobody was given."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from pipes.iter import IterableWrapper
from pipes.loader2.progress import Progress
from pipes.loader2.streams import Plan, StreamState

GRAPH = IterableWrapper(range(9))
PLAN = Plan(seed=1, epoch=0, streams=1)
BASE = StreamState({"0": "base"}, at=2, given=3)


def snapshot(at: int) -> bytes:
    return pickle.dumps((at, {"0": at}))


@pytest.fixture
def progress() -> Progress:
    progress = Progress(0, 0, BASE)
    progress.given, progress.given_snapshot = 8, snapshot(6)
    progress.arrived, progress.arrived_snapshot = 12, snapshot(10)
    return progress


def place(state: StreamState) -> tuple[Any, ...]:
    return state.table, state.at, state.given, state.ended


def test_it_stands_after_what_was_given_and_a_new_worker_after_what_arrived(progress: Progress) -> None:
    assert place(Progress(0, 0, BASE).state(GRAPH, PLAN)) == place(BASE)
    assert place(progress.state(GRAPH, PLAN)) == ({"0": 6}, 6, 8, False)
    assert place(progress.state(GRAPH, PLAN, arrived=True)) == ({"0": 10}, 10, 12, False)
    progress.all_arrived = True
    assert place(progress.state(GRAPH, PLAN)) == ({"0": 6}, 6, 8, False)
    assert place(progress.state(GRAPH, PLAN, arrived=True)) == (None, 0, 12, True)
    progress.given, progress.ended = 12, True
    assert place(progress.state(GRAPH, PLAN)) == (None, 0, 12, True)


def test_before_the_newest_outputs_it_had_not_ended(progress: Progress) -> None:
    progress.ended = True
    assert place(progress.state(GRAPH, PLAN, before=(3, snapshot(4)))) == ({"0": 4}, 4, 5, False)
    assert place(progress.state(GRAPH, PLAN, before=(5, b""))) == place(BASE)
