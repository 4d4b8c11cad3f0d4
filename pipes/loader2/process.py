"""Worker processes: how one is started, watched and ended. Pure mechanism; knows neither graphs nor batches.

Contract
- Success. `start_worker(target, payload)` runs `target(sock, payload)` in a new process, where `sock` is the worker's
  end of a Unix stream socket; main's end is `WorkerProcess.sock`. The new process has main's environment, folder,
  sys.path, umask, warning filters and logging levels, one torch thread, and no other worker's descriptors. The user's
  script is not run again and needs no `if __name__ == "__main__"`.
- Failure. A worker that ends by itself makes `sentinel` ready; `exitcode` then tells how (negative: by which signal).
  A worker that cannot be started is a WorkerError, and no process or descriptor stays.
- Stop. `close()` kills the worker if it still lives, reaps it and closes every descriptor; it is bounded, may be called
  twice, and happens by itself when the object is dropped. The forkserver ends with main, or at `stop_forkserver()`.
- Death of main. However main dies, its workers and its forkserver end at once, also a worker stuck in C code with the
  interpreter lock held, also while a forked child of main lives on.
- Fork of main. Any forked child of main closes its copies of main's ends; there, every WorkerProcess counts as closed.
- Threads. Main gets no thread. All functions may be called from any thread.

Linux is proved. macOS runs the same code without pidfds; not testable here. Windows is refused.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import connection
from typing import Any, Literal, get_args

from pipes.errors import WorkerError
from pipes.loader2 import descriptors, guard
from pipes.loader2.forkserver import EXIT_CODE, Server, spawn_interpreter
from pipes.loader2.interrupts import held
from pipes.loader2.shipping import ship
from pipes.loader2.surroundings import Surroundings

__all__ = ["Method", "WorkerProcess", "describe_exit", "start_forkserver", "start_worker", "stop_forkserver"]

Method = Literal["forkserver", "spawn", "fork"]

#: The exit code when somebody else in main's program reaped the worker first.
UNKNOWN_EXIT = 255
_PATIENCE = 5.0


class WorkerProcess:
    """Main's handle on one worker process; made by `start_worker`.

    `sock` is main's end of the socket, `sentinel` a descriptor for `multiprocessing.connection.wait` or `select` that
    becomes ready when the process has ended.
    """

    def __init__(self, name: str, number: int, sock: socket.socket, stack: int) -> None:
        self.name, self.number, self.sock = name, number, sock
        self.pid = 0
        self.sentinel = -1
        self._stack = stack
        self._pidfd: int | None = None
        self._status: socket.socket | None = None
        self._death: int | None = None
        self._exitcode: int | None = None
        self._is_child = False
        self._closed = False
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        state = "running" if self.is_alive() else describe_exit(self.exitcode)
        return f"<WorkerProcess {self.name!r} pid={self.pid} {state}>"

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @property
    def exitcode(self) -> int | None:
        """None while the process runs; 0 or n when it exited, -n when signal n ended it."""
        with self._lock:
            if self._exitcode is None and not self._closed and self.pid:
                self._exitcode = self._reap() if self._is_child else self._reported()
            return self._exitcode

    def is_alive(self) -> bool:
        return not self._closed and self.exitcode is None

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the process has ended, `timeout` seconds at most; True when it has."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not connection.wait([self.sentinel], left) and left is not None:
                return not self.is_alive()
        return True

    def terminate(self) -> None:
        """Send SIGTERM; does nothing when the process has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; does nothing when the process has ended."""
        self._signal(signal.SIGKILL)

    def stack(self, timeout: float = 1.0) -> str:
        """Return the Python stacks of the worker's threads as text, or why there is none.

        Works while the worker is stuck in C code, with or without the interpreter lock. A system call that the worker
        waits in may return early (EINTR), as at any signal.
        """
        with self._lock:
            if not self.is_alive():
                return self.crash_stack() or f"(no stack: the worker has ended: {describe_exit(self.exitcode)})"
            os.ftruncate(self._stack, 0)
            self._signal(guard.DUMP_SIGNAL)
            seen = b""

            def is_complete() -> bool:
                nonlocal seen
                before, seen = seen, self._dump()
                return bool(seen) and seen == before and seen.endswith(b"\n")

            if not guard.sleep_until(is_complete, timeout) and not seen:
                return f"(no stack within {timeout:g} s: {_why_silent(self.pid)})"
            return guard.readable_stack(seen.decode(errors="replace"))

    def crash_stack(self) -> str:
        """Return the stacks that a crashing worker left (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL), or ""."""
        with self._lock:
            text = "" if self._closed else self._dump().decode(errors="replace")
            return guard.readable_stack(text) if "Fatal Python error" in text else ""

    def close(self) -> None:
        """Kill the worker if it lives, reap it, close every descriptor; may be called twice."""
        with held(), self._lock:
            if self._closed:
                return
            if self.pid:
                self.kill()
                self.join(_PATIENCE)
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._closed = True
        self.sock.close()
        if self._status is not None:
            self._status.close()
        alive = self.sentinel if self._is_child else None
        for descriptor in {self._stack, self._pidfd, self._death, alive}:
            if descriptor is not None:
                os.close(descriptor)
        _workers.discard(self)

    def _adopt_child(self, pid: int, alive: int | None) -> None:
        self._pidfd = descriptors.open_pidfd(pid) if alive is None else None
        sentinel = alive if alive is not None else self._pidfd
        if sentinel is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise guard.start_failure("no descriptor to watch it by; is the limit of open files reached?")
        self.sentinel, self.pid, self._is_child = sentinel, pid, True

    def _adopt_from_server(self, pid: int, pidfd: int | None, status: socket.socket) -> None:
        self._pidfd, self._status, self.sentinel = pidfd, status, status.fileno()
        self.pid = pid

    def _dump(self) -> bytes:
        return os.pread(self._stack, os.fstat(self._stack).st_size, 0)

    def _signal(self, number: int) -> None:
        with self._lock:
            if not self.is_alive() or not self.pid:
                return
            with contextlib.suppress(ProcessLookupError):
                if self._pidfd is not None:
                    signal.pidfd_send_signal(self._pidfd, number)
                else:
                    os.kill(self.pid, number)

    def _reap(self) -> int | None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return UNKNOWN_EXIT
        return os.waitstatus_to_exitcode(status) if pid else None

    def _reported(self) -> int | None:
        assert self._status is not None
        try:
            data = self._status.recv(EXIT_CODE.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        if data:
            code: int = EXIT_CODE.unpack(data)[0]
            return code
        # The forkserver is gone, and its workers with it.
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            descriptors.is_ready(self._pidfd, _PATIENCE)
        return -signal.SIGKILL


_workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
_server = Server()


def start_worker(
    target: Callable[[socket.socket, bytes], Any],
    payload: bytes,
    *,
    method: Method = "forkserver",
    name: str,
    number: int,
) -> WorkerProcess:
    """Run `target(sock, payload)` in a new process and return main's handle on it.

    >>> def shout(sock, payload):
    ...     sock.sendall(payload.upper())
    >>> worker = start_worker(shout, b"hello", name="pipes worker 0", number=0)
    >>> worker.sock.recv(5), worker.join(), worker.exitcode
    (b'HELLO', True, 0)
    >>> worker.close()

    `target` may be a lambda or a function of a script or notebook. Raises WorkerError on Windows, for `fork` after CUDA
    was initialised, and when the process cannot be started.
    """
    _check(method)
    with ExitStack() as on_error:
        with held() as interrupt, ExitStack() as cleanup:
            ours, theirs = socket.socketpair()
            cleanup.callback(theirs.close)
            worker = WorkerProcess(name, number, ours, descriptors.unnamed_file(append=True))
            on_error.callback(worker.close)
            _workers.add(worker)
            start = guard.Start(name, number, Surroundings.of_this_process(), ship(target), payload)
            given, alive = _descriptors_to_give(method, start, worker, cleanup)
            if method == "forkserver":
                worker._adopt_from_server(*_server.request(theirs, interrupt))
            else:
                _start_child(worker, theirs, method, given, alive)
            with contextlib.suppress(BrokenPipeError):
                _send_start(ours, given)
        # An interrupt that was held came out above, and closed the worker.
        on_error.pop_all()
    return worker


def start_forkserver() -> None:
    """Start this process's forkserver without waiting, so that its imports overlap with other work."""
    _check("forkserver")
    _server.start()


