"""The process that workers are forked from: torch imported once, single-threaded, this package's own.

Contract
- Success. Started lazily, once per process: a forked child of main starts its own. `start()` returns at once, the
  server imports meanwhile. `request()` asks for one worker: the server forks it and answers with the worker's pid (and
  a pidfd), later with its exit code, over a socket that belongs to that worker alone, so an interrupted caller never
  leaves half an answer for the next one.
- Failure. A server that died is replaced at the next request. A worker whose server died is dead too (it asked the
  kernel for that), and its socket reports end of file.
- Stop. The server ends, and kills and reaps the workers that it still has, when main stops it, when main closes or
  loses its socket, and when main dies, whoever else holds copies of main's descriptors. It ignores Ctrl-C.

Linux is proved. On macOS the same code runs without pidfds (it looks at its parent twice a second); not testable here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import spawn
from typing import NoReturn

from pipes.loader2 import descriptors, guard
from pipes.loader2.interrupts import held

__all__ = ["EXIT_CODE", "Server", "serve", "spawn_interpreter"]

PRELOADED = ("ctypes", "cloudpickle", "numpy", "torch", "pipes", "pipes.loader2.worker")
EXIT_CODE = struct.Struct("i")
PID = struct.Struct("i")

#: Without these, importing numpy starts threads, and only a process without threads may fork.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def spawn_interpreter(entry: str, sock: socket.socket, environment: dict[str, str] | None = None) -> int:
    """Start a fresh interpreter that calls `entry` (`module:function`) with a copy of `sock`; return its pid.

    Ctrl-C and the signal for stack dumps are blocked in it until it has set itself up. The user's main module is not
    imported there.
    """
    module, _, function = entry.partition(":")
    target = 3 if sock.fileno() != 3 else 4
    code = (
        f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
        f"from {module} import {function}; {function}({target}, {os.getpid()})"
    )
    executable = os.fsdecode(spawn.get_executable())
    try:
        return os.posix_spawn(
            executable,
            [executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
            {**os.environ, **(environment or {})},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, sock.fileno(), target),
            ],
            setsigmask=guard.BLOCKED_AT_START,
        )
    except OSError as error:
        raise guard.start_failure(f"{executable} cannot be run: {error.strerror}") from error


class Server:
    """Main's side of its forkserver.

    >>> server = Server()
    >>> server.start()
    >>> server.stop()
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the server if it is not running, without waiting for it."""
        with held(), self._lock:
            self._start()

    def request(self, worker: socket.socket, interrupt: held) -> tuple[int, int | None, socket.socket]:
        """Fork a worker that owns a copy of `worker`; return its pid, its pidfd and the socket of its exit code.

        To be called while interrupts are held; lets `interrupt` through while it waits.
        """
        for _ in range(2):
            ours, theirs = socket.socketpair()
            try:
                with theirs, self._lock:
                    self._start()
                    server = self.pid
                    assert self._control is not None
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        descriptors.send(self._control, b"F", [worker.fileno(), theirs.fileno()])
                # The first answer takes seconds, while the server imports.
                while not descriptors.is_ready(ours.fileno(), 0.05):
                    interrupt.deliver()
                data, found = descriptors.receive(ours, PID.size, 1)
                if data:
                    pid: int = PID.unpack(data)[0]
                    if pid < 0:
                        raise guard.start_failure(f"the forkserver cannot fork: {os.strerror(-pid)}")
                    return pid, found[0] if found else None, ours
            except ConnectionResetError:
                pass
            except BaseException:
                ours.close()
                raise
            ours.close()
            self._discard(server)
        raise guard.start_failure("the forkserver ended while it started")

    def stop(self) -> None:
        """End the server and the workers that it still has; does nothing when there is none."""
        self._discard(self.pid)

    def forget(self) -> None:
        """Close main's socket in a forked child of main, where the server is not this process's own."""
        if self._control is not None:
            self._control.close()
        self._control = self.pid = None

    def _discard(self, pid: int | None) -> None:
        with held(), self._lock:
            if pid is not None and pid == self.pid:
                assert self._control is not None
                self._control.close()
                self._control = self.pid = None
                _reap(pid, patience=5.0)

    def _start(self) -> None:
        if self.pid is not None and not _has_ended(self.pid):
            return
        if self._control is not None:
            self._control.close()
        self._control = self.pid = None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pidfd = descriptors.open_pidfd(os.getpid())
                try:
                    descriptors.send(ours, b"H", [pidfd] if pidfd is not None else [])
                finally:
                    if pidfd is not None:
                        os.close(pidfd)
                self.pid = spawn_interpreter("pipes.loader2.forkserver:serve", theirs, ONE_THREAD)
            except BaseException:
                ours.close()
                raise
        self._control = ours


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _reap(pid: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while not _has_ended(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline += patience
        time.sleep(0.002)


def serve(descriptor: int, main_pid: int) -> NoReturn:
    """Be the server; this is what its process runs."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        os.set_inheritable(descriptor, False)
        control = socket.socket(fileno=descriptor)
        hello, found = descriptors.receive(control, 1, 1)
        if hello:
            main = guard.Watched(main_pid, found[0] if found else None)
            _preload(main, PRELOADED)
            # Kept until the end: sockets that are dropped before make ResourceWarnings.
            loop = _Loop(control, main)
            loop.run()
    finally:
        os._exit(0)


