"""How `iter(pipe)` works outside a loader: seeds, one live iterator a pipe, and the generations of fork and demux.

Contract
- `iter(pipe)` makes a context of its own, unless a user's stage of a running context was to iterate the pipe.
- A new context takes over every pipe of its graph: older contexts that hold one of them are closed, and their
  iterators raise StaleIteratorError at the next use.
- The children of one fork or demux share its run: they form a generation. A child that was already started in the
  generation begins a new one, which replaces the older with all its children.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from pipes.errors import StaleIteratorError
from pipes.run import Context, Node, Run, inputs_of

__all__ = ["await_user", "iterate"]

# Pipes whose next iteration belongs to a running context, because a user's stage there will iterate them.
_awaited: dict[int, tuple[Context, Node, Run | None]] = {}
# The context that iterates a pipe now. A context keeps its pipes alive, so an id cannot be reused while it lives.
_owners: dict[int, weakref.ref[Context]] = {}


# What the children of a fork or demux share now, by the id of the shared stage.
_generations: dict[int, _Generation] = {}


class _Generation:
    """One run of a shared stage and the children that were started on it."""

    def __init__(self, main: Node) -> None:
        self.context = _context_of_its_own(main)
        self.main = weakref.ref(main, lambda _: self.end(None))
        self.key = id(main)
        self.members: list[weakref.ref[Context]] = []
        self.started: set[int] = set()
        self.run = _begin(self.context)

    def end(self, successor: str | None) -> None:
        if _generations.get(self.key) is self:
            del _generations[self.key]
        for member in self.members:
            context = member()
            if context is not None and successor is not None:
                _replace(context, successor)
        self.context.close()


def iterate(pipe: Node) -> Iterator[Any]:
    """Return a new iterator of `pipe`, as `iter(pipe)` does."""
    if id(pipe) in _awaited:
        context, _, run = _awaited[id(pipe)]
        _awaited[id(pipe)] = (context, pipe, None)
        if run is None:
            run = context.again(pipe, len(context.children) + 1).start()
        return iter(run)
    context = _context_of_its_own(pipe)
    return _guarded(context, _begin(context))


def await_user(context: Context, pipe: Node, run: Run) -> None:
    """Have the next `iter(pipe)`, which a user's stage will call, join `context`."""
    _awaited[id(pipe)] = (context, pipe, run)

    def release() -> None:
        if _awaited.get(id(pipe), (None,))[0] is context:
            del _awaited[id(pipe)]

    context.at_close.append(release)


def _begin(context: Context) -> Run:
    """Take over the pipes of a context from older ones, join the generations of its shared stages, open its runs."""
    private = _join_generations(context)
    for node in private:
        owner = _owners.get(id(node), lambda: None)()
        if owner is not None:
            _replace(owner, context.names[id(node)])
    for node in private:
        _owners[id(node)] = weakref.ref(context, _forget(id(node)))
    return context.start()


def _join_generations(context: Context) -> list[Node]:
    """Adopt the runs of the nearest shared stages; return the pipes that are this context's alone."""
    private: list[Node] = []
    pending, seen = [context.last], set()
    shared: dict[int, tuple[Node, list[Node]]] = {}
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        private.append(node)
        for source in inputs_of(node):
            if source._shared:
                shared.setdefault(id(source), (source, []))[1].append(node)
            else:
                pending.append(source)
    for key, (main, children) in shared.items():
        generation = _generations.get(key)
        if generation is not None and any(id(child) in generation.started for child in children):
            if not generation.run.finished():  # type: ignore[attr-defined]
                warnings.warn(
                    f"{context.names[key]} starts again although some of its children are not exhausted; their "
                    "iterators are no longer valid",
                    stacklevel=4,
                )
            generation.end(context.names[id(children[0])])
            generation = None
        if generation is None:
            generation = _generations[key] = _Generation(main)
        generation.started.update(id(child) for child in children)
        generation.members.append(weakref.ref(context))
        context.runs[key] = generation.run
        context.adopted.add(key)
    return private


def _forget(key: int) -> Any:
    def forget(dead: weakref.ref[Context]) -> None:
        if _owners.get(key) is dead:
            del _owners[key]

    return forget


def _replace(context: Context, name: str) -> None:
    context.replaced_by = name
    context.close()


def _context_of_its_own(pipe: Node) -> Context:
    from torch.utils.data import get_worker_info

    epoch = pipe.__dict__.get("_iterations", 0)
    pipe.__dict__["_iterations"] = epoch + 1
    info = get_worker_info()
    rank, world = _rank()
    if info is None:
        seed, stream, streams = _initial_seed(), rank, world
    else:
        # The loader's base seed is its own for each epoch, and the workers of one loader share it.
        seed, epoch = info.seed - info.id, 0
        stream, streams = info.id * world + rank, info.num_workers * world
    context = Context(pipe, seed=seed, epoch=epoch, stream=stream, streams=streams, alone=True)
    for node in context.nodes:
        if getattr(node, "_seed", None) is not None and getattr(node, "_seed_epoch", 0) is None:
            node.__dict__["_seed_epoch"] = epoch
    return context


def _initial_seed() -> int:
    import torch

    return torch.initial_seed()


def _rank() -> tuple[int, int]:
    """Return the rank and the world size of the default process group; (0, 1) without one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _guarded(context: Context, run: Run) -> Iterator[Any]:
    body = iter(run)
    if not isinstance(body, Generator):
        body = (element for element in body)
        run._iterator = body
    try:
        yield from body
    finally:
        if context.replaced_by is None:
            context.close()
    if context.replaced_by is not None:
        raise StaleIteratorError(
            f"this iterator is no longer valid: a newer iterator of {context.replaced_by} took over; "
            "a pipe has one iterator at a time, so use .fork() for two readers of the same elements"
        )