def stop_forkserver() -> None:
    """End this process's forkserver and the workers that it still has; the next worker starts a new one.

    >>> stop_forkserver()
    """
    _server.stop()


def describe_exit(exitcode: int | None) -> str:
    """Say in plain words how a process ended.

    >>> describe_exit(-9)
    "killed by SIGKILL (signal 9): often the system's out-of-memory killer"
    >>> describe_exit(3)
    'exit code 3'
    """
    if exitcode is None:
        return "still running, or its end was not seen"
    if exitcode == UNKNOWN_EXIT:
        return "exit code 255, or unknown because other code in this program reaped the process"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        return f"killed by signal {-exitcode}"
    return _SIGNAL_WORDS.get(name, "killed by {0} (signal {1})").format(name, -exitcode)


def _why_silent(pid: int) -> str:
    """Say why a process that runs does not answer a signal, as far as the system tells."""
    with contextlib.suppress(OSError, KeyError), open(f"/proc/{pid}/stat") as file:
        return _STATE_WORDS[file.read().rpartition(")")[2].split()[0]]
    return "the worker is starting, stopped, or waits in the kernel"


_STATE_WORDS = {
    "T": "the worker is stopped, by SIGSTOP or a debugger; `kill -CONT` lets it go on",
    "D": "the worker waits in the kernel, often for a disk or a network file system",
}

