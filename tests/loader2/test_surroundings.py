"""A worker sees the environment, folder, paths and settings that main has when it starts."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import warnings

import pytest
from worker_processes import METHODS, run

from pipes.loader2 import guard, process

pytestmark = pytest.mark.usefixtures("no_residue")
every_method = pytest.mark.parametrize("method", METHODS)


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