def _preload(main: guard.Watched, modules: Sequence[str]) -> None:
    # A thread looks after main during the seconds of importing; it is gone before the first fork.
    wake, done = os.pipe()
    thread = threading.Thread(target=main.wait_then_exit, args=(wake,))
    thread.start()
    # A fifth of the time of importing torch goes into collections that find nothing.
    gc.disable()
    for module in modules:
        # What cannot be imported here fails in the worker that needs it, where it is reported.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    os.close(done)
    thread.join()
    os.close(wake)
    gc.freeze()
    gc.enable()


class _Loop:
    def __init__(self, control: socket.socket, main: guard.Watched) -> None:
        self.control, self.main = control, main
        self.workers: dict[int, socket.socket] = {}
        self.wake, self.waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.waker, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        watched = [self.control.fileno(), self.wake]
        if self.main.pidfd is not None:
            watched.append(self.main.pidfd)
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        try:
            while not self.main.has_ended():
                ready = {descriptor for descriptor, _ in poll.poll(self.main.interval_ms)}
                self._report_exits()
                if self.control.fileno() in ready and not self._answer():
                    break
        finally:
            self._kill_workers()

    def _answer(self) -> bool:
        data, found = descriptors.receive(self.control, 1, 2)
        if not data:
            return False
        worker, status = (socket.socket(fileno=descriptor) for descriptor in found)
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            with worker, status:
                status.send(PID.pack(-(error.errno or 1)))
            return True
        if pid == 0:
            self._become(worker, status, server_pid)
        worker.close()
        self.workers[pid] = status
        # Not reaped yet, so the pid cannot mean another process.
        pidfd = descriptors.open_pidfd(pid)
        with contextlib.suppress(OSError):
            descriptors.send(status, PID.pack(pid), [pidfd] if pidfd is not None else [])
        if pidfd is not None:
            os.close(pidfd)
        return True

    def _become(self, worker: socket.socket, status: socket.socket, server_pid: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for sock in (self.control, status, *self.workers.values()):
                sock.close()
            for descriptor in (self.wake, self.waker):
                os.close(descriptor)
            if self.main.pidfd is not None:
                os.close(self.main.pidfd)
            guard.die_with_parent(server_pid)
        except BaseException:
            os._exit(1)
        guard.run(worker, server_pid)

    def _report_exits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        while self.workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            sock = self.workers.pop(pid)
            with sock, contextlib.suppress(OSError):
                sock.send(EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))

    def _kill_workers(self) -> None:
        for pid in self.workers:
            os.kill(pid, signal.SIGKILL)
        for pid in self.workers:
            _reap(pid, patience=1.0)
