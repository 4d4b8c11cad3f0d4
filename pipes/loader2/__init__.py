"""How a graph is run: the loader, its reading services, its state."""

from pipes.loader2.iterator import DataLoader2Iterator
from pipes.loader2.loader import DataLoader2
from pipes.loader2.process import stop_forkserver
from pipes.loader2.reading_service import (
    InProcessReadingService,
    MultiProcessingReadingService,
    ReadingServiceInterface,
    WorkerInfo,
)

__all__ = [
    "DataLoader2",
    "DataLoader2Iterator",
    "InProcessReadingService",
    "MultiProcessingReadingService",
    "ReadingServiceInterface",
    "WorkerInfo",
    "stop_forkserver",
]
