"""Every error the package raises on its own account.

    PipesError(Exception)
    ├── GraphError(RuntimeError)          the graph is wrong before any element flows
    │   ├── UnpicklableStageError         a stage cannot travel to a worker; names the stage and the attribute
    │   └── ConfigError(ValueError)       a YAML graph is wrong; carries file, line and column
    ├── StateError(ValueError)            a saved state does not fit or is damaged; names the difference
    ├── StaleIteratorError(RuntimeError)  a newer iterator of the same pipe took over
    ├── BusyError(RuntimeError)           two threads ask one loader at once
    ├── ErrorBudgetExceeded(RuntimeError) `on_error="skip"` skipped more elements than allowed
    ├── DataError(ValueError)             bytes that are not what the format says; names file and offset
    │   ├── TruncatedError(EOFError)      the data ends too early, also: an empty archive
    │   ├── ChangedDataError              an object was replaced between list, open and read
    │   └── HashError(RuntimeError)       a file has not the hash that `check_hash` was told, or was told none
    ├── DeviceError(RuntimeError)         no such device, or a batch cannot be moved there; names the place in the batch
    ├── StoreError(OSError)               an object store refused or failed
    │   ├── StoreNotFoundError(FileNotFoundError)
    │   ├── StorePermissionError(PermissionError)
    │   ├── StoreTimeoutError(TimeoutError)
    │   └── StoreConnectionError(ConnectionError)
    ├── RankError(RuntimeError)           another rank of the training failed, is gone, or is in another epoch
    │   └── RankTimeoutError(TimeoutError)  another rank did not come within `timeout=`
    └── WorkerError(RuntimeError)         something happened in a worker process
        ├── WorkerDiedError               the process ended by itself; names signal, exit code, stage, last element
        ├── WorkerTimeoutError(TimeoutError)  no batch within `timeout=`; carries the worker's Python stack
        ├── RemoteError                   stands for an exception that could not travel itself
        └── ChannelClosed(EOFError)       the other process closed its end of the channel, or ended

A message says what happened, where, and what to do about it. Every error here survives pickling with its fields.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any

__all__ = [
    "BusyError",
    "ChangedDataError",
    "ChannelClosed",
    "ConfigError",
    "DataError",
    "DeviceError",
    "ErrorBudgetExceeded",
    "GraphError",
    "HashError",
    "PipesError",
    "RankError",
    "RankTimeoutError",
    "RemoteError",
    "RemoteTraceback",
    "StaleIteratorError",
    "StateError",
    "StoreConnectionError",
    "StoreError",
    "StoreNotFoundError",
    "StorePermissionError",
    "StoreTimeoutError",
    "TruncatedError",
    "UnpicklableStageError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
    "add_note",
    "brief",
    "mask",
    "notes_of",
]


def _rebuild(cls: type[PipesError], args: tuple[Any, ...], fields: dict[str, Any]) -> PipesError:
    # The class's own __new__ is that of its first base, which does not make the memory of an OSError.
    make: Any = OSError.__new__ if issubclass(cls, OSError) else Exception.__new__
    error: PipesError = make(cls, *args)
    Exception.__init__(error, *args)
    error.__dict__.update(fields)
    return error


class PipesError(Exception):
    """Base of every error that the package raises on its own account."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class GraphError(PipesError, RuntimeError):
    """The graph is wrong before any element flows."""


class UnpicklableStageError(GraphError):
    """A stage cannot travel to a worker process."""


