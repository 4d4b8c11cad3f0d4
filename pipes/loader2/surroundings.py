"""What a worker takes over from main: environment, folders, search path, umask, warning filters, logging levels.

A forkserver's surroundings are frozen when it starts, so every worker is given main's as they are at that moment,
and takes them on before anything of the user is unpickled. Nothing of this is ever printed or logged: the
environment holds secrets.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from pipes.loader2.shipping import ship, unship

__all__ = ["Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """A copy of everything in main that a worker's code could notice.

    >>> Surroundings.of_this_process().cwd == os.getcwd()
    True
    """

    environ: dict[str, str] = field(repr=False)
    cwd: str | None
    sys_path: list[str]
    argv: list[str] = field(repr=False)
    umask: int
    filters: list[bytes] = field(repr=False)
    levels: dict[str, tuple[int, bool]]
    logging_disabled_up_to: int
    authkey: bytes = field(repr=False)

    @classmethod
    def of_this_process(cls) -> Surroundings:
        return cls(
            environ=dict(os.environ),
            cwd=_working_directory(),
            sys_path=[str(entry) for entry in sys.path],
            argv=list(sys.argv),
            umask=_umask(),
            filters=_packed_filters(),
            levels=_logging_levels(),
            logging_disabled_up_to=logging.root.manager.disable,
            authkey=bytes(multiprocessing.current_process().authkey),
        )

    def apply(self) -> None:
        """Make this process look like the one that the copy was taken from."""
        os.environ.clear()
        os.environ.update(self.environ)
        time.tzset()
        if self.cwd is not None:
            os.chdir(self.cwd)
        sys.path[:] = self.sys_path
        sys.argv[:] = self.argv
        importlib.invalidate_caches()
        os.umask(self.umask)
        multiprocessing.current_process().authkey = self.authkey
        for name, (level, disabled) in self.levels.items():
            logger = logging.getLogger(name or None)
            logger.setLevel(level)
            logger.disabled = disabled
        logging.disable(self.logging_disabled_up_to)
        _apply_filters(self.filters)


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _umask() -> int:
    # Reading by os.umask() would change it for an instant under the feet of other threads.
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _logging_levels() -> dict[str, tuple[int, bool]]:
    levels = {"": (logging.root.level, logging.root.disabled)}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (logger.level or logger.disabled):
            levels[name] = (logger.level, logger.disabled)
    return levels


def _packed_filters() -> list[bytes]:
    # One by one: a filter whose category cannot travel must not take the others with it.
    packed = []
    for entry in list(warnings.filters):
        with contextlib.suppress(Exception):
            packed.append(ship(entry))
    return packed


def _apply_filters(packed: list[bytes]) -> None:
    entries: list[Any] = []
    for one in packed:
        with contextlib.suppress(Exception):
            entries.append(unship(one))
    # resetwarnings() also tells the registries of past warnings that the filters changed.
    warnings.resetwarnings()
    warnings.filters[:] = entries  # type: ignore[index]
