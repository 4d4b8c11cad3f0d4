"""Where a graph is split into streams: `.sharding_filter`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from torch.utils.data import get_worker_info

from pipes.arguments import whole, whole_or_none
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of
from pipes.errors import GraphError
from pipes.node import BOTH_LEVELS
from pipes.run import Node, ShardRun
from pipes.shard_points import level_share
from pipes.stages.wrapping import as_pipe

__all__ = ["SHARDING_PRIORITIES", "ShardingFilter"]

T = TypeVar("T")


class SHARDING_PRIORITIES(IntEnum):
    """The levels of sharding by hand, as in torch: a higher one varies faster."""

    DEFAULT = 1
    DISTRIBUTED = 2
    MULTIPROCESSING = 3


class _ShardingFilterRun(ShardRun):
    def share(self) -> tuple[int, int]:
        own, total = self.pipe.share()
        context = self.context
        if id(self.pipe) in context.built:
            return own, total
        number, count = level_share(self.pipe._splits(), context.stream, context.streams, context.world)
        return own + total * number, total * count

    def input_pipes(self) -> Sequence[Node]:
        return (self.pipe.source_datapipe,)


@functional_datapipe("sharding_filter")
class ShardingFilter(IterDataPipe[T]):
    """Split the graph here: each stream goes on with every n-th element. One stream, as without a loader, sees all.

    What is above runs once for each stream, so let it yield names, not data. `apply_sharding` shards by hand, as
    torch's `apply_sharding` does; `sharding_group_filter` then makes the stage heed one group only.

    >>> from pipes.iter import IterableWrapper
    >>> pipe = IterableWrapper(range(7)).sharding_filter()
    >>> pipe.apply_sharding(3, 1)
    >>> list(pipe), len(pipe)
    ([1, 4], 2)
    """

    run_class = _ShardingFilterRun
    _shards = True

    def __init__(self, source_datapipe: IterDataPipe[T], sharding_group_filter: int | None = None) -> None:
        self.source_datapipe = as_pipe(source_datapipe)
        self.sharding_group_filter = whole_or_none("sharding_group_filter", sharding_group_filter)
        self._groups: dict[int, tuple[int, int]] = {}
        self._told_in_worker = False

    def apply_sharding(
        self, num_of_instances: int, instance_id: int, sharding_group: int = SHARDING_PRIORITIES.DEFAULT
    ) -> None:
        """Take shard `instance_id` of `num_of_instances`; several groups multiply, the highest varying fastest.

        Raises ValueError for an id out of range, GraphError when DEFAULT is mixed with another group.
        """
        num_of_instances = whole("num_of_instances", num_of_instances)
        instance_id = whole("instance_id", instance_id)
        if not 0 <= instance_id < num_of_instances:
            raise ValueError(f"instance_id must lie in [0, {num_of_instances}), not {instance_id}")
        group = int(whole("sharding_group", sharding_group))
        default = int(SHARDING_PRIORITIES.DEFAULT)
        if any((group == default) != (known == default) for known in self._groups):
            raise GraphError("sharding group DEFAULT cannot be mixed with others; give every apply_sharding a group")
        self._groups[group] = (num_of_instances, instance_id)
        self._told_in_worker = self._told_in_worker or get_worker_info() is not None

    def _splits(self) -> frozenset[str]:
        one = {SHARDING_PRIORITIES.DISTRIBUTED: "rank", SHARDING_PRIORITIES.MULTIPROCESSING: "worker"}
        level = one.get(self.sharding_group_filter)  # type: ignore[call-overload]
        return BOTH_LEVELS if level is None else frozenset({level})

    def _levels_by_hand(self, workers: int, world: int) -> frozenset[str]:
        levels = set()
        for group, (instances, _) in self._groups.items():
            if group == SHARDING_PRIORITIES.MULTIPROCESSING:
                levels.add("worker")
            elif group != SHARDING_PRIORITIES.DEFAULT or not self._told_in_worker:
                levels.add("rank")
            else:  # a worker_init_fn called apply_sharding: for the workers, or for all workers of all ranks
                levels.update(("worker",) if instances == workers and world > 1 else ("worker", "rank"))
        return frozenset(levels)

    def share(self) -> tuple[int, int]:
        """Return (number of this shard, number of shards) by hand; (0, 1) unless `apply_sharding` was called."""
        index, total = 0, 1
        for group in sorted(self._groups, reverse=True):
            if self.sharding_group_filter is None or group == self.sharding_group_filter:
                instances, instance = self._groups[group]
                index += total * instance
                total *= instances
        return index, total

    def _length(self, shard: Shard) -> int:
        own, count = self.share()
        index, total = own + count * shard[0], count * shard[1]
        return -(-(length_of(self.source_datapipe, (0, 1)) - index) // total)
