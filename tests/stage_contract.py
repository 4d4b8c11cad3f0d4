"""The check that every stage passes: values, a second pass, pickling, and an exact resume at every stopping point."""

from __future__ import annotations

import atexit
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any

import cloudpickle
import torch
from loading import through_json, with_draws

from pipes import IterDataPipe
from pipes.config import dump_graph, load_graph
from pipes.context import Context
from pipes.errors import ConfigError
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2
from pipes.node import walk
from pipes.run import Run

SEED = 11
_fresh: ProcessPoolExecutor | None = None


def start(pipe: IterDataPipe[Any], table: Any = None, *, epoch: int = 0, stream: int = 0, streams: int = 1) -> Run:
    """Return the run of the last stage, restored to `table`."""
    return Context(pipe, seed=SEED, epoch=epoch, stream=stream, streams=streams).start(table)


def plain(value: Any) -> Any:
    """Return `value` in a form that `==` compares as a whole."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
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
    _check_pipe(make)
    _check_loader(make)
    _check_fresh_process(make)


def check_everywhere(build: Callable[[IterDataPipe[Any]], IterDataPipe[Any]], count: int = 11, **options: Any) -> None:
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
        start(make(), **where).check_table(state, "the state")
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


def loader_over(make: Callable[[], IterDataPipe[Any]]) -> DataLoader2[Any]:
    """Return a loader whose outputs carry one draw from each global generator."""
    loader: DataLoader2[Any] = DataLoader2(make().map(with_draws))
    loader.seed(SEED)
    return loader


def _check_loader(make: Callable[[], IterDataPipe[Any]]) -> None:
    """Check that a loader goes on exactly, with users' draws, in this epoch and the next one."""
    loader, again = loader_over(make), loader_over(make)
    whole = [[plain(output) for output in loader] for _ in range(2)]
    loader.seed(SEED)
    iterator = iter(loader)
    count = len(whole[0])
    for k in range(count + 2):
        state = through_json(loader.state_dict())
        again.load_state_dict(state)
        assert through_json(again.state_dict()) == state, f"saved right after a load at {k}, the state differs"
        assert (again.epoch, loader.epoch) == ((0, 0) if k <= count else (1, 1))
        if k <= count:
            assert [plain(output) for output in again] == whole[0][k:], f"a loader resumed at {k} differs"
        if k in (0, count // 2, count, count + 1):
            assert [plain(output) for output in again] == whole[1], f"the epoch after a resume at {k} differs"
        assert plain(next(iterator, None)) == (whole[0][k] if k < count else None)
    loader.shutdown()
    again.shutdown()


def _check_pipe(make: Callable[[], IterDataPipe[Any]]) -> None:
    """Check that a pipe without a loader goes on exactly, in this epoch and the next one."""
    if type(make())._remembers():  # then its own state_dict() gives only its own state
        inner, make = make, lambda: inner().header(None)
    pipe, again = make(), make()
    whole = [[plain(element) for element in pipe] for _ in range(2)]
    pipe = make()
    iterator = iter(pipe)
    count = len(whole[0])
    for k in range(count + 2):
        state = through_json(pipe.state_dict())
        again.load_state_dict(state)
        assert through_json(again.state_dict()) == state, f"saved right after a load at {k}, the state differs"
        if k <= count:
            assert [plain(element) for element in again] == whole[0][k:], f"a pipe resumed at {k} differs"
        if k in (0, count // 2, count, count + 1):
            assert [plain(element) for element in again] == whole[1], f"the epoch after a resume at {k} differs"
        assert plain(next(iterator, "end")) == (whole[0][k] if k < count else "end")


def rests_of(payload: bytes, states: list[Any]) -> list[Any]:
    """Run in a fresh process: return what a graph gives from each of the states on."""
    make = pickle.loads(payload)
    rests = []
    for state in states:
        run = start(make(), state)
        rests.append([plain(element) for element in run])
        run.context.close()
    return rests


def _check_fresh_process(make: Callable[[], IterDataPipe[Any]]) -> None:
    """Load every state in another process: one, started anew, serves all cases in turn."""
    global _fresh
    if _fresh is None:
        _fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        atexit.register(_fresh.shutdown)
    whole = [plain(element) for element in start(make())]
    run = start(make())
    iterator, states = iter(run), [saved(run)]
    for _ in iterator:
        states.append(saved(run))
    run.context.close()
    rests = _fresh.submit(rests_of, cloudpickle.dumps(make), states).result(60)
    assert rests == [whole[k:] for k in range(len(whole) + 1)]
