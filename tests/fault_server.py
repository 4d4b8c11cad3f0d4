"""A tiny S3-like HTTP/1.1 server that misbehaves on request.

    with FaultServer({"a": b"abc"}) as server:
        server.script("a", Step(status=503), Step(status=503))     # then the plain answer
        ...
        assert [request.method for request in server.seen("a")] == ["GET"] * 3

It answers GET, HEAD, LIST (version 2), PUT and multipart uploads of one bucket, path style, with ranges, If-Match
and Content-MD5, and counts what it was asked. Steps of a script are used up one a request; a step with `forever=True`
stays. LIST has the script `LIST`; the requests of an upload of "k" have "k#begin", "k#1" (a part), "k#complete" and
"k#abort". What a step's status refuses is not done; what its `cut` or `lost` spoils is.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import struct
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["LIST", "FaultServer", "Request", "Step"]

LIST = "\0list"


@dataclass(frozen=True)
class Step:
    """What one request gets."""

    status: int = 200
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    """Body of an error answer, in place of the usual one."""
    instead: bytes | None = None
    """Sent in place of the object or the listing, without an ETag."""
    cut: int | None = None
    """Close after this many body bytes of the answer, whatever Content-Length promised."""
    reset: bool = False
    """With `cut`: end by RST in place of FIN."""
    lost: bool = False
    """Close without an answer."""
    stall: float = 0.0
    """Wait this many seconds after `cut` bytes (or before the answer's head) and then go on."""
    meet: threading.Barrier | None = None
    """Answer when as many requests are there as it says, all together; close without an answer after 30 seconds."""
    etag: str | None = None
    body: bytes | None = None
    """From this request on the object has this body."""
    wrong_at: int | None = None
    """One bit of this byte of the answer's body is turned."""
    ignore_range: bool = False
    ignore_match: bool = False
    forever: bool = False


@dataclass(frozen=True)
class Request:
    method: str
    key: str
    target: str
    query: dict[str, str]
    headers: dict[str, str]
    port: int
    time: float


class FaultServer:
    """Serves `objects` as bucket `bucket` on a free port of the loopback."""

    def __init__(
        self, objects: dict[str, bytes] | None = None, bucket: str = "bkt", tls: ssl.SSLContext | None = None
    ) -> None:
        self.objects = dict(objects or {})
        self.etags: dict[str, str] = {}
        self.versions: dict[tuple[str, str], bytes] | None = None
        """Bodies by key and version id, of a bucket that keeps those it has shown; None: the bucket keeps none."""
        self.bucket = bucket
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.keep_parts = True
        self.needed: dict[str, str] = {}
        """Headers without which a request is refused."""
        self.requests: list[Request] = []
        self.judge: Callable[[Request], Step | None] | None = None
        """Comes before the scripts."""
        self._scripts: dict[str, list[Step]] = {}
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fault = self
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def reset(self, objects: dict[str, bytes]) -> None:
        """Begin again with these objects: no scripts, no tags of their own, nothing seen."""
        with self._lock:
            self.objects, self.etags, self.uploads, self.keep_parts = dict(objects), {}, {}, True
            self.requests, self._scripts, self.versions = [], {}, None

    def script(self, key: str, *steps: Step) -> None:
        self._scripts[key] = list(steps)

    def seen(self, key: str) -> list[Request]:
        return [request for request in self.requests if request.key == key]

    def etag(self, key: str) -> str:
        return self.etags.get(key) or '"' + hashlib.md5(self.objects[key]).hexdigest() + '"'

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_step(self, request: Request) -> Step:
        with self._lock:
            self.requests.append(request)
            if self.judge is not None and (verdict := self.judge(request)) is not None:
                return verdict
            steps = self._scripts.get(request.key)
            if not steps:
                return Step()
            return steps[0] if steps[0].forever else steps.pop(0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    fault: FaultServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up is part of the game


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        fault = self.server.fault
        split = urlsplit(self.path)
        bucket, _, key = unquote(split.path.removeprefix("/")).partition("/")
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        asked = LIST if "list-type" in query else key + _operation(self.command, query)
        request = Request(
            self.command, asked, self.path, query, dict(self.headers.items()), self.client_address[1], time.monotonic()
        )
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        step = fault.next_step(request)
        if step.body is not None:
            fault.objects[key] = step.body
        if step.etag is not None:
            fault.etags[key] = step.etag
        if step.stall and step.cut is None:
            time.sleep(step.stall)
        if step.meet is not None:
            step.meet.wait(30)
        if step.instead is not None:
            self._send(step.status, {}, step.instead, step)
        elif step.status != 200:
            self._error(step.status, step.code, step.headers, step.text)
        elif any(self.headers.get(name) != value for name, value in fault.needed.items()):
            self._error(400, "InvalidRequest", step.headers)
        elif bucket != fault.bucket:
            self._error(404, "NoSuchBucket", step.headers)
        elif asked == LIST:
            self._send(200, {"Content-Type": "application/xml"}, _listing(fault, query), step)
        elif self.command in ("PUT", "POST", "DELETE"):
            self._write(key, query, body, step)
        elif "versionId" in query and (key, query["versionId"]) not in (fault.versions or {}):
            self._error(404, "NoSuchVersion", step.headers)
        elif "versionId" not in query and key not in fault.objects:
            self._error(404, "NoSuchKey", step.headers)
        else:
            self._object(key, step, query.get("versionId", ""))

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _write(self, key: str, query: dict[str, str], body: bytes, step: Step) -> None:
        fault = self.server.fault
        tag = hashlib.md5(body).digest()
        if self.headers.get("Content-MD5", "") not in ("", b64encode(tag).decode()):
            return self._error(400, "BadDigest", step.headers)
        parts = fault.uploads.get(query.get("uploadId", ""))
        if "uploadId" in query and parts is None:
            return self._error(404, "NoSuchUpload", step.headers)
        answer, headers = b"", {"Content-Type": "application/xml"}
        if "uploads" in query:
            upload = f"upload-{len(fault.uploads)}"
            fault.uploads[upload] = {}
            answer = (
                f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>".encode()
            )
        elif parts is None:
            fault.objects[key] = body
            headers["ETag"] = fault.etag(key)
        elif self.command == "PUT":
            parts[int(query["partNumber"])] = body if fault.keep_parts else b""
            headers["ETag"] = f'"{tag.hex()}"'
        elif self.command == "POST":
            fault.objects[key] = b"".join(parts[int(number)] for number in re.findall(rb"<PartNumber>(\d+)<", body))
            tags = b"".join(hashlib.md5(parts[number]).digest() for number in sorted(parts))
            fault.etags[key] = f'"{hashlib.md5(tags).hexdigest()}-{len(parts)}"'
            answer = f"<Result><ETag>{fault.etags[key]}</ETag></Result>".encode()
            del fault.uploads[query["uploadId"]]
        else:
            del fault.uploads[query["uploadId"]]
        return self._send(200, headers, answer, step)

    def _object(self, key: str, step: Step, version: str) -> None:
        fault = self.server.fault
        if version:
            body, etag = (fault.versions or {})[key, version], f'"{version}"'
        else:
            body, etag = fault.objects[key], fault.etag(key)
        headers = {"ETag": etag, "Last-Modified": "Mon, 07 Dec 2026 10:00:00 GMT", "Accept-Ranges": "bytes"}
        if fault.versions is not None:
            headers["x-amz-version-id"] = etag.strip('"')
            fault.versions[key, etag.strip('"')] = body
        wanted = self.headers.get("If-Match")
        if wanted and wanted != etag and not step.ignore_match:
            return self._error(412, "PreconditionFailed", step.headers)
        status, span = 200, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span and not step.ignore_range:
            start, end = int(span[1]), min(int(span[2] or len(body)), len(body) - 1)
            if start >= len(body):
                return self._error(416, "InvalidRange", step.headers)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(body)}"
            status, body = 206, body[start : end + 1]
        return self._send(status, headers, body, step)

    def _error(self, status: int, code: str, headers: dict[str, str], text: str = "") -> None:
        code = code or {403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests", 503: "SlowDown"}.get(status, "")
        text = text or f"<Error><Code>{code}</Code><Message>told to fail</Message><RequestId>REQ7</RequestId></Error>"
        self._send(status, {"Content-Type": "application/xml", **headers}, text.encode(), Step())

    def _send(self, status: int, headers: dict[str, str], body: bytes, step: Step) -> None:
        if step.lost:
            self.close_connection = True
            return
        fields = {"Content-Length": str(len(body)), "x-amz-request-id": "REQ7", **headers, **step.headers}
        self.send_response_only(status)
        for name, value in ({"Date": self.date_time_string()} | fields).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if step.wrong_at is not None:
            body = body[: step.wrong_at] + bytes([body[step.wrong_at] ^ 1]) + body[step.wrong_at + 1 :]
        if step.cut is None:
            self.wfile.write(body)
            return
        self.wfile.write(body[: step.cut])
        if step.stall:
            time.sleep(step.stall)
            with contextlib.suppress(OSError):
                self.wfile.write(body[step.cut :])
            return
        if step.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


def _operation(method: str, query: dict[str, str]) -> str:
    if "uploads" in query:
        return "#begin"
    if "partNumber" in query:
        return "#" + query["partNumber"]
    if "uploadId" in query:
        return "#complete" if method == "POST" else "#abort"
    return ""


def _listing(fault: FaultServer, query: dict[str, str]) -> bytes:
    prefix, limit = query.get("prefix", ""), int(query.get("max-keys", 1000))
    after = query.get("continuation-token") or query.get("start-after") or ""
    keys = sorted((key for key in fault.objects if key.startswith(prefix) and key > after), key=str.encode)
    page, more = keys[:limit], len(keys) > limit
    encode = quote if query.get("encoding-type") == "url" else escape
    rows = "".join(
        f"<Contents><Key>{encode(key)}</Key><LastModified>2026-12-07T10:00:00.000Z</LastModified>"
        f"<ETag>{escape(fault.etag(key))}</ETag><Size>{len(fault.objects[key])}</Size></Contents>"
        for key in page
    )
    token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
    encoding = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{fault.bucket}</Name><KeyCount>{len(page)}</KeyCount><MaxKeys>{limit}</MaxKeys>{encoding}"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
    ).encode()
