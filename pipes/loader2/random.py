"""torchdata's `SeedGenerator`: one shared sequence of seeds, and one of each worker's own."""

from __future__ import annotations

from pipes.arguments import whole
from pipes.seeds import derive_key

__all__ = ["SeedGenerator", "seeds_of"]


class SeedGenerator:
    """Give 64-bit seeds: `generate_shared_seed` the same in every worker, `generate_seed` each worker's own.

    Raises ValueError for a seed that does not fit 64 bits and for a negative worker id.

    >>> a, b = SeedGenerator(1).spawn(0), SeedGenerator(1).spawn(1)
    >>> a.generate_shared_seed() == b.generate_shared_seed(), a.generate_seed() == b.generate_seed()
    (True, False)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed(seed)

    def seed(self, seed: int | None = None) -> None:
        """Begin both sequences anew; None takes `torch.initial_seed()`."""
        if seed is None:
            import torch

            seed = torch.initial_seed()
        seed = whole("seed", seed)
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"a seed lies in [0, 2**64), not {seed}")
        self._seed, self._worker = seed, -1
        self._shared = self._own = 0

    def generate_shared_seed(self) -> int:
        """Return the next seed of the sequence that all workers share."""
        self._shared += 1
        return derive_key(self._seed, "shared", self._shared) >> 64

    def generate_seed(self) -> int:
        """Return the next seed of this worker's own sequence."""
        self._own += 1
        return derive_key(self._seed, "own", self._worker, self._own) >> 64

    def spawn(self, worker_id: int, inplace: bool = False) -> SeedGenerator:
        """Return the generator of a worker: the shared sequence goes on from here, the own one is new."""
        worker_id = whole("worker_id", worker_id)
        if worker_id < 0:
            raise ValueError(f"worker_id must be 0 or more, not {worker_id}")
        child = self if inplace else SeedGenerator(self._seed)
        child._seed, child._shared = self._seed, self._shared
        child._worker, child._own = worker_id, 0
        return child


def seeds_of(seed: int, epoch: int) -> SeedGenerator:
    """Return the generator that an epoch's hooks get: another one each epoch.

    >>> seeds_of(1, 0).generate_shared_seed() == seeds_of(1, 1).generate_shared_seed()
    False
    """
    return SeedGenerator(derive_key(seed, epoch, "hooks") >> 64)
