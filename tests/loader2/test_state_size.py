"""States are small, and taking them costs nothing per element."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import loader_of, plain, take, through_json

import pipes
from pipes import IterDataPipe
from pipes.iter import IterableWrapper
from pipes.loader2.streams import Plan, Stream

pytestmark = pytest.mark.usefixtures("no_residue")

ELEMENT = 100_000


def wide(number: int) -> Any:
    """Return 100 kB of which one number is stored."""
    return np.broadcast_to(np.float64(number), ELEMENT // 8)


def test_four_workers_with_large_buffers() -> None:
    """At most 100 KB: four shuffle buffers of 10,000 elements of 100 KB."""
    names = IterableWrapper(range(200_000)).shuffle(10_000).sharding_filter()
    graph = names.map(wide).shuffle(10_000).map(lambda element: (element.nbytes, float(element[0]))).batch(100)
    with loader_of(graph, 4, prefetch=2, snapshot_every=4) as loader:
        iterator = iter(loader)
        states = []
        for _ in range(4):
            outputs = take(iterator, 150)
            assert outputs[0][0][0] == ELEMENT
            states.append(loader.state_dict())
            assert len(json.dumps(states[-1])) <= 100_000
        expected = plain(take(iterator, 8))
        loader.load_state_dict(through_json(states[-1]))
        assert plain(take(iter(loader), 8)) == expected


def busy_graph() -> IterDataPipe[int]:
    pipe = IterableWrapper(range(10_000_000)).sharding_filter().map(abs).shuffle(100).filter(bool).enumerate()
    return pipe.flatmap(lambda pair: pair).batch(10).unbatch().shuffle(50).skip(3)  # type: ignore[no-any-return]


PACKAGE = str(Path(pipes.__file__).parent)


def test_memory_does_not_grow_with_elements() -> None:
    stream = Stream(busy_graph(), Plan(3, 0, 1), 0)

    def held(outputs: int) -> int:
        for _ in range(outputs):
            stream.next()
        trace = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{PACKAGE}/*")])
        return sum(statistic.size for statistic in trace.statistics("filename"))

    tracemalloc.start()
    try:
        held(20_000)  # buffers are full and anchors as many as are kept
        before = held(0)
        after = held(60_000)
    finally:
        tracemalloc.stop()
        stream.close()
    assert after - before < 20_000, "a third of a byte for each of 60,000 outputs"


def calls_of_helpers(graph: IterDataPipe[Any], outputs: int) -> Counter[str]:
    """Return how often functions that serve states alone were called while `outputs` came, by name."""
    stream = Stream(graph, Plan(3, 0, 1), 0)
    for _ in range(1000):
        stream.next()
    calls: Counter[str] = Counter()
    state_file = f"{PACKAGE}/state.py"

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename == state_file or code.co_name in ("capture", "captures", "describe")):
            calls[code.co_name] += 1

    sys.setprofile(profile)
    try:
        for _ in range(outputs):
            stream.next()
    finally:
        sys.setprofile(None)
    stream.close()
    assert calls["note"] > 10, "the graph takes no anchors, so this shows nothing"
    return calls


def test_nothing_is_made_for_each_element() -> None:
    """What is made and dropped at once does not show in memory; but helpers of states that never run make nothing."""
    pipe = IterableWrapper(range(10_000_000)).sharding_filter().map(abs).shuffle(100).filter(bool).enumerate()
    assert sum(calls_of_helpers(pipe.shuffle(50).skip(3), 12_800).values()) < 12_800 / 2


def test_stages_that_expand_count_anew_for_each_input() -> None:
    pipe = IterableWrapper(range(10_000_000)).batch(100).unbatch()
    assert sum(calls_of_helpers(pipe, 32_000).values()) < 32_000 / 10


def test_the_state_of_a_long_run_is_as_small_as_that_of_a_short_one() -> None:
    loader = loader_of(busy_graph())
    iterator = iter(loader)
    sizes = []
    for outputs in (1000, 1000, 50_000):
        list(islice(iterator, outputs))
        sizes.append(len(json.dumps(loader.state_dict())))
    assert max(sizes) < 3000
    assert sizes[-1] - sizes[0] < 50, "the digits of larger counts"
