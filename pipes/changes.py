"""What a resume does when data is no longer what the state was made from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from pipes.errors import ChangedDataError

__all__ = ["ADVICE", "GOING_ON", "refuse_or_warn"]

ADVICE = (
    "resume with the data the state was made from, start the epoch afresh, or go on over the new data with "
    'load_state_dict(state, on_changed_data="warn")'
)
GOING_ON = "going on over it, so elements may come twice or never"


def refuse_or_warn(on_changed_data: str, check: Callable[..., None], *args: Any) -> None:
    """Call `check(*args)`; raise its ChangedDataError with advice, or with "warn" tell of it and go on."""
    try:
        check(*args)
    except ChangedDataError as error:
        if on_changed_data == "raise":
            raise ChangedDataError(f"{error}; {ADVICE}") from None
        warnings.warn(f"{error}; {GOING_ON}", stacklevel=2)
