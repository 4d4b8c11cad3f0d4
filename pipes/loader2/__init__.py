"""How a graph is run: the loader, its reading services, its state.

Names are loaded when first used, so that a worker process can watch its main process before it imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipes.loader2.adapter import ShuffleSpec
    from pipes.loader2.iterator import DataLoader2Iterator
    from pipes.loader2.lightning import LightningLoader
    from pipes.loader2.loader import DataLoader2
    from pipes.loader2.process import stop_forkserver
    from pipes.loader2.random import SeedGenerator
    from pipes.loader2.ranks import GatheredState
    from pipes.loader2.reading_service import (
        InProcessReadingService,
        MultiProcessingReadingService,
        ReadingServiceInterface,
        WorkerInfo,
    )
    from pipes.loader2.services import (
        DistributedReadingService,
        PrototypeMultiProcessingReadingService,
        SequentialReadingService,
    )

__all__ = [
    "DataLoader2",
    "DataLoader2Iterator",
    "DistributedReadingService",
    "GatheredState",
    "InProcessReadingService",
    "LightningLoader",
    "MultiProcessingReadingService",
    "PrototypeMultiProcessingReadingService",
    "ReadingServiceInterface",
    "SeedGenerator",
    "SequentialReadingService",
    "ShuffleSpec",
    "WorkerInfo",
    "stop_forkserver",
]

_HOME = {
    "DataLoader2": "loader",
    "DataLoader2Iterator": "iterator",
    "DistributedReadingService": "services",
    "GatheredState": "ranks",
    "InProcessReadingService": "reading_service",
    "LightningLoader": "lightning",
    "MultiProcessingReadingService": "reading_service",
    "PrototypeMultiProcessingReadingService": "services",
    "ReadingServiceInterface": "reading_service",
    "SeedGenerator": "random",
    "SequentialReadingService": "services",
    "ShuffleSpec": "adapter",
    "WorkerInfo": "reading_service",
    "stop_forkserver": "process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pipes.loader2' has no attribute {name!r}")
    value = getattr(import_module(f"pipes.loader2.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
