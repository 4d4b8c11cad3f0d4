"""Programs that tests start, interrupt and end: a loader in a script, and what is left of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

# No main guard: the body of a user's script is not run again in its workers.
PROLOGUE = """
import os, signal, sys, threading, time
sys.path.append({tests!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from residue import Holdings, settled
from pipes.iter import IterableWrapper
from pipes.loader2 import DataLoader2, MultiProcessingReadingService
from pipes.loader2.process import stop_forkserver
def slow(x):
    time.sleep(0.01)
    return x
def stops_at_3(x):
    time.sleep(60 if x == 3 else 0)
    return x
def loader_of(function):
    graph = IterableWrapper(range(10_000)).sharding_filter().map(function)
    service = MultiProcessingReadingService(2, multiprocessing_context={method!r})
    return DataLoader2(graph, reading_service=service)
def leaves_nothing():
    stop_forkserver()
    assert settled(before, 10), Holdings.now().news_since(before)
before = Holdings.now()
"""


def run_program(folder: Path, body: str, method: str = "forkserver") -> subprocess.Popen[str]:
    """Start the prologue and `body` as a script, in a session of its own; warnings are errors there."""
    script = folder / "script.py"
    prologue = PROLOGUE.format(method=method, tests=str(Path(__file__).parent))
    script.write_text(prologue + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_line(program: subprocess.Popen[str], line: str) -> None:
    """Read what the program prints up to `line`; fail with what it wrote to stderr when that does not come."""
    assert program.stdout is not None
    for printed in program.stdout:
        if printed == f"{line}\n":
            return
    raise AssertionError(f"{line!r} was not printed:\n{program.communicate(timeout=60)[1]}")


def nothing_is_left_of(session: int) -> bool:
    """Return whether all processes of a session end within seconds."""
    deadline = time.monotonic() + 15
    while any(_session(pid) == session for pid in psutil.pids()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _session(pid: int) -> int:
    try:
        # who ended and was not waited for yet is the business of the system's first process
        return -1 if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getsid(pid)
    except (OSError, psutil.Error):
        return -1
