"""Every error the package raises on its own account.

    PipesError(Exception)
    ├── GraphError(RuntimeError)          the graph is wrong before any element flows
    │   ├── UnpicklableStageError         a stage cannot travel to a worker; names the stage and the attribute
    │   └── ConfigError(ValueError)       a YAML graph is wrong; carries file, line and column
    ├── StateError(ValueError)            a saved state does not fit or is damaged; names the difference
    ├── StaleIteratorError(RuntimeError)  a newer iterator of the same pipe took over
    ├── ErrorBudgetExceeded(RuntimeError) `on_error="skip"` skipped more elements than allowed
    ├── DataError(ValueError)             bytes that are not what the format says; names file and offset
    │   ├── TruncatedError(EOFError)      the data ends too early, also: an empty archive
    │   └── ChangedDataError              an object was replaced between list, open and read
    ├── StoreError(OSError)               an object store refused or failed
    │   ├── StoreNotFoundError(FileNotFoundError)
    │   ├── StorePermissionError(PermissionError)
    │   ├── StoreTimeoutError(TimeoutError)
    │   └── StoreConnectionError(ConnectionError)
    └── WorkerError(RuntimeError)         something happened in a worker process
        ├── WorkerDiedError               the process ended by itself; names signal, exit code, stage, last element
        ├── WorkerTimeoutError(TimeoutError)  no batch within `timeout=`; carries the worker's Python stack
        └── RemoteError                   stands for an exception that could not travel itself

A message says what happened, where, and what to do about it. Every error here survives pickling with its fields.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ChangedDataError",
    "ConfigError",
    "DataError",
    "ErrorBudgetExceeded",
    "GraphError",
    "PipesError",
    "RemoteError",
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
]


def _rebuild(cls: type[PipesError], args: tuple[Any, ...], fields: dict[str, Any]) -> PipesError:
    error = cls.__new__(cls, *args)
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
    """A YAML graph is wrong; `file`, `line` and `column` (both from 1) say where."""

    def __init__(self, message: str, file: str = "", line: int = 0, column: int = 0) -> None:
        super().__init__(f"{file}:{line}:{column}: {message}" if file else message)
        self.message, self.file, self.line, self.column = message, file, line, column


class StateError(PipesError, ValueError):
    """A saved state does not fit the graph, or is damaged."""


class StaleIteratorError(PipesError, RuntimeError):
    """A newer iterator of the same pipe took over."""


class ErrorBudgetExceeded(PipesError, RuntimeError):
    """More elements were skipped than the stage's error budget allows."""


class DataError(PipesError, ValueError):
    """Bytes are not what their format says."""


class TruncatedError(DataError, EOFError):
    """The data ends too early."""


class ChangedDataError(DataError):
    """An object was replaced between listing, opening and reading it."""


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


class WorkerError(PipesError, RuntimeError):
    """Something happened in a worker process."""


class WorkerDiedError(WorkerError):
    """A worker process ended by itself."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """No batch came within `timeout=`."""


class RemoteError(WorkerError):
    """Stands for an exception of a worker that could not travel itself."""
