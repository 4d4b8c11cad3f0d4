"""How `iter(pipe)` works outside a loader: seeds, shards, one live iterator a pipe, the generations of fork and demux.

Contract
- `iter(pipe)` makes a context of its own, unless a user's stage of a running context asks for it (see user_run.py).
- A new context takes over every pipe of its graph: older contexts that hold one of them are closed, and their
  iterators raise StaleIteratorError at the next use.
- The children of one fork or demux share its run: they form a generation. A child that was already started in the
  generation begins a new one, which replaces the older with all its children.
- A state that was loaded into a pipe is where its next iteration begins (pipe_state.py); the older one is replaced.
- In a worker of torch's DataLoader, and under torch.distributed, the context is one stream of several.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from inspect import GEN_CREATED, getgeneratorstate
from itertools import chain
from typing import Any, Protocol

from pipes.context import Context, feeds_two
from pipes.error_policy import check_budget, tell
from pipes.errors import StaleIteratorError, StateError
from pipes.pipe_state import Iteration, Loaded, loaded_into, read, state_at
from pipes.run import Node, Run, inputs_of, walk
from pipes.shard_points import check_shard_points
from pipes.shares import (
    is_one_of_several,
    reading_a_share,
    reads_a_share,
    seed_of,
    stream_of,
    warn_of_automatic_sharding,
)
from pipes.state import Table
from pipes.tallies import Tallies

__all__ = ["expect", "iterate", "load_state_into", "state_of", "stop_expecting"]


class Asking(Protocol):
    """A run of a user's stage, which will call `iter` on pipes."""

    pipe: Node
    context: Context
    #: The one in which it began.
    thread: int

    def executing(self) -> bool: ...
    def claim(self, pipe: Node) -> Iterator[Any] | None: ...
    def nest(self, pipe: Node) -> Iterator[Any]: ...


# The runs of users' stages that were started and not yet closed; the ones started last stand last.
_asking: list[Asking] = []
# The context that iterates a pipe now. A context keeps its pipes alive, so an id cannot be reused while it lives.
_owners: dict[int, weakref.ref[Context]] = {}


class _Generation:
    """One run of a shared stage and the children that were started on it; the shared stage holds it."""

    def __init__(self, main: Node, outer: Context, whole: bool) -> None:
        self.context = _context_of_its_own(main)
        if whole:  # no other graph reads it, so its stages are those of the graph below
            self.context.names = outer.names
        # Where the graph is split, and so which draws its streams share, the graph below decides.
        inside = {id(node) for node in self.context.nodes}
        self.context.shard_after = outer.shard_after if id(outer.shard_after) in inside else None
        self.context.above_shard = outer.above_shard
        self.members: list[weakref.ref[Context]] = []
        self.started: set[int] = set()
        self.context.at_close.append(partial(_taken_over, weakref.ref(self)))
        self.run: Any = _begin(self.context)

    def _replace_members(self, why: str) -> None:
        for member in self.members:
            context = member()
            if context is not None:
                _replace(context, why)

    def end(self, successor: str) -> None:
        self._replace_members(_newer(successor))
        self.context.close()


def _taken_over(generation: weakref.ref[_Generation]) -> None:
    """Tell the children's iterators that what they read is at its end because somebody else iterates it."""
    closed = generation()
    if closed is not None and closed.context.replaced_by is not None:
        closed._replace_members(closed.context.replaced_by)


def iterate(pipe: Node) -> Iterator[Any]:
    """Return a new iterator of `pipe`, as `iter(pipe)` does."""
    if _asking:
        for asking in reversed(_asking):
            iterator = asking.claim(pipe)
            if iterator is not None:
                return iterator
        host = _host(pipe)
        if host is not None:
            return host.nest(pipe)
    loaded = loaded_into(pipe)
    context = _context_of_its_own(pipe, loaded)
    warn_of_automatic_sharding(context)
    table = None if loaded is None else loaded.table
    for node in context.nodes if loaded is not None else ():
        if type(node)._shared:  # which counts its own epochs, and is not begun by a restore
            node.__dict__.update(_pipes_seed=context.seed, _pipes_epoch=context.epoch + (table is not None))
    run = _begin(context, table)
    pipe.__dict__["_iteration"] = iteration = Iteration(context, run, table)
    return PipeIterator.over(_guarded(context, run, iteration, loaded), context, iteration, run.in_parts)


