"""The check that every stage passes: values, a second pass, pickling, and an exact resume at every stopping point."""

from __future__ import annotations

import atexit
import json
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any

import cloudpickle
import torch

from pipes import IterDataPipe
from pipes.config import dump_graph, load_graph
from pipes.errors import ConfigError
from pipes.iter import IterableWrapper
from pipes.node import walk
from pipes.run import Context, Run

SEED = 11
_fresh: ProcessPoolExecutor | None = None


def start(pipe: IterDataPipe[Any], table: Any = None, *, epoch: int = 0, stream: int = 0, streams: int = 1) -> Run:
    """Return the run of the last stage, restored to `table`."""
    return Context(pipe, seed=SEED, epoch=epoch, stream=stream, streams=streams).start(table)


def plain(value: Any) -> Any:
    """Return `value` in a form that `==` compares as a whole."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def saved(run: Run) -> Any:
    """Return the state of `run` after a JSON round trip."""
    return json.loads(json.dumps(run.table()))


def check_stage(
    make: Callable[[], IterDataPipe[Any]],
    expected: list[Any] | None = None,
    *,
    epochs: int = 2,
    streams: tuple[int, ...] = (1, 3),
    equal_state: bool = True,
) -> None:
    """Check everything that a stage promises; `make` builds a fresh, finite graph that ends in it."""
    if expected is not None:
        assert plain(list(make())) == plain(expected)
        pipe = make()
        assert [plain(list(pipe)) for _ in range(2)] == [plain(expected)] * 2, "the second pass differs"
    assert plain(list(start(cloudpickle.loads(cloudpickle.dumps(make()))))) == plain(list(start(make())))
    for count in streams:
        for stream in range(count):
            for epoch in range(epochs):
                _check_every_stop(make, epoch, stream, count, equal_state)
    _check_chain(make)
    _check_yaml(make)
    _check_fresh_process(make)


def check_everywhere(build: Callable[[IterDataPipe[Any]], IterDataPipe[Any]], count: int = 14, **options: Any) -> None:
    """Check a stage behind a shuffle, in front of one, and on one side of a fork and a zip."""

    def forked() -> IterDataPipe[Any]:
        left, right = IterableWrapper(range(count)).shuffle(4).fork(2)
        return build(left).zip(right)

    def late_forked() -> IterDataPipe[Any]:
        left, right = build(IterableWrapper(range(count)).shuffle(3)).fork(2)
        return left.shuffle(4).zip(right)

    placements: list[Callable[[], IterDataPipe[Any]]] = [
        lambda: build(IterableWrapper(range(count)).shuffle(4)),
        lambda: build(IterableWrapper(range(count))).shuffle(3),
        lambda: build(IterableWrapper(range(count)).sharding_filter()).shuffle(3).batch(2),
    ]
    for make in placements:
        check_stage(make, **{"epochs": 1, "streams": (1, 2), **options})
    for make in (forked, late_forked):
        # After a load the shared stage has the elements in between before it again, so the table reads otherwise.
        check_stage(make, **{"epochs": 1, "streams": (1,), **options, "equal_state": False})


def _check_every_stop(
    make: Callable[[], IterDataPipe[Any]], epoch: int, stream: int, streams: int, equal: bool
) -> None:
    where: Any = {"epoch": epoch, "stream": stream, "streams": streams}
    whole = [plain(element) for element in start(make(), **where)]
    run = start(make(), **where)
    iterator = iter(run)
    for k in range(len(whole) + 2):
        state = saved(run)
        again = start(make(), state, **where)
        captured = pickle.loads(pickle.dumps(run.captures()))
        assert json.loads(json.dumps(again.table(captured))) == state, (
            f"at {k}, another run describes captures otherwise"
        )
        assert not equal or saved(again) == state, f"saved right after a load at {k}, the state differs"
        assert [plain(element) for element in again] == whole[k:], f"resume at {k} of {len(whole)} ({where})"
        again.context.close()
        if k < len(whole):
            assert plain(next(iterator)) == whole[k], f"saving at {k} changed what follows"
        else:
            assert next(iterator, "end") == "end"
    run.context.close()


def _check_yaml(make: Callable[[], IterDataPipe[Any]]) -> None:
    try:
        text = dump_graph(make())
    except ConfigError:  # it holds what YAML does not name: a lambda, data that is no list
        return
    named = {
        f"{value.__module__}:{value.__qualname__}": value
        for node in walk(make())
        for value in vars(node).values()
        if callable(value) and hasattr(value, "__qualname__")
    }
    again = load_graph(text, functions=named)
    assert plain(list(start(again))) == plain(list(start(make()))), f"YAML gives another graph:\n{text}"


def _check_chain(make: Callable[[], IterDataPipe[Any]]) -> None:
    whole = [plain(element) for element in start(make())]
    state, got = None, []
    for step in (1, 2, 0, 4, 3, 5, 1, 7, len(whole)):
        run = start(make(), state)
        got += [plain(element) for element in islice(iter(run), step)]
        state = saved(run)
        run.context.close()
    assert got == whole, "a chain of saves and loads loses or doubles elements"


def rest_of(payload: bytes, state: Any) -> Any:
    """Run in a fresh process: return what a graph gives from `state` on."""
    make = pickle.loads(payload)
    return [plain(element) for element in start(make(), state)]


def _check_fresh_process(make: Callable[[], IterDataPipe[Any]]) -> None:
    global _fresh
    if _fresh is None:
        _fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        atexit.register(_fresh.shutdown)
    whole = [plain(element) for element in start(make())]
    k = random.Random(len(whole)).randint(0, len(whole))
    run = start(make())
    assert len(list(islice(iter(run), k))) == k
    state = saved(run)
    run.context.close()
    assert _fresh.submit(rest_of, cloudpickle.dumps(make), state).result(60) == whole[k:]
