"""Worker processes seen from outside: how a script is run, how it is interrupted, and how it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

METHODS = ["forkserver", "spawn", "fork"]

# No main guard; everything that is sent lives in __main__.
SCRIPT = """
import os, pickle, sys
os.write(1, b"body\\n")
from pipes.loader2 import process
from pipes.loader2.process import start_worker
from pipes.loader2.remote_error import pack_error, unpack_error
from pipes.loader2.shipping import ship, unship
class Point:
    def __init__(self, x):
        self.x = x
    class Inner:
        pass
class Trouble(Exception):
    pass
offset = 5
def make(x):
    return Point(x + offset), Point.Inner(), Point
def fail(x):
    raise Trouble("bad", x)
def work(sock, payload):
    make, fail, number = unship(payload)
    try:
        fail(number)
    except Exception as error:
        packed = pack_error(error, "worker 0")
    data = pickle.dumps((pickle.dumps(make(number)), packed, os.getcwd(), sys.path))
    sock.sendall(len(data).to_bytes(4, "big") + data)
def check(method):
    worker = start_worker(work, ship((make, lambda x: fail(x), 1)), method=method, name="w", number=0)
    with worker.sock.makefile("rb") as file:
        made, packed, cwd, path = pickle.loads(file.read(int.from_bytes(file.read(4), "big")))
    point, inner, cls = pickle.loads(made)
    assert type(point) is Point and cls is Point and type(inner) is Point.Inner and point.x == 1 + offset
    error = unpack_error(packed)
    assert type(error) is Trouble and error.args == ("bad", 1) and "in fail" in str(error.__cause__)
    assert (cwd, path) == (os.getcwd(), sys.path)
    worker.close()
methods = os.environ["TEST_METHODS"].split(",")
for method in methods:
    check(method)
offset = 6
os.mkdir("below"); os.chdir("below"); sys.path.append("/somewhere/else")
check(methods[0])
os.write(1, b"good\\n")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "script.py").write_text(SCRIPT)
    (tmp_path / "module.py").write_text(SCRIPT)
    return tmp_path


def test_ways_to_run_a_script(folder: Path) -> None:
    ways: dict[str, tuple[list[str], str, str]] = {
        "file in another folder": (["elsewhere/script.py"], "", "forkserver,spawn,fork"),
        "-c": (["-c", SCRIPT], "", "forkserver,fork"),
        "stdin": (["-"], SCRIPT, "forkserver,fork"),
        "-m": (["-m", "module"], "", "forkserver,spawn"),
        "typed": (["-i", "-q"], "exec(open('../module.py').read())\n", "forkserver"),
    }
    running = {}
    for way, (arguments, typed, methods) in ways.items():
        cwd = folder / way.replace(" ", "-")
        cwd.mkdir()
        for name in ("elsewhere", "module.py"):
            (cwd / name).symlink_to(folder / name)
        running[way] = subprocess.Popen(
            [sys.executable, *arguments], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**PLAIN_ENVIRONMENT, "TEST_METHODS": methods},
        )  # fmt: skip
        assert running[way].stdin
        running[way].stdin.write(typed)
        running[way].stdin.close()
        running[way].stdin = None
    for way, child in running.items():
        output, errors = child.communicate(timeout=100)
        assert (output, child.returncode) == ("body\ngood\n", 0), f"{way}: {errors}"
        assert not set(errors) - set("> \n"), way