class PipeIterator(chain[Any]):
    """The iterator of a pipe outside a loader; `next` costs what it does in C.

    A pipe whose end was seen stands at its next epoch, while this iterator has nothing more to give. So torchdata's
    loader, which asks both, is told by this state which of the workers had come to their ends.
    """

    _parts: tuple[Generator[Any, None, None], Context, Iteration]

    @classmethod
    def over(
        cls, body: Generator[Any, None, None], context: Context, iteration: Iteration, in_parts: bool
    ) -> PipeIterator:
        """Return the iterator of `body`, or of the parts that it gives."""
        parts = body if in_parts else (body,)
        self: Any = cls.from_iterable((_in_a_share(parts),) if is_one_of_several() else parts)
        self._parts = body, context, iteration
        return self  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, bool]:
        """Return whether the end was seen; where it stands until then, the pipe's own `state_dict` says."""
        return {"ended": self._parts[2].ended}

    def load_state_dict(self, state: Any) -> None:
        """Give nothing, if `state` is that of an iterator at its end; what was loaded into the pipe stays there."""
        if state["ended"]:
            self.close()

    def close(self) -> None:
        """Close every file of the iteration, as a generator's `close` does."""
        body, context, _ = self._parts
        if getgeneratorstate(body) == GEN_CREATED:  # it was never asked, so it would not do this itself
            context.close()
        body.close()


def _in_a_share(parts: Iterable[Iterator[Any]]) -> Iterator[Any]:
    elements = chain.from_iterable(parts)
    while True:
        with reading_a_share():
            try:
                element = next(elements)
            except StopIteration:
                return
        yield element


def state_of(pipe: Node) -> dict[str, Any]:
    """Return where the newest iteration of `pipe` stands, as JSON data; raises StateError where nobody can tell."""
    loaded = pipe.__dict__.get("_loaded")
    if loaded is None:
        owner = _owners.get(id(pipe), lambda: None)()
        if owner is not None and owner.last is not pipe:
            raise StateError(
                f"{type(pipe).__name__} is read by {type(owner.last).__name__}: ask the last stage of a graph"
            )
        _, stream, streams = stream_of(walk(pipe))
        loaded = state_at(pipe, seed_of(pipe), stream, streams)
    state: dict[str, Any] = loaded.to_json()
    return state


def load_state_into(pipe: Node, state: Any, on_changed_data: str = "raise") -> None:
    """Have the next iteration of `pipe` go on where `state` was saved; raises StateError, and changes nothing."""
    if on_changed_data not in ("raise", "warn"):
        raise ValueError(f"on_changed_data must be 'raise' or 'warn', not {on_changed_data!r}")
    loaded = read(pipe, state, on_changed_data)
    owner = _owners.get(id(pipe), lambda: None)()
    if owner is not None and owner.last is pipe:
        _replace(owner, "load_state_dict() was called; the next iter() goes on from that state")
    pipe.__dict__["_loaded"] = loaded
    pipe.__dict__.pop("_iteration", None)


def expect(run: Asking) -> None:
    """Let `iter(pipe)` ask `run` first, for it is about to run a user's `__iter__`."""
    _asking.append(run)


def stop_expecting(run: Asking) -> None:
    _asking[:] = [each for each in _asking if each is not run]


def _host(pipe: Node) -> Asking | None:
    """Return the user's stage that is executing now and whose graph `pipe` reads from, if there is one."""
    executing = [asking for asking in _asking if asking.executing()]
    if not executing:
        return None
    wanted = {id(node) for node in walk(pipe)}
    for asking in reversed(executing):
        if id(asking.pipe) not in wanted and any(id(node) in wanted for node in asking.context.nodes):
            return asking
    return None


def _seed_above_the_split() -> tuple[int, int] | None:
    """Return seed and epoch of the graph in which a user's stage is executing, if all streams read that stage.

    What it builds draws alike in all of them, or they would not split the same elements.
    """
    thread = threading.get_ident()
    for asking in reversed(_asking):
        if asking.thread == thread and asking.executing():
            context = asking.context
            return (context.seed, context.epoch) if id(asking.pipe) in context.above_shard else None
    return None


def _begin(context: Context, table: Table | None = None) -> Run:
    """Take over the pipes of a context from older ones, join the generations of its shared stages, open its runs."""
    private = _join_generations(context) if table is None else _leave_generations(context)
    for node in private:
        owner = _owners.get(id(node), lambda: None)()
        if owner is not None:
            _replace(owner, _newer(context.names[id(node)]))
    for node in private:
        _owners[id(node)] = weakref.ref(context, _forget(id(node)))
    return context.start(table)


