"""Lets the installed package `pipes` win over the deprecated standard-library module of that name (Python 3.11, 3.12).

`_pipes_first.pth`, beside this file in site-packages, imports it when the interpreter starts. It changes the search for
the single name `pipes`, never raises, and does nothing when the environment variable PIPES_NO_STARTUP is set.
"""

import os
import sys

# This file runs at every start of the interpreter, so it imports neither typing nor __future__.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class PipesFirst:
    """Meta-path finder that searches `pipes` along sys.path without the standard library's folder."""

    @staticmethod
    def find_spec(
        name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "pipes":
            return None
        try:
            from importlib.machinery import PathFinder  # here, to keep the start of the interpreter cheap

            stdlib = os.path.realpath(os.path.dirname(os.__file__))
            entries = [entry for entry in sys.path if isinstance(entry, str) and os.path.realpath(entry) != stdlib]
            spec = PathFinder.find_spec(name, entries)
            # without an origin it is a mere folder called pipes: leave the name to the standard library
            return spec if spec is not None and spec.origin else None
        except Exception:
            return None


if not os.environ.get("PIPES_NO_STARTUP"):
    sys.meta_path.insert(0, PipesFirst)
