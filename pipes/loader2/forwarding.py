"""Log records and warnings of workers, shown in main with the worker's number.

Contract: in a worker, `install_forwarding(send, number)` sends every record that reaches the root logger and every
warning that the filters let through, as `send("log" | "warning", payload)`. `send` is called in the thread that logs or
warns, which may be any, also between two statements of another `send` (a finalizer that logs); it must cope with that.
In main, `replay_log` hands the record to main's handlers of the same logger, `replay_warning` shows the warning. A
payload holds plain values only: arguments are formatted in the worker, and nothing is unpickled in main.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["install_forwarding", "replay_log", "replay_warning"]

Send = Callable[[str, bytes], None]

_STANDARD = frozenset(vars(logging.makeLogRecord({})))
_FORMATTER = logging.Formatter()


def install_forwarding(send: Send, number: int) -> None:
    """Send this worker's log records and warnings through `send(kind, payload)`.

    Handlers that the worker has so far, inherited by fork or made by imports, are removed: main has its own.
    """
    names = [None, *logging.root.manager.loggerDict]
    for name in names:
        logger = logging.getLogger(name) if name is None else logging.root.manager.loggerDict[name]
        if isinstance(logger, logging.Logger):
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
            logger.propagate = True
    logging.root.addHandler(_Forward(send, number))

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        with contextlib.suppress(OSError):
            send("warning", _packed_warning(number, message, category, filename, lineno))

    warnings.showwarning = show


class _Forward(logging.Handler):
    def __init__(self, send: Send, number: int) -> None:
        super().__init__()
        self._send, self._number = send, number

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send("log", _packed_record(record, self._number))
        except OSError:
            # Main is gone or has closed the socket: nobody is left to tell.
            return
        except Exception:
            self.handleError(record)


def _packed_record(record: logging.LogRecord, number: int) -> bytes:
    fields = {key: value if key in _STANDARD else _plain(value) for key, value in vars(record).items()}
    fields["msg"] = _formatted(record)
    if record.exc_info:
        fields["exc_text"] = record.exc_text or _FORMATTER.formatException(record.exc_info)
    fields.update(args=None, exc_info=None, worker=number)
    return marshal.dumps({key: _plain(value) for key, value in fields.items()})


def _formatted(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.msg!r} (its arguments cannot be formatted: {type(error).__name__}: {error})"


def _plain(value: Any) -> Any:
    try:
        marshal.dumps(value)
    except ValueError:
        return repr(value)
    return value


def replay_log(payload: bytes) -> None:
    """Hand a worker's log record to main's handlers, with "[worker n]" before its text and `worker` as a field.

    >>> record = logging.makeLogRecord({"name": "mine", "levelno": 40, "levelname": "ERROR", "msg": "bad"})
    >>> with contextlib.redirect_stdout(None): replay_log(_packed_record(record, 3))
    """
    fields = marshal.loads(payload)
    fields["msg"] = f"[worker {fields['worker']}] {fields['msg']}"
    record = logging.makeLogRecord(fields)
    logger = logging.getLogger(None if record.name == "root" else record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _packed_warning(number: int, message: Warning | str, category: type[Warning], filename: str, lineno: int) -> bytes:
    return marshal.dumps((number, str(message), category.__module__, category.__qualname__, filename, lineno))


def replay_warning(payload: bytes) -> None:
    """Show a worker's warning in main, with "[worker n]" before its text.

    The filters were main's and spoke in the worker already; an active `catch_warnings(record=True)` records it.
    """
    number, text, module, name, filename, lineno = marshal.loads(payload)
    category = _category(module, name)
    known = category is not UserWarning or (module, name) == ("builtins", "UserWarning")
    message = f"[worker {number}] {text}" if known else f"[worker {number}] {name}: {text}"
    warnings.showwarning(message, category, filename, lineno)


def _category(module: str, name: str) -> type[Warning]:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