_SIGNAL_WORDS = {
    "SIGKILL": "killed by {0} (signal {1}): often the system's out-of-memory killer",
    "SIGSEGV": "segmentation fault ({0}, signal {1}): a bug in native code",
    "SIGBUS": "bus error ({0}, signal {1}): often a full /dev/shm, or a mapped file that was cut",
    "SIGABRT": "aborted ({0}, signal {1}): native code gave up; its message is on stderr",
    "SIGILL": "illegal instruction ({0}, signal {1}): native code built for another processor",
    "SIGFPE": "arithmetic error in native code ({0}, signal {1})",
    "SIGTERM": "terminated by {0} (signal {1}): someone asked it to end",
}


def _check(method: str) -> None:
    if os.name == "nt":
        raise WorkerError("worker processes are not available on Windows: use num_workers=0 or InProcessReadingService")
    if method not in get_args(Method):
        raise WorkerError(f"unknown start method {method!r}: choose one of {', '.join(get_args(Method))}")
    torch = sys.modules.get("torch")
    if method == "fork" and torch is not None and torch.cuda.is_initialized():
        raise WorkerError(
            "workers cannot be forked after CUDA was initialised in this process: "
            "use the start method 'forkserver' (the default) or 'spawn', or start the workers before using CUDA"
        )


def _descriptors_to_give(
    method: Method, start: guard.Start, worker: WorkerProcess, cleanup: ExitStack
) -> tuple[dict[str, int], int | None]:
    """Return what the worker gets by slot (closed here by `cleanup`), and main's end of its `alive` pipe."""

    def closing(descriptor: int) -> int:
        cleanup.callback(os.close, descriptor)
        return descriptor

    given = {"start": closing(descriptors.unnamed_file(pickle.dumps(start))), "stack": worker._stack}
    for slot, descriptor in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            given[slot] = descriptor
    alive = None
    pidfd = descriptors.open_pidfd(os.getpid())
    if pidfd is not None:
        given["main"] = closing(pidfd)
    if method != "forkserver":
        if sys.platform == "linux":
            read, worker._death = os.pipe()
            given["death"] = closing(read)
        if pidfd is None:
            alive, write = os.pipe()
            given["alive"] = closing(write)
    return given, alive


def _send_start(sock: socket.socket, given: dict[str, int]) -> None:
    bits = sum(1 << bit for bit, slot in enumerate(guard.SLOTS) if slot in given)
    descriptors.send(sock, bytes([bits]), [given[slot] for slot in guard.SLOTS if slot in given])


def _start_child(
    worker: WorkerProcess, theirs: socket.socket, method: Method, given: dict[str, int], alive: int | None
) -> None:
    if method == "spawn":
        worker._adopt_child(spawn_interpreter("pipes.loader2.guard:run_spawned", theirs), alive)
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    main_pid = os.getpid()
    # Until the child has set itself up, neither Ctrl-C nor a request for its stack may end it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, guard.BLOCKED_AT_START)
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on, forking with threads warns; as an error that would lose the child that was forked.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            # What it is given comes over the socket; main's own descriptors of the worker are closed by the fork hook.
            for descriptor in (given["start"], given.get("main"), given.get("death"), given.get("alive"), alive):
                if descriptor is not None:
                    os.close(descriptor)
            guard.run(theirs, main_pid)
        worker._adopt_child(pid, alive)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_in_forked_child() -> None:
    global _server
    for worker in list(_workers):
        worker._lock = threading.RLock()
        if not worker._closed:
            worker._close_descriptors()
    _server.forget()
    _server = Server()


atexit.register(stop_forkserver)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_forked_child)
