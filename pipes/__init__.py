"""Chained data pipes for PyTorch.

Stages live in `pipes.iter` and `pipes.map`, the loader in `pipes.loader2`, graph functions in `pipes.graph`. Names are
loaded when first used: `import pipes` imports neither torch nor boto3.

>>> from pipes.iter import IterableWrapper
>>> list(IterableWrapper(range(4)).map(str).batch(2))
[['0', '1'], ['2', '3']]

`pipes.quote` and, before Python 3.13, `pipes.Template` are those of the standard-library module of the same name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shlex import quote as quote

    from pipes import errors as errors
    from pipes import graph as graph
    from pipes import iter as iter
    from pipes import loader2 as loader2
    from pipes import map as map
    from pipes import utils as utils
    from pipes.datapipe import DataChunk, IterDataPipe, MapDataPipe, functional_datapipe
    from pipes.loader2 import DataLoader2

    Template: Any

__version__ = "0.1.0"

__all__ = ["DataChunk", "DataLoader2", "IterDataPipe", "MapDataPipe", "functional_datapipe"]

# public name -> the module that defines it; a new name also goes to __all__ and to the imports above
_HOME = {
    "DataChunk": "pipes.datapipe",
    "DataLoader2": "pipes.loader2",
    "IterDataPipe": "pipes.datapipe",
    "MapDataPipe": "pipes.datapipe",
    "functional_datapipe": "pipes.datapipe",
    "quote": "shlex",
}
_SUBMODULES = frozenset({"errors", "graph", "iter", "loader2", "map", "utils"})


def _stdlib_template() -> Any:
    """Load `Template` from the standard library's pipes.py without touching sys.modules."""
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("pipes", [os.path.dirname(os.__file__)])
    if sys.version_info >= (3, 13) or spec is None or spec.loader is None:
        raise AttributeError(
            "module 'pipes' has no attribute 'Template': the standard library dropped it in Python 3.13; "
            "run the shell pipeline with subprocess instead"
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Template


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"pipes.{name}")
    if name == "Template":
        value = _stdlib_template()
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'pipes' has no attribute {name!r}; stages are in pipes.iter and pipes.map")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    stdlib = {"Template", "quote"} if sys.version_info < (3, 13) else {"quote"}
    return sorted({*__all__, *_SUBMODULES, *stdlib, *(name for name in globals() if name.startswith("__"))})
