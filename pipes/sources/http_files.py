"""Files behind `http://` and `https://` URLs: `.read_from_http`."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

from pipes.arguments import whole
from pipes.datapipe import IterDataPipe, Shard, functional_datapipe, length_of, refuse_length
from pipes.error_policy import BUDGET, MaxErrors, OnError, check_policy
from pipes.sources.http_stream import HttpStream, Sessions, need_requests
from pipes.sources.listing import OpeningRun
from pipes.sources.s3_options import S3Options
from pipes.stages.wrapping import as_pipe
from pipes.utils import StreamWrapper

__all__ = ["HttpReader"]

_BUFFER = 128 * 1024
_TIMEOUT = (5.0, 10.0)
_TAKEN = frozenset(
    {"params", "headers", "cookies", "auth", "allow_redirects", "proxies", "hooks", "verify", "cert", "data", "json"}
)


class HttpRun(OpeningRun):
    """Opens each URL through the sessions of this run, which close when it is dropped."""

    def function(self) -> Callable[..., Any]:
        return partial(self.pipe.opened, sessions=Sessions())


@functional_datapipe("read_from_http")
class HttpReader(IterDataPipe[tuple[str, StreamWrapper]]):
    """Open each URL by GET and give `(url, stream)`; the stream gives bytes and closes when it is dropped.

    Args:
        source_datapipe: a pipe or list of `http://` and `https://` URLs.
        timeout: seconds to wait for a connection and for each next byte, or a pair of both; by default 5 and 10.
        skip_on_error: the same as `on_error="skip"`.
        attempts: requests made for one URL before giving up.
        deadline: seconds after which the attempts for one URL are given up.
        on_error, max_errors: "skip" leaves out URLs that cannot be opened, up to so many; see the page on errors.
        kwargs: what `requests.get` takes beside: headers, auth, proxies, params, cookies, verify, cert,
            allow_redirects, ...

    A stream is whole or an error. It seeks where the server takes ranges. Redirects are followed; what passes (no
    connection, a cut body, status 429 and 5xx with Retry-After) is tried again.
    Raises ModuleNotFoundError without requests, TypeError for an unknown keyword, ValueError for a `Range` header;
    while iterating, TypeError and ValueError for what is no such URL, StoreNotFoundError (404), StorePermissionError
    (401, 403), StoreTimeoutError, StoreConnectionError, StoreError. Reading raises those and ChangedDataError.

    >>> pipe = HttpReader(["https://example.org/a.tar"], headers={"Authorization": "Bearer x"}).load_from_tar()
    >>> len(HttpReader(["https://example.org/a.csv"]))
    1
    """

    run_class = HttpRun
    _opens = True

    def __init__(
        self,
        source_datapipe: Any,
        timeout: Any = None,
        skip_on_error: bool = False,
        *,
        attempts: int = 5,
        deadline: float = 20.0,
        on_error: OnError = "raise",
        max_errors: MaxErrors = BUDGET,
        **kwargs: Any,
    ) -> None:
        need_requests()
        if unknown := sorted(kwargs.keys() - _TAKEN):
            raise TypeError(
                f"HttpReader takes no {', '.join(unknown)}; of requests it takes {', '.join(sorted(_TAKEN))}"
            )
        if any(str(name).lower() == "range" for name in kwargs.get("headers") or {}):
            raise ValueError("a Range header cannot be given: a stream asks for ranges itself, and seeks")
        if skip_on_error and on_error not in ("raise", "skip"):
            raise ValueError("skip_on_error=True is on_error='skip': give it or a function as on_error, not both")
        policy = "skip" if skip_on_error else on_error
        check_policy(policy, max_errors)
        attempts = whole("attempts", attempts)
        S3Options(attempts=attempts, deadline=deadline)
        self.source_datapipe = as_pipe(source_datapipe)
        self.timeout = timeout
        self.skip_on_error = skip_on_error
        self.attempts = attempts
        self.deadline = deadline
        self.on_error = policy
        self.max_errors = max_errors
        self.kwargs = kwargs

    def opened(self, url: Any, sessions: Sessions | None = None) -> tuple[str, StreamWrapper]:
        """Open one URL."""
        if not isinstance(url, str):
            raise TypeError(f"a URL must be str, not {type(url).__name__}")
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no URL of http:// or https://; other stores have openers of their own")
        timeout = _TIMEOUT if self.timeout is None else self.timeout
        settings = {"timeout": tuple(timeout) if isinstance(timeout, list) else timeout, **self.kwargs}
        if isinstance(auth := settings.get("auth"), list):  # as a graph in YAML has it
            settings["auth"] = tuple(auth)
        patience = S3Options(attempts=self.attempts, deadline=self.deadline)
        raw = HttpStream(url, sessions or Sessions(), settings, patience, getattr(url, "size", None))
        return url, StreamWrapper(io.BufferedReader(raw, _BUFFER), name=url)

    def _places(self) -> tuple[str, ...]:
        return ()

    def _length(self, shard: Shard) -> int:
        refuse_length(self)
        return length_of(self.source_datapipe, shard)