class ConfigError(GraphError, ValueError):
    """A YAML graph is wrong; `file`, `line` and `column` (both from 1) say where.

    When several things are wrong, `errors` holds one error for each, and the fields are those of the first.
    """

    def __init__(self, message: str, file: str = "", line: int = 0, column: int = 0) -> None:
        super().__init__(f"{file}:{line}:{column}: {message}" if file else message)
        self.message, self.file, self.line, self.column = message, file, line, column
        self._all: tuple[ConfigError, ...] = ()

    @property
    def errors(self) -> tuple[ConfigError, ...]:
        return self._all or (self,)

    @classmethod
    def of(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """Return one error that stands for all of `errors`, in their order."""
        first = errors[0]
        whole = cls(first.message, first.file, first.line, first.column)
        whole.args = ("\n".join(str(error) for error in errors),)
        whole._all = tuple(errors)
        return whole


class StateError(PipesError, ValueError):
    """A saved state does not fit the graph, or is damaged."""


class StaleIteratorError(PipesError, RuntimeError):
    """A newer iterator of the same pipe took over."""


class BusyError(PipesError, RuntimeError):
    """A thread asks a loader for an output while another one is inside `next`."""


class ErrorBudgetExceeded(PipesError, RuntimeError):
    """More elements were skipped than the stage's error budget allows."""


class DeviceError(PipesError, RuntimeError):
    """There is no such device or memory, or a batch cannot be moved to it."""


class DataError(PipesError, ValueError):
    """Bytes are not what their format says."""


class TruncatedError(DataError, EOFError):
    """The data ends too early."""


class ChangedDataError(DataError):
    """An object was replaced between listing, opening and reading it."""


class HashError(DataError, RuntimeError):
    """A file has not the hash that it should have, or none is known for it."""


class StoreError(PipesError, OSError):
    """An object store refused or failed; fields say which object, which status and how many attempts."""

    def __init__(
        self,
        message: str,
        *,
        bucket: str = "",
        key: str = "",
        status: int | None = None,
        attempts: int = 0,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.bucket, self.key, self.status = bucket, key, status
        self.attempts, self.request_id = attempts, request_id

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """The bucket or object does not exist."""


class StorePermissionError(StoreError, PermissionError):
    """The store denied access."""


class StoreTimeoutError(StoreError, TimeoutError):
    """The store did not answer before the deadline."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store could not be reached or kept failing."""


class RankError(PipesError, RuntimeError):
    """Another rank of the training failed, is gone, or is in another epoch; `rank` is its number, -1 if unknown."""

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeoutError(RankError, TimeoutError):
    """Another rank did not come to the same output within `timeout=`."""


class WorkerError(PipesError, RuntimeError):
    """Something happened in a worker process."""


class WorkerDiedError(WorkerError):
    """A worker process ended by itself.

    `worker` is its number and `pid` its process; `signal` or `exit_code` say how it ended and `reason` why, as far as
    that tells. `stream` and `output` (from 0) are what it made then, -1 if nothing; `stage` and `element` (a short
    repr) are "" unless an earlier death at the same output made them known. `restarts` counts those in the epoch.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: int = -1,
        pid: int = 0,
        signal: int | None = None,
        exit_code: int | None = None,
        reason: str = "",
        stream: int = -1,
        output: int = -1,
        stage: str = "",
        element: str = "",
        restarts: int = 0,
    ) -> None:
        super().__init__(message)
        self.worker, self.pid, self.signal, self.exit_code, self.reason = worker, pid, signal, exit_code, reason
        self.stream, self.output, self.stage, self.element = stream, output, stage, element
        self.restarts = restarts


class WorkerTimeoutError(WorkerError, TimeoutError):
    """No batch came within `timeout=`."""


class RemoteError(WorkerError):
    """Stands for an exception of a worker that could not travel itself; `exception_type` names its class."""

    def __init__(self, message: str, exception_type: str = "") -> None:
        super().__init__(message)
        self.exception_type = exception_type


class RemoteTraceback(WorkerError):
    """Never raised: the `__cause__` of an error that came from a worker, with the worker's traceback as its text."""


class ChannelClosed(WorkerError, EOFError):
    """The other process closed its end of the channel, or ended."""


_SECRETS = re.compile(
    r"(?i)(x-amz-(?:signature|credential|security-token)=|[?&](?:[\w.-]*(?:sig|signature|credential|policy|auth)|key)="
    r"|authorization['\"]?\s*[=:]\s*['\"]?(?:(?:bearer|basic|token)\s+)?|\bauth['\"]?\s*[=:]\s*[(\[]['\"][^'\"]*['\"],\s*['\"]"
    r"|(?:secret|token|password|passwd|api_?key|access_?key|customer_?key)[^=:\s]{0,20}"
    r"['\"]?\s*[=:]\s*['\"]?)[^\s&'\",@]+|(://[^/\s:@]*:)[^\s/@]+(?=@)|\b(?:AKIA|ASIA)[A-Z0-9]{12,}"
)


def brief(value: object, limit: int = 120) -> str:
    """Return a short repr of `value` for an error message, secrets masked.

    >>> brief("https://h/b?X-Amz-Signature=abc&x=1")
    "'https://h/b?X-Amz-Signature=***&x=1'"
    """
    try:
        text = _SHORT.repr(value)
    except Exception:
        text = f"<{type(value).__name__}, whose repr fails>"
    text = mask(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of `error` as texts, whatever a user has put there.

    >>> error = ValueError(); error.__notes__ = ["one", 2]
    >>> notes_of(error)
    ['one', '2']
    """
    try:
        notes = getattr(error, "__notes__", [])
        notes = notes if isinstance(notes, list | tuple) else [notes]
        return [note if isinstance(note, str) else brief(note) for note in notes]
    except Exception:
        return []


def add_note(error: BaseException, note: str) -> bool:
    """Add `note` to `error`, also when its notes are no list of texts; False when it takes no notes at all."""
    try:
        error.add_note(note)
    except Exception:
        try:
            error.__notes__ = [*notes_of(error), note]
        except Exception:
            return False
    return True


def mask(text: str) -> str:
    """Return `text` with what looks like a secret replaced by `***`.

    >>> mask("secret_key: hush")
    'secret_key: ***'
    """
    return _SECRETS.sub(lambda found: f"{found[1] or found[2] or ''}***", text)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4
_SHORT.maxlevel = 3
