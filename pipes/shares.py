"""Which share of a graph this process reads outside a loader of ours, and with which seed.

Only what a process iterates itself is shared out. A pipe that a function, or a user's stage, iterates for one element
of such a share (the rows of a file whose name it was given) is read whole, as in torch, whose loader shares out the
graph that it was given and no other: else each worker would lose the others' part of every file.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from types import FunctionType

from pipes.context import Context
from pipes.node import Node, describe_automatic_sharding

__all__ = [
    "is_one_of_several",
    "rank_and_world",
    "rank_to_send",
    "read_whole",
    "reading_a_share",
    "reads_a_share",
    "seed_of",
    "sharded_by_hand",
    "stream_of",
    "warn_of_automatic_sharding",
]


class _Reading(threading.local):
    now = False


_reading = _Reading()


class reading_a_share:
    """While the block runs, what its thread iterates besides is part of an element, and read whole.

    >>> with reading_a_share():
    ...     stream_of([])
    (1, 0, 1)
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _reading.now
        _reading.now = True

    def __exit__(self, *_: object) -> None:
        _reading.now = self._before


def reads_a_share() -> bool:
    """Return whether this thread is inside `reading_a_share`, or did `read_whole`."""
    return _reading.now


def read_whole() -> None:
    """Have this thread, which works on elements of a share, read whole what it iterates from now on."""
    _reading.now = True


def seed_of(pipe: Node) -> int:
    """Return the seed of the next iteration: that of the state it began with, the torch loader's, or torch's own."""
    from torch.utils.data import get_worker_info

    kept: int | None = pipe.__dict__.get("_pipes_seed")
    if kept is not None:
        return kept
    info = get_worker_info()
    if info is None:
        return _initial_seed()
    # The workers of one loader share its base seed; it is new each epoch, unless the workers are persistent.
    return int(info.seed - info.id)


def stream_of(nodes: list[Node]) -> tuple[int, int, int]:
    """Return (number of ranks that split the graph, number of this stream, number of streams)."""
    from torch.utils.data import IterableDataset, get_worker_info

    info = get_worker_info()
    if _reading.now or (info is not None and not isinstance(info.dataset, IterableDataset)):
        return 1, 0, 1
    rank, world = rank_and_world() if info is None else _rank_in_worker(nodes)
    workers, ranks = sharded_by_hand(nodes, 1 if info is None else info.num_workers, world)
    if info is not None:
        # It may be a data set of the user's own that reads pipes.
        names = _names_used(type(info.dataset))
        workers, ranks = workers or "get_worker_info" in names, ranks or "get_rank" in names
    if ranks:
        rank, world = 0, 1
    if info is None or workers:
        return world, rank, world
    return world, info.id * world + rank, info.num_workers * world


def is_one_of_several() -> bool:
    """Return whether this process is a worker of torch's loader, or a rank of several, and not inside a share."""
    from torch.utils.data import get_worker_info

    return not _reading.now and (get_worker_info() is not None or rank_and_world()[1] > 1)


def sharded_by_hand(nodes: list[Node], workers: int, world: int) -> tuple[bool, bool]:
    """Return whether the graph is split among (workers, ranks) already: by apply_sharding, or by a user's pipe."""
    by_worker = by_rank = False
    for node in nodes:
        levels = type(node)._levels_by_hand(node, workers, world)
        by_worker, by_rank = by_worker or "worker" in levels, by_rank or "rank" in levels
        if not type(node).__module__.startswith("pipes."):
            names = _names_used(type(node))
            by_worker = by_worker or "get_worker_info" in names
            by_rank = by_rank or "get_rank" in names
    return by_worker, by_rank


def _names_used(cls: type) -> set[str]:
    """Return the global and attribute names in the code of a user's class and its bases."""
    names: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith(("pipes.", "torch.", "builtins", "typing")):
            for value in vars(base).values():
                function = getattr(value, "__wrapped__", value)
                if isinstance(function, FunctionType):
                    names.update(function.__code__.co_names)
    return names


def warn_of_automatic_sharding(context: Context) -> None:
    """Say once where a graph without a sharding_filter is split, and what that repeats."""
    from torch.utils.data import get_worker_info

    if context.shard_after is None or "_sharding_told" in context.last.__dict__:
        return
    context.last.__dict__["_sharding_told"] = True
    info = get_worker_info()
    where = describe_automatic_sharding(context.last)
    if where is not None and (info is None or info.id == 0) and rank_and_world()[0] == 0:
        warnings.warn(where, stacklevel=4)


def _initial_seed() -> int:
    import torch

    return torch.initial_seed()


def rank_and_world() -> tuple[int, int]:
    """Return the rank and the world size of the default process group; (0, 1) without one, and inside an element."""
    import torch.distributed as dist

    if _reading.now:
        return 0, 1
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def rank_to_send() -> dict[str, tuple[int, int, int]]:
    """Return what a pipe takes along when it is pickled by one of several ranks: process, rank and world size.

    For the workers of torch's DataLoader that were not forked, and so have no process group.
    """
    rank, world = rank_and_world()
    return {"_sent_by": (os.getpid(), rank, world)} if world > 1 else {}


def _rank_in_worker(nodes: list[Node]) -> tuple[int, int]:
    rank, world = rank_and_world()
    parent = multiprocessing.parent_process()
    if world == 1 and parent is not None:
        for node in nodes:
            sender, *place = node.__dict__.get("_sent_by", (0, 0, 1))
            # A pipe may have been pickled long ago, in another training.
            if sender == parent.pid:
                rank, world = place
    return rank, world
