"""Inside a worker: its signals, descriptors, output and own children, and its stack on request."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from worker_processes import METHODS, QUICK_METHODS, hold_the_interpreter_lock, is_running, run, start, wait_for_end

from pipes.loader2 import guard
from pipes.loader2.process import describe_exit

pytestmark = pytest.mark.usefixtures("no_residue")
every_method = pytest.mark.parametrize("method", METHODS)
quick_methods = pytest.mark.parametrize("method", QUICK_METHODS)


@every_method
def test_signals_in_a_worker(method: str) -> None:
    def look(_: bytes) -> list[object]:
        os.kill(os.getpid(), signal.SIGINT)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE)
        return [*map(signal.getsignal, numbers), signal.pthread_sigmask(signal.SIG_BLOCK, [])]

    old = [signal.signal(signal.SIGUSR1, lambda *_: None), signal.signal(signal.SIGTERM, signal.SIG_IGN)]
    try:
        seen, code = run(method, look)
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGTERM), old, strict=True):
            signal.signal(number, handler)
    default, ignored = signal.SIG_DFL, signal.SIG_IGN
    assert (seen, code) == ([ignored, default, default, default, ignored, set()], 0)


@every_method
def test_worker_holds_no_descriptor_of_another(method: str) -> None:
    def sockets(_: bytes) -> int:
        return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in range(3, 200) if is_open(fd))

    def is_open(fd: int) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    others = [start("forkserver", wait_for_end), start("fork", wait_for_end)]
    mains = sockets(b"")
    seen, _ = run(method, sockets)
    # A plain fork has what main has, but for the sockets of workers (two of a forkserver's) and of the forkserver.
    assert seen == (mains - 4 + 1 if method == "fork" else 1)
    for worker in others:
        assert worker.sock.recv(1) == b"r"
    late = start(method, wait_for_end)
    assert late.sock.recv(1) == b"r"
    for worker in others:
        worker.sock.close()
        assert worker.join(10), "another process holds this worker's socket"
        assert worker.exitcode == 0
        worker.close()
    late.close()


@every_method
def test_output_goes_where_mains_goes_now_and_input_is_mains_alone(
    method: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def speak(sock: socket.socket, payload: bytes) -> None:
        os.write(1, b"out of fd 1\n")
        os.write(2, b"out of fd 2")
        print("read", os.read(0, 9), sys.stdin.read(), "before it was killed")
        os._exit(0)

    old, (read, write) = os.dup(0), os.pipe()
    os.write(write, b"for main")
    os.dup2(read, 0)
    try:
        worker = start(method, speak)
        assert worker.join(20)
        worker.close()
        assert os.read(0, 9) == b"for main"
    finally:
        os.dup2(old, 0)
        for descriptor in (old, read, write):
            os.close(descriptor)
    assert tuple(capfd.readouterr()) == ("out of fd 1\nread b''  before it was killed\n", "out of fd 2")


def test_a_start_that_main_gave_up_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "_reset_signals", lambda: None)
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert guard._work(theirs, os.getppid()) == 1
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.race
@quick_methods
def test_start_while_threads_hold_locks(method: str) -> None:
    stop, lock = threading.Event(), threading.Lock()
    logger = logging.getLogger("pipes.test.busy")

    def busy() -> None:
        while not stop.is_set():
            with lock:
                logger.warning("busy")

    def log(_: bytes) -> str:
        logging.getLogger("pipes.test.busy").warning("from the worker")
        print("flushed", end="")
        return "done"

    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert run(method, log) == ("done", 0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        logger.propagate = True


@quick_methods
def test_processes_started_inside_a_worker(method: str) -> None:
    def look(_: bytes) -> tuple[str, int]:
        output = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True)
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        return output.stdout, child.pid or 0

    (output, child), code = run(method, look)
    assert (output, code) == ("42\n", 0)
    assert guard.sleep_until(lambda: not is_running(child), 5)


@quick_methods
def test_stack_of_a_worker_in_python(method: str) -> None:
    def spin(sock: socket.socket, payload: bytes) -> None:
        sock.sendall(b"r")
        while True:
            pass

    worker = start(method, spin)
    worker.sock.recv(1)
    for _ in range(3):
        text = worker.stack(5)
        assert "in spin" in text
        assert "_watch_main" not in text
    assert worker.is_alive()
    worker.close()


@every_method
def test_stack_of_a_worker_that_holds_the_interpreter_lock(method: str) -> None:
    worker = start(method, hold_the_interpreter_lock)
    worker.sock.recv(1)
    assert "in hold_the_interpreter_lock" in worker.stack(5)
    worker.close()


def test_stack_when_there_is_none() -> None:
    worker = start("forkserver", wait_for_end)
    worker.sock.recv(1)
    os.kill(worker.pid, signal.SIGSTOP)
    assert "no stack within 0.1 s" in worker.stack(0.1)
    worker.kill()
    worker.join(10)
    assert worker.stack() == f"(no stack: the worker has ended: {describe_exit(-9)})"
    worker.close()


@pytest.mark.race
@every_method
def test_stack_requests_while_a_worker_starts_never_end_it(method: str) -> None:
    worker = start(method, wait_for_end)
    for _ in range(20):
        worker.stack(0.01)
    assert worker.sock.recv(1) == b"r"
    worker.close()
