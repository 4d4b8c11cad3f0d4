from __future__ import annotations

import logging
import socket
import threading
import warnings
from collections.abc import Iterator

import pytest

from pipes.loader2.forwarding import install_forwarding, replay_log, replay_warning
from pipes.loader2.process import start_worker, stop_forkserver


class MyWarning(UserWarning):
    pass


@pytest.fixture(scope="module", autouse=True)
def forkserver_ends_with_the_file() -> Iterator[None]:
    yield
    stop_forkserver()


def forwarded(work: object, method: str = "fork") -> list[tuple[str, bytes]]:
    """Run `work()` in a worker that forwards; return what came."""

    def run(sock: socket.socket, payload: bytes) -> None:
        lock = threading.RLock()

        def send(kind: str, data: bytes) -> None:
            with lock:
                sock.sendall(kind.encode().ljust(8) + len(data).to_bytes(4, "big") + data)

        install_forwarding(send, 3)
        work()

    worker = start_worker(run, b"", method=method, name="pipes worker 3", number=3)
    messages = []
    with worker.sock.makefile("rb") as file:
        while head := file.read(12):
            messages.append((head[:8].decode().strip(), file.read(int.from_bytes(head[8:], "big"))))
    assert worker.join(10)
    code = worker.exitcode
    worker.close()
    assert code == 0
    return messages


class Unprintable:
    def __repr__(self) -> str:
        return "<an object>"


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_log_records_reach_mains_handlers(method: str, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        logger = logging.getLogger("users.module")
        logger.debug("too low")
        logger.warning("hello %s", threading.Lock(), extra={"shard": 7, "thing": Unprintable()})
        try:
            raise ZeroDivisionError("x")
        except ZeroDivisionError:
            logger.exception("failed")
        logger.error("wrong %d", "text")
        logging.error("to the root")

    with caplog.at_level(logging.INFO):
        messages = forwarded(work, method)
    assert [kind for kind, _ in messages] == ["log"] * 4
    for _, payload in messages:
        replay_log(payload)
    hello, failed, wrong, root = caplog.records
    assert hello.getMessage().startswith("[worker 3] hello <unlocked _thread.lock")
    assert (hello.name, hello.levelname, hello.shard, hello.thing) == ("users.module", "WARNING", 7, "<an object>")
    assert (hello.worker, hello.processName) == (3, "pipes worker 3")
    assert "ZeroDivisionError" in (failed.exc_text or "")
    assert "its arguments cannot be formatted: TypeError" in wrong.getMessage()
    assert root.name == "root"
    assert "ZeroDivisionError" in caplog.text


def test_level_in_main_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "users.other"):
        messages = forwarded(lambda: logging.getLogger("users.other").info("was wanted"))
    with caplog.at_level(logging.ERROR, "users.other"):
        for _, payload in messages:
            replay_log(payload)
    assert len(messages) == 1
    assert not caplog.records


def test_inherited_handlers_do_not_speak_twice(capfd: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    logger = logging.getLogger("users.noisy")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        messages = forwarded(lambda: logger.error("once"))
        assert capfd.readouterr().err == ""
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    assert len(messages) == 1


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_warnings_reach_main(method: str) -> None:
    def work() -> None:
        warnings.simplefilter("always")
        warnings.warn("careful", MyWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)

        class Local(RuntimeWarning):
            pass

        warnings.warn("own kind", Local, stacklevel=1)

    messages = forwarded(work, method)
    with warnings.catch_warnings(record=True) as caught:
        for kind, payload in messages:
            assert kind == "warning"
            replay_warning(payload)
    assert [(str(w.message), w.category) for w in caught] == [
        ("[worker 3] careful", MyWarning),
        ("[worker 3] old", DeprecationWarning),
        ("[worker 3] test_warnings_reach_main.<locals>.work.<locals>.Local: own kind", UserWarning),
    ]
    assert caught[0].filename == __file__
    assert caught[0].lineno > 100


def test_mains_filters_speak_in_the_worker() -> None:
    def work() -> None:
        warnings.warn("unwanted", MyWarning, stacklevel=1)
        try:
            warnings.warn("fatal", DeprecationWarning, stacklevel=1)
        except DeprecationWarning:
            logging.error("became an error")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", MyWarning)
        messages = forwarded(work, "forkserver")
    assert [kind for kind, _ in messages] == ["log"]


def test_closed_socket_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        pass

    def run(sock: socket.socket, payload: bytes) -> None:
        def send(kind: str, data: bytes) -> None:
            raise BrokenPipeError

        install_forwarding(send, 0)
        logging.error("nobody listens")
        warnings.simplefilter("always")
        warnings.warn("nobody listens", stacklevel=1)

    worker = start_worker(run, b"", method="fork", name="w", number=0)
    assert worker.join(10)
    assert worker.exitcode == 0
    worker.close()
    assert capfd.readouterr().err == ""
