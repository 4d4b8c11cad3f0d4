"""torchdata's reading services that are made of others."""

from __future__ import annotations

import warnings
from typing import Any

from pipes.loader2.reading_service import MultiProcessingReadingService

__all__ = ["PrototypeMultiProcessingReadingService"]


class PrototypeMultiProcessingReadingService(MultiProcessingReadingService):
    """torchdata's older name of MultiProcessingReadingService; warns, and is that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        warnings.warn(
            "PrototypeMultiProcessingReadingService is an old name: use MultiProcessingReadingService, the same",
            stacklevel=2,
        )
        super().__init__(*args, **options)
