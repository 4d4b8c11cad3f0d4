from __future__ import annotations

import ctypes
import errno
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import pytest

from pipes.errors import WorkerError
from pipes.loader2 import descriptors, forkserver, guard, process
from pipes.loader2.process import describe_exit, start_worker, stop_forkserver
from pipes.loader2.shipping import ship, unship

METHODS = ["forkserver", "spawn", "fork"]
every_method = pytest.mark.parametrize("method", METHODS)
# Under spawn every worker imports torch anew, which takes seconds.
quick_methods = pytest.mark.parametrize("method", ["forkserver", "fork"])


pytestmark = pytest.mark.usefixtures("warm_forkserver", "no_residue")


@pytest.fixture
def warm_forkserver() -> None:
    # Before `no_residue` looks: a forkserver that a test itself started would be ended after it.
    run("forkserver", return_payload)


@pytest.fixture(scope="module", autouse=True)
def forkserver_ends_with_the_file() -> Iterator[None]:
    yield
    stop_forkserver()


def run(method: str, target: object, payload: bytes = b"") -> tuple[object, int | None]:
    """Run `target(payload)` in a worker; return its result and the exit code."""

    def call(sock: socket.socket, data: bytes) -> None:
        result = ship(unship(data)[0](unship(data)[1]))
        sock.sendall(len(result).to_bytes(8, "little") + result)

    worker = start_worker(call, ship((target, payload)), method=method, name="test", number=0)
    try:
        with worker.sock.makefile("rb") as file:
            head = file.read(8)
            result = unship(file.read(int.from_bytes(head, "little"))) if head else None
        assert worker.join(20)
        return result, worker.exitcode
    finally:
        worker.close()


def start(method: str, target: object, number: int = 0) -> process.WorkerProcess:
    return start_worker(target, b"", method=method, name=f"pipes worker {number}", number=number)


def return_payload(payload: bytes) -> bytes:
    return payload