# A script is found beside itself and a module in the current folder, as users have it.
PLAIN_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
PROLOGUE = """
import ctypes, os, signal, sys, time
from pipes.loader2 import process
from pipes.loader2.process import start_worker, stop_forkserver
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
def idle(sock, payload):
    sock.sendall(b"r")
    while data := sock.recv(1):
        sock.sendall(data)
def stuck(sock, payload):
    sock.sendall(b"r")
    ctypes.PyDLL(None).sleep(60)
def say(text):
    os.write(1, f"{text}\\n".encode())
"""


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, **options,
        )  # fmt: skip
        started.append(child)
        return child

    yield run
    for child in started:
        child.kill()
        child.wait()
        for stream in (child.stdout, child.stderr):
            assert stream
            stream.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids: list[int], seconds: float = 20.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def read_words(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout
    line = child.stdout.readline()
    assert line, child.communicate(timeout=30)[1]
    return line.split()


DYING = """
methods = sys.argv[1].split(",")
if "no-pidfd" in sys.argv:
    process.descriptors.PIDFD = False
workers = [start_worker(t, b"", method=m, name="w", number=0) for m in methods for t in (idle, stuck)]
for worker in workers:
    assert worker.sock.recv(1) == b"r"
child = os.fork()
if child == 0:
    # A C library that forks runs no hook of Python's: this child keeps copies of everything.
    signal.pause()
say(" ".join(map(str, [child, process._server.pid or os.getpid(), *(worker.pid for worker in workers)])))
if "exit" in sys.argv:
    sys.exit(0)
if "raise" in sys.argv:
    raise ValueError("main fails")
signal.pause()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, "exit", "raise"])
def test_no_worker_outlives_main(script: Callable[..., subprocess.Popen[str]], end: int | str) -> None:
    main = script(DYING, ",".join(METHODS if end == signal.SIGKILL else ["forkserver", "fork"]), str(end))
    forked, *pids = map(int, read_words(main))
    try:
        if isinstance(end, int):
            assert all(map(is_running, pids))
            main.send_signal(end)
        main.wait(10)
        assert all_end(pids) == []
        assert is_running(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_no_worker_outlives_main_while_a_fork_keeps_its_descriptors(
    script: Callable[..., subprocess.Popen[str]],
) -> None:
    # The hook that closes main's ends in a forked child is off, as in a fork made by a C library.
    code = DYING.replace(
        "child = os.fork()", "process._workers.clear(); process._server.forget = lambda: None\n" + FORK
    )
    main = script(code, "forkserver")
    forked, *pids = map(int, read_words(main))
    try:
        main.kill()
        assert all_end(pids) == []
        assert is_running(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


FORK = "kept = [os.dup(worker.sock.fileno()) for worker in workers]; child = os.fork()"


def test_no_worker_outlives_main_without_pidfds(script: Callable[..., subprocess.Popen[str]]) -> None:
    main = script(DYING, ",".join(METHODS), "no-pidfd")
    forked, *pids = map(int, read_words(main))
    main.kill()
    os.kill(forked, signal.SIGKILL)
    assert all_end(pids) == []


@pytest.mark.parametrize("after", [0.0, 0.2, 0.8])
def test_main_killed_while_the_forkserver_imports(script: Callable[..., subprocess.Popen[str]], after: float) -> None:
    main = script("process.start_forkserver(); say(process._server.pid); signal.pause()")
    (server,) = map(int, read_words(main))
    time.sleep(after)
    main.kill()
    assert all_end([server]) == []


def test_ctrl_c_reaches_main_only(script: Callable[..., subprocess.Popen[str]]) -> None:
    main = script(
        """
workers = [start_worker(idle, b"", method=m, name="w", number=0) for m in ("forkserver", "spawn", "fork")]
for worker in workers:
    assert worker.sock.recv(1) == b"r"
for _ in range(3):
    try:
        say("ready")
        signal.pause()
    except KeyboardInterrupt:
        pass
    for worker in workers:
        worker.sock.sendall(b"x")
        assert worker.sock.recv(1) == b"x"
server = process._server.pid
workers.append(start_worker(idle, b"", name="w", number=0))
assert process._server.pid == server
for worker in workers:
    worker.close()
stop_forkserver()
say("good")
"""
    )
    for _ in range(3):
        assert read_words(main) == ["ready"]
        time.sleep(0.05)
        os.killpg(main.pid, signal.SIGINT)
    output, errors = main.communicate(timeout=30)
    assert (output, errors, main.returncode) == ("good\n", "", 0)


INTERRUPTED_STARTS = """
import threading
def count():
    return len(os.listdir("/proc/self/fd"))
def use(method):
    worker = start_worker(idle, b"", method=method, name="w", number=0)
    assert worker.sock.recv(1) == b"r"
    worker.close()
for case in sys.argv[1:]:
    method, after, *warm = case.split()
    before = count()
    if warm:
        use(method)
    interrupts = 0
    try:
        threading.Timer(float(after), lambda: os.killpg(0, signal.SIGINT)).start()
        while True:
            use(method)
    except KeyboardInterrupt:
        interrupts = 1
    while threading.active_count() > 1:
        time.sleep(0.01)
    use(method)
    stop_forkserver()
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    say(f"{case}: {interrupts} {count() - before} {children!r}")
"""


def test_ctrl_c_during_a_start(script: Callable[..., subprocess.Popen[str]]) -> None:
    cases = ["forkserver 0.01", "forkserver 0.3", "forkserver 0.3 warm", "spawn 0.01", "fork 0.01", "fork 0.1"]
    main = script(INTERRUPTED_STARTS, *cases)
    output, errors = main.communicate(timeout=100)
    assert (errors, main.returncode) == ("", 0)
    assert output.splitlines() == [f"{case}: 1 0 ''" for case in cases]


def test_forked_child_of_main_starts_a_forkserver_of_its_own(script: Callable[..., subprocess.Popen[str]]) -> None:
    main = script(
        """
def use():
    worker = start_worker(idle, b"", name="w", number=0)
    assert worker.sock.recv(1) == b"r"
    worker.sock.close()
    assert worker.join(10) and worker.exitcode == 0
    worker.close()
    return process._server.pid
mine = use()
read, write = os.pipe()
child = os.fork()
if child == 0:
    others = use()
    assert others != mine
    os.write(write, str(others).encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
others = int(os.read(read, 100))
assert use() == mine
say(others)
say(mine)
"""
    )
    servers = [int(read_words(main)[0]) for _ in range(2)]
    output, errors = main.communicate(timeout=30)
    assert (output, errors, main.returncode) == ("", "", 0)
    assert all_end(servers) == []
