"""The child's side of a worker process: what happens in it before, around and after its work.

Contract
- Success. `run()` takes over main's surroundings, unpickles the target and calls `target(sock, payload)`. The process
  ends with 0 when the target returns, with n after SystemExit(n), and with 1 and a traceback on stderr after any other
  exception. Its own multiprocessing children are ended first.
- Signals. SIGINT is ignored, SIGTERM ends the process, handlers inherited from main are gone, SIGPIPE stays ignored.
- Death of main. A watchdog thread waits for main's pidfd (or looks at the parent's pid) and calls os._exit. A worker
  stuck with the interpreter lock held is killed by the kernel: under the forkserver because its parent died, otherwise
  by a pipe whose last writer was main.
- Main gave up before it sent the start message: the process ends without a word.
- Stack. At any moment main may send DUMP_SIGNAL: the stacks of all threads are written to main's unnamed file, by C
  code that needs no interpreter lock. A crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) writes there too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from pipes.errors import WorkerError
from pipes.loader2 import descriptors
from pipes.loader2.shipping import unship
from pipes.loader2.surroundings import Surroundings

__all__ = ["BLOCKED_AT_START", "DUMP_SIGNAL", "SLOTS", "Start", "Watched", "die_with_parent", "run", "run_spawned"]

DUMP_SIGNAL: int = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
BLOCKED_AT_START = (signal.SIGINT, DUMP_SIGNAL)

#: The descriptors that may come with the first byte on the worker's socket, in this order; bit i says slot i is there.
SLOTS = ("start", "stack", "stdout", "stderr", "main", "death", "alive")

_PR_SET_PDEATHSIG = 1
_WATCHDOG = "_watch_main"


@dataclass(frozen=True)
class Start:
    """What main tells a worker before its work; pickled with nothing of the user's unpickled on the way."""

    name: str
    number: int
    surroundings: Surroundings
    target: bytes
    payload: bytes


@dataclass(frozen=True)
class Watched:
    """A process whose end is waited for, by pidfd or, without one, as the parent of this process."""

    pid: int
    pidfd: int | None

    @property
    def interval_ms(self) -> int | None:
        return None if self.pidfd is not None else 500

    def has_ended(self) -> bool:
        if self.pidfd is None:
            return os.getppid() != self.pid
        return descriptors.is_ready(self.pidfd)

    def wait_then_exit(self, cancel: int | None = None) -> None:
        """Return when `cancel` becomes readable, end this process when the watched one has ended."""
        poll = select.poll()
        for descriptor in (self.pidfd, cancel):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        while not self.has_ended():
            if any(descriptor == cancel for descriptor, _ in poll.poll(self.interval_ms)):
                return
        os._exit(1)


def start_failure(what: str) -> WorkerError:
    return WorkerError(
        f"cannot start a worker process: {what}. What it wrote itself is above, on stderr. "
        "num_workers=0 works without worker processes"
    )


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the thread that forked it ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def run_spawned(descriptor: int, parent: int) -> NoReturn:
    """Be a worker in a fresh interpreter."""
    try:
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    run(sock, parent)


def run(sock: socket.socket, parent: int) -> NoReturn:
    """Be a worker: never returns, whatever happens."""
    code = 1
    try:
        siblings = set(multiprocessing.active_children())
        code = _work(sock, parent)
        for process in set(multiprocessing.active_children()) - siblings:
            process.terminate()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _work(sock: socket.socket, parent: int) -> int:
    try:
        start = _set_up(sock, parent)
        if start is None:
            return 1
        start.surroundings.apply()
        target: Callable[[socket.socket, bytes], Any] = unship(start.target)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        # The payload may be large: nothing here holds on to it while the target works.
        payload = [start.payload]
        del start
        target(sock, payload.pop())
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _set_up(sock: socket.socket, parent: int) -> Start | None:
    _reset_signals()
    byte, found = descriptors.receive(sock, 1, len(SLOTS))
    if not byte:
        return None
    given = dict(zip((slot for bit, slot in enumerate(SLOTS) if byte[0] >> bit & 1), found, strict=True))
    # The watchdog starts while all signals are blocked: none is ever delivered to it.
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    watched = Watched(parent, given.get("main"))
    threading.Thread(target=_watch_main, args=(watched,), name="pipes watchdog", daemon=True).start()
    if "death" in given:
        _die_with_last_writer(given["death"])
    # Main reads the file while it is written: the descriptor is shared, and appends.
    # What main had switched on may have lost its handlers since: Lightning sets all signals back when a fit ends.
    faulthandler.disable()
    faulthandler.enable(given["stack"], all_threads=True)
    faulthandler.register(DUMP_SIGNAL, given["stack"], all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _set_up_streams(given)
    with open(given["start"], "rb") as file:
        file.seek(0)
        start = pickle.load(file)
    assert isinstance(start, Start)
    multiprocessing.current_process().name = start.name
    return start


def _watch_main(main: Watched) -> None:
    main.wait_then_exit()


def _die_with_last_writer(pipe: int) -> None:
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if descriptors.is_ready(pipe):
            os._exit(1)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _set_up_streams(given: dict[str, int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = os.fdopen(0, closefd=False)
    for slot, descriptor in (("stdout", 1), ("stderr", 2)):
        if slot in given:
            os.dup2(given[slot], descriptor)
            os.close(given[slot])
    with contextlib.suppress(Exception):
        # A worker may be killed at any time: what it printed should be seen.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def readable_stack(dump: str) -> str:
    """Drop the watchdog's own stack and the list of native modules from a dump.

    >>> readable_stack('Thread 1:\\n  File "guard.py", line 1 in _watch_main\\n\\nCurrent thread 2:\\n  File "a.py"\\n')
    'Current thread 2:\\n  File "a.py"\\n'
    """
    noise = f"in {_WATCHDOG}", "Extension modules: "
    return "\n".join(block for block in dump.split("\n\n") if not any(word in block for word in noise))


def sleep_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Look at `condition` every few milliseconds; False when it did not come true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.003)
    return True