def wait_for_end(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(b"r")
    while sock.recv(1):
        pass


def hold_the_interpreter_lock(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(b"r")
    ctypes.PyDLL(None).sleep(60)


@quick_methods
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda sock, payload: None, 0),
        (lambda sock, payload: sys.exit(7), 7),
        (lambda sock, payload: sys.exit("text"), 1),
        (lambda sock, payload: 1 / 0, 1),
        (lambda sock, payload: os._exit(5), 5),
        (lambda sock, payload: os.kill(os.getpid(), signal.SIGKILL), -9),
        (lambda sock, payload: os.kill(os.getpid(), signal.SIGTERM), -15),
        (lambda sock, payload: ctypes.string_at(0), -11),
    ],
    ids=["return", "exit", "exit-text", "raise", "_exit", "SIGKILL", "SIGTERM", "SIGSEGV"],
)
def test_exit_code(method: str, end: object, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    worker = start(method, end)
    assert worker.join(20)
    assert worker.exitcode == code
    assert not worker.is_alive()
    assert ("<lambda>" in worker.crash_stack()) == (code == -11)
    worker.close()
    worker.close()
    assert worker.exitcode == code
    assert worker.sock.fileno() == -1
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (end.__code__.co_consts == (None, 1, 0))


@quick_methods
def test_large_payload_comes_whole(method: str) -> None:
    payload = os.urandom(1 << 20) * 40
    assert run(method, return_payload, payload) == (payload, 0)


@every_method
def test_worker_sees_mains_surroundings_of_now(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PIPES_TEST_NEW", "é\udcff")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "brand_new_module.py").write_text("value = 41\n")
    monkeypatch.setattr(sys, "argv", ["program", "--option"])
    mask = os.umask(0o027)
    logger = logging.getLogger("pipes.test.level")
    monkeypatch.setattr(logger, "level", logging.ERROR)
    mains_pid = os.getpid()

    def look(_: bytes) -> dict[str, object]:
        import brand_new_module

        with open("made", "w"):
            pass
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("these are ignored", DeprecationWarning, stacklevel=1)
        torch = sys.modules.get("torch")
        return {
            "environ": dict(os.environ),
            "cwd": os.getcwd(),
            "path": sys.path,
            "argv": sys.argv,
            "mode": os.stat("made").st_mode & 0o777,
            "imported": brand_new_module.value,
            "ignored": not caught,
            "level": logging.getLogger("pipes.test.level").level,
            "threads": torch.get_num_threads() if torch else 1,
            "stdin": sys.stdin.read() + os.read(0, 1).decode(),
            "name": multiprocessing.current_process().name,
            "authkey": bytes(multiprocessing.current_process().authkey),
            "other process": os.getpid() != mains_pid,
        }

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            seen, code = run(method, look)
    finally:
        os.umask(mask)
    assert code == 0
    assert seen == {
        "environ": dict(os.environ),
        "cwd": str(tmp_path),
        "path": sys.path,
        "argv": ["program", "--option"],
        "mode": 0o640,
        "imported": 41,
        "ignored": True,
        "level": logging.ERROR,
        "threads": 1,
        "stdin": "",
        "name": "test",
        "authkey": bytes(multiprocessing.current_process().authkey),
        "other process": True,
    }


def test_surroundings_never_show_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    monkeypatch.setattr(sys, "argv", ["--password=hunter2"])
    surroundings = process.Surroundings.of_this_process()
    assert "hunter2" not in repr(guard.Start("name", 0, surroundings, b"", b""))


@every_method
def test_signals_in_a_worker(method: str) -> None:
    def look(_: bytes) -> list[object]:
        os.kill(os.getpid(), signal.SIGINT)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE)
        return [*map(signal.getsignal, numbers), signal.pthread_sigmask(signal.SIG_BLOCK, [])]

    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        seen, code = run(method, look)
    finally:
        signal.signal(signal.SIGUSR1, old)
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


def test_forked_child_of_main_lets_go() -> None:
    workers = [start(method, wait_for_end) for method in METHODS]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # In the child the handles are closed and must not touch the workers.
        states = [(worker.is_alive(), worker.exitcode, worker.sock.fileno()) for worker in workers]
        for worker in workers:
            worker.kill()
            worker.close()
        os.write(write, repr(states).encode())
        signal.pause()
        os._exit(0)
    os.close(write)
    with os.fdopen(read):
        try:
            assert os.read(read, 1000).decode() == repr([(False, None, -1)] * 3)
            for worker in workers:
                assert worker.sock.recv(1) == b"r"
                assert worker.is_alive()
                worker.sock.close()
                assert worker.join(10), "the forked child holds the socket"
                assert worker.exitcode == 0
                worker.close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


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


@every_method
def test_stack_requests_while_a_worker_starts_never_end_it(method: str) -> None:
    worker = start(method, wait_for_end)
    for _ in range(20):
        worker.stack(0.01)
    assert worker.sock.recv(1) == b"r"
    worker.close()


@quick_methods
def test_close_ends_a_stuck_worker(method: str) -> None:
    worker = start(method, hold_the_interpreter_lock)
    worker.sock.recv(1)
    worker.close()
    assert worker.exitcode == -9
    assert not worker.is_alive()


@quick_methods
def test_dropped_worker_is_ended(method: str) -> None:
    worker = start(method, wait_for_end)
    pid = worker.pid
    del worker
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@quick_methods
def test_sentinel_and_join(method: str) -> None:
    worker = start(method, wait_for_end)
    assert not worker.join(0.05)
    assert not multiprocessing.connection.wait([worker.sentinel], 0)
    worker.terminate()
    assert multiprocessing.connection.wait([worker.sentinel], 10) == [worker.sentinel]
    assert worker.exitcode == -15
    assert "SIGTERM" in repr(worker)
    worker.close()


@quick_methods
def test_worker_outlives_the_thread_that_started_it(method: str) -> None:
    workers: list[process.WorkerProcess] = []
    thread = threading.Thread(target=lambda: workers.append(start(method, wait_for_end)))
    thread.start()
    thread.join()
    worker = workers.pop()
    assert worker.sock.recv(1) == b"r"
    assert not worker.join(0.3)
    worker.sock.close()
    assert worker.join(10)
    assert worker.exitcode == 0
    worker.close()


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


@every_method
def test_output_goes_where_mains_goes_now(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    def speak(sock: socket.socket, payload: bytes) -> None:
        os.write(1, b"out of fd 1")
        os.write(2, b"out of fd 2")

    worker = start(method, speak)
    assert worker.join(20)
    worker.close()
    assert tuple(capfd.readouterr()) == ("out of fd 1", "out of fd 2")


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


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_forkserver_has_one_thread() -> None:
    assert len(os.listdir(f"/proc/{process._server.pid}/task")) == 1


def test_workers_of_a_killed_forkserver_end_and_the_next_gets_a_new_one() -> None:
    workers = [start("forkserver", hold_the_interpreter_lock, number) for number in range(2)]
    for worker in workers:
        worker.sock.recv(1)
    server = process._server.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    for worker in workers:
        assert worker.join(10)
        assert worker.exitcode == -9
        worker.close()
    assert run("forkserver", return_payload, b"again") == (b"again", 0)
    assert process._server.pid != server


def test_stop_forkserver_ends_its_workers() -> None:
    worker = start("forkserver", hold_the_interpreter_lock)
    worker.sock.recv(1)
    server = process._server.pid
    stop_forkserver()
    stop_forkserver()
    assert not is_running(server)
    assert worker.join(10)
    assert worker.exitcode == -9
    worker.close()


def test_interpreter_that_does_not_start() -> None:
    right = multiprocessing.spawn.get_executable()
    stop_forkserver()
    try:
        for method, executable in (("forkserver", "/bin/false"), ("forkserver", "/no/such"), ("spawn", "/no/such")):
            multiprocessing.set_executable(executable)
            with pytest.raises(WorkerError, match="cannot start a worker process"):
                start(method, wait_for_end)
        multiprocessing.set_executable("/bin/false")
        worker = start("spawn", wait_for_end)
        assert worker.join(10)
        assert worker.exitcode == 1
        worker.close()
    finally:
        multiprocessing.set_executable(right)


def test_full_process_table_is_an_error_and_not_the_end_of_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [forkserver.PID.pack(-errno.EAGAIN), b"F"]

    def answer(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
        return answers.pop(0), []

    monkeypatch.setattr(descriptors, "receive", answer)
    with pytest.raises(WorkerError, match="cannot fork: Resource temporarily unavailable"):
        start("forkserver", wait_for_end)


def test_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "PIDFD", False)
    for method in METHODS:
        worker = start(method, wait_for_end)
        assert worker.sock.recv(1) == b"r"
        assert worker.is_alive()
        worker.kill()
        assert worker.join(10)
        assert worker.exitcode == -9
        worker.close()


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        with pytest.raises(WorkerError, match="not available on Windows"):
            start("spawn", wait_for_end)
    with pytest.raises(WorkerError, match="unknown start method 'thread'"):
        start("thread", wait_for_end)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(WorkerError, match="forked after CUDA was initialised"):
        start("fork", wait_for_end)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (255, "exit code 255, or unknown"),
        (None, "still running"),
        (-9, "killed by SIGKILL (signal 9): often the system's out-of-memory killer"),
        (-11, "segmentation fault (SIGSEGV, signal 11)"),
        (-10, "killed by SIGUSR1 (signal 10)"),
        (-50, "killed by signal 50"),
    ],
)
def test_describe_exit(code: int | None, words: str) -> None:
    assert describe_exit(code).startswith(words)
