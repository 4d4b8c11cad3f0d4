"""How the workers of one loader run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipes.loader2.process import Method

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The options of MultiProcessingReadingService, checked; it says what each means."""

    num_workers: int
    method: Method
    prefetch: int
    in_order: bool
    max_bytes_in_flight: int
    max_held: int
    snapshot_every: int
    timeout: float | None
    max_restarts: int
    recover: bool
    init_fn: Any
    reset_fn: Any
