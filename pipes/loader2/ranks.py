"""What the ranks of a training tell each other, by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipes.loader2.remote_error import pack_error, unpack_error
from pipes.shares import rank_and_world

if TYPE_CHECKING:
    from pipes.loader2.loader import DataLoader2

__all__ = ["GatheredState", "of_all_ranks", "shared_seed"]


def shared_seed() -> int:
    """Return torch's initial seed, rank 0's on every rank, without moving any generator."""
    import torch
    import torch.distributed as dist

    seed = [torch.initial_seed() % (1 << 64)]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(seed, src=0)
    return seed[0]


def of_all_ranks(make: Callable[[], dict[str, Any]]) -> Any:
    """Return the list of what `make` gives on all ranks, which all call this; that itself when there is one rank.

    Raises what `make` raises on any of them, on all (see `remote_error`).
    """
    import torch.distributed as dist

    rank, world = rank_and_world()
    if world == 1:
        return make()
    states: list[Any] = [None] * world
    try:
        state = make()
    except Exception as error:
        # The others wait for an answer.
        dist.all_gather_object(states, pack_error(error, f"rank {rank}"))
        raise
    dist.all_gather_object(states, state)
    for state in states:
        if isinstance(state, bytes):
            raise unpack_error(state)
    return states


class GatheredState:
    """The state of `loader` on all ranks, for trainers that keep what rank 0 gives them, as Accelerate does.

    All ranks ask for it at the same moment, and each loads what rank 0 was given. With one rank it is the loader's own.

    >>> from pipes.iter import IterableWrapper
    >>> from pipes.loader2 import DataLoader2
    >>> loader = DataLoader2(IterableWrapper(range(6)).batch(2))
    >>> iterator = iter(loader)
    >>> first, state = next(iterator), GatheredState(loader).state_dict()
    >>> GatheredState(loader).load_state_dict(state)
    >>> list(loader)
    [[2, 3], [4, 5]]
    """

    def __init__(self, loader: DataLoader2[Any]) -> None:
        self.loader = loader

    def state_dict(self) -> Any:
        """Return the list of the states of all ranks, or the one there is."""
        return of_all_ranks(self.loader.state_dict)

    def load_state_dict(self, state: Any) -> None:
        """Go on, from the next `iter` on, where all ranks stood; raises what `DataLoader2.load_state_dict` raises."""
        self.loader.load_state_dict(state)