def _leave_generations(context: Context) -> list[Node]:
    """End the generations of the graph, which is restored with shared stages of its own; return all its pipes."""
    for node in context.nodes:
        generation = node.__dict__.pop("_generation", None)
        if generation is not None:
            generation.end(context.names[id(node)])
    return context.nodes


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
            if type(source)._shared:
                shared.setdefault(id(source), (source, []))[1].append(node)
            else:
                pending.append(source)
    for key, (main, children) in shared.items():
        generation: _Generation | None = main.__dict__.get("_generation")
        whole = len(children) == vars(main)["num_instances"]
        if generation is not None and generation.context.replaced_by is not None:
            generation = None
        if generation is not None and any(id(child) in generation.started for child in children):
            # Who starts all children again, in one graph, takes nothing from anybody.
            if not whole and not generation.run.finished():
                warnings.warn(
                    f"{context.names[key]} starts again although some of its children are not exhausted; their "
                    "iterators are no longer valid",
                    stacklevel=5,
                )
            generation.end(context.names[id(children[0])])
            generation = None
        if generation is None:
            generation = main.__dict__["_generation"] = _Generation(main, context, whole)
        generation.started.update(id(child) for child in children)
        generation.members = [member for member in generation.members if member() is not None]
        generation.members.append(weakref.ref(context))
        context.runs[key] = generation.run
        context.adopted.add(key)
        private = _but_for(generation.context, private, context)
    return private


def _but_for(shared: Context, private: list[Node], context: Context) -> list[Node]:
    """Return the pipes that a context reads but for those of a shared stage, which a user's pipe may refer to, too."""
    theirs = {id(node) for node in shared.nodes}
    for node in private:
        twice = [source for source in inputs_of(node) if id(source) in theirs and not type(source)._shared]
        if twice and id(node) not in theirs and getattr(type(node), "_own_iter", None) is None:
            raise feeds_two(context.names[id(twice[0])])
    return [node for node in private if id(node) not in theirs]


def _forget(key: int) -> Callable[[weakref.ref[Context]], None]:
    def forget(dead: weakref.ref[Context]) -> None:
        if _owners.get(key) is dead:
            del _owners[key]

    return forget


def _newer(name: str) -> str:
    return (
        f"a newer iterator of {name} took over; a pipe has one iterator at a time, so use .fork() for two readers of "
        "the same elements"
    )


def _replace(context: Context, why: str) -> None:
    context.replaced_by = why
    context.close()


def _context_of_its_own(pipe: Node, loaded: Loaded | None = None) -> Context:
    nodes = walk(pipe)
    world, stream, streams = stream_of(nodes)
    seed, epoch = _seed_above_the_split() or (seed_of(pipe), pipe.__dict__.get("_pipes_epoch", 0))
    on_changed_data = "raise"
    if loaded is not None:
        loaded.check_stream(stream, streams)
        seed, epoch, on_changed_data = loaded.seed, loaded.epoch, loaded.on_changed_data
    if streams > 1:
        check_shard_points(pipe, streams, world)
    context = Context(
        pipe,
        seed=seed,
        epoch=epoch,
        stream=stream,
        streams=streams,
        world=world,
        alone=True,
        on_changed_data=on_changed_data,
    )
    context.inside = reads_a_share()
    pipe.__dict__["_pipes_epoch"] = epoch + 1
    for node in nodes:
        if loaded is not None and context.names[id(node)] in loaded.seeded:
            node.__dict__["_seed_epoch"] = loaded.seeded[context.names[id(node)]]
        if node.__dict__.get("_seed") is not None and node.__dict__.get("_seed_epoch", 0) is None:
            node.__dict__["_seed_epoch"] = epoch
    return context


def _end_of_epoch(context: Context) -> None:
    """Tell of the elements that were skipped, once also where the children of a fork share them."""
    adopted = [context.runs[key].context for key in context.adopted]
    for each in (context, *adopted):
        counts, each.tallies = each.tallies.counts(), Tallies()
        check_budget(counts, ended=True)
        tell(counts)


def _guarded(context: Context, run: Run, iteration: Iteration, loaded: Loaded | None) -> Generator[Any, None, None]:
    pipe = context.last
    if pipe.__dict__.get("_loaded") is loaded and loaded is not None:
        # An iterator that was never asked does not use a state up.
        del pipe.__dict__["_loaded"]
        pipe.__dict__["_pipes_seed"] = loaded.seed
    body = iter(run)
    if run.parts is not None:
        body = run.parts
    elif not isinstance(body, Generator):
        body = (element for element in body)
        run._iterator = body
    try:
        # The chain keeps a `close` of this generator from the stages until it is noted where they stand.
        yield from chain(body)
        if context.replaced_by is None:
            iteration.end()
            _end_of_epoch(context)
    except GeneratorExit:
        iteration.give_up()
        raise
    except BaseException:
        iteration.fail()
        raise
    finally:
        if context.replaced_by is None:
            context.close()
            for node in context.nodes:
                if _owners.get(id(node), lambda: None)() is context:
                    del _owners[id(node)]
    if context.replaced_by is not None:
        raise StaleIteratorError(f"this iterator is no longer valid: {context.replaced_by}")
