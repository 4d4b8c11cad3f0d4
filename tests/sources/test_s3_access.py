"""Wrong regions, expired credentials, clocks that differ, TLS, against a server that counts requests."""

import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import boto3
import pytest
from fault_server import LIST, FaultServer, Request, Step

from pipes.errors import StoreError, StorePermissionError
from pipes.sources.s3_boto import make_boto_session
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

clients = pytest.mark.parametrize("client", ["boto3", "obstore"])


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer({"a": b"abc", "b": b"bcd"}) as server:
        yield server


def header(server: FaultServer, key: str, name: str) -> list[str]:
    return [
        {name.lower(): value for name, value in request.headers.items()}.get(name, "") for request in server.seen(key)
    ]


@clients
@pytest.mark.parametrize(("status", "code"), [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")])
def test_a_wrong_region_is_followed_once_and_remembered(
    server: FaultServer, client: str, status: int, code: str
) -> None:
    body = f"<Error><Code>{code}</Code><Message>elsewhere</Message><Region>eu-x-1</Region></Error>"
    wrong = Step(status=status, code=code, headers={"x-amz-bucket-region": "eu-x-1"}, text=body)
    server.script("a", *[wrong] * (2 if client == "obstore" else 1))  # obstore asks first, then boto3, which follows
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client=client))
    assert store.get("s3://bkt/a") == b"abc"
    assert store.get("s3://bkt/b") == b"bcd"
    regions = [text.split("/")[2] for text in header(server, "a", "authorization")]
    assert regions == ["us-east-1"] * (len(regions) - 1) + ["eu-x-1"]
    assert len(regions) == (3 if client == "obstore" else 2)
    assert [text.split("/")[2] for text in header(server, "b", "authorization")] == ["eu-x-1"]


@clients
def test_expired_credentials_are_renewed_once(
    server: FaultServer, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old-token")
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client=client))
    assert store.get("s3://bkt/a") == b"abc"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new-token")
    server.script("b", Step(status=400, code="ExpiredToken"))
    assert store.get("s3://bkt/b") == b"bcd"
    assert header(server, "b", "x-amz-security-token") == ["old-token", "new-token"]
    assert store.get("s3://bkt/a") == b"abc"
    assert header(server, "a", "x-amz-security-token") == ["old-token", "new-token"]
    for key in ("b", LIST):
        server.requests.clear()
        server.script(key, Step(status=400, code="ExpiredToken", forever=True))
        with pytest.raises(StorePermissionError, match=r"credentials have expired.*Check the credentials") as caught:
            store.get("s3://bkt/b") if key == "b" else list(store.list("s3://bkt/"))
        assert caught.value.attempts == len(server.seen(key)) == 2
        assert "new-token" not in str(caught.value)


def tokens_refused(*tokens: str) -> Callable[[Request], Step | None]:
    def judge(request: Request) -> Step | None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        return Step(status=400, code="ExpiredToken") if headers.get("x-amz-security-token") in tokens else None

    return judge


@clients
def test_many_threads_renew_once(server: FaultServer, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old-token")
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client=client, backoff=0.01))
    assert store.get("s3://bkt/a") == b"abc"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new-token")
    server.judge = tokens_refused("old-token")
    made, begin = [], threading.Barrier(8)
    monkeypatch.setattr(
        "pipes.sources.s3_client.make_boto_session", lambda options: made.append(0) or make_boto_session(options)
    )

    def read() -> None:
        begin.wait(10)
        assert store.get("s3://bkt/b") == b"bcd"
        read_by.append(threading.current_thread())

    read_by: list[threading.Thread] = []
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(read_by) == 8
    assert len(made) == 1


def test_credentials_that_expire_again_in_a_long_stream(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects["a"] = bytes(3 << 20)
    server.script("a", Step(cut=1 << 20), Step(cut=1 << 20))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t0")
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client="boto3", backoff=0.01))
    with store.open("s3://bkt/a") as stream:
        for number in range(3):
            assert stream.read(1 << 20) == bytes(1 << 20)
            server.judge = tokens_refused(*(f"t{each}" for each in range(number + 1)))
            monkeypatch.setenv("AWS_SESSION_TOKEN", f"t{number + 1}")
    tokens = header(server, "a", "x-amz-security-token")
    assert tokens == ["t0", "t0", "t1", "t1", "t2"]


def test_credentials_that_were_passed_are_tried_once(server: FaultServer) -> None:
    server.judge = tokens_refused("own")
    keys = {"aws_access_key_id": "AK", "aws_secret_access_key": "s", "aws_session_token": "own"}
    mine = boto3.client("s3", endpoint_url=server.url, **keys)  # type: ignore[call-overload]
    given = S3Options(
        endpoint_url=server.url, access_key="AK", secret_key="s", session_token="own", region="x", client="boto3"
    )
    for options in (S3Options(client=mine), given):
        server.requests.clear()
        with pytest.raises(StorePermissionError, match="the credentials have expired"):
            S3Store(options).get("s3://bkt/a")
        assert len(server.requests) == 1
    mine.close()


def test_a_store_that_sends_in_circles(server: FaultServer) -> None:
    wrong = Step(status=301, code="PermanentRedirect", headers={"x-amz-bucket-region": "eu-x-1"}, forever=True)
    server.script("a", wrong)
    with pytest.raises(StoreError, match="PermanentRedirect"):
        S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client="boto3")).get("s3://bkt/a")
    assert len(server.seen("a")) == 2


@clients
def test_a_clock_that_is_wrong(server: FaultServer, client: str) -> None:
    server.script("a", Step(status=403, code="RequestTimeTooSkewed"))
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client=client))
    with pytest.raises(StorePermissionError, match=r"RequestTimeTooSkewed.*set this machine's clock"):
        store.get("s3://bkt/a")
    assert len(server.seen("a")) == 1


@pytest.mark.parametrize(("seconds", "said"), [(-7200, r"7\d\d\d s ahead of"), (7200, r"7\d\d\d s behind")])
def test_how_far_a_clock_is_off(server: FaultServer, seconds: int, said: str) -> None:
    date = formatdate(time.time() + seconds, usegmt=True)
    server.script("a", Step(status=403, code="RequestTimeTooSkewed", headers={"Date": date}))
    with pytest.raises(StorePermissionError, match=f"this machine's clock is {said} the store's"):
        S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client="boto3")).get("s3://bkt/a")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate and its key, for 127.0.0.1, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=127.0.0.1"
    names = "subjectAltName=IP:127.0.0.1"
    made = [f"{folder}/key.pem", f"{folder}/cert.pem"]
    subprocess.run(
        ["openssl", *asked.split(), "-addext", names, "-keyout", made[0], "-out", made[1]],
        check=True,
        capture_output=True,
    )
    return folder


@clients
@pytest.mark.filterwarnings("ignore:Unverified HTTPS")
@pytest.mark.parametrize("how", ["option", "variable", "off", "untrusted"])
def test_tls(certificate: Path, client: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    own = str(certificate / "cert.pem")
    if how == "variable":
        monkeypatch.setenv("AWS_CA_BUNDLE", own)
    verify: bool | str = {"option": own, "off": False}.get(how, True)
    with FaultServer({"a": b"abc"}, tls=context) as server:
        options = S3Options(
            endpoint_url=server.url, region="us-east-1", unsigned=True, client=client, verify=verify, backoff=0.01
        )
        if how != "untrusted":
            assert S3Store(options).get("s3://bkt/a") == b"abc"
            return
        with pytest.raises(StoreError, match=r"no trusted TLS connection.*verify= or AWS_CA_BUNDLE"):
            S3Store(options).get("s3://bkt/a")
        assert server.requests == []


@clients
@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_bundle_that_is_not_there(
    server: FaultServer, client: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem")
    options = S3Options(
        endpoint_url=server.url, region="x", client=client, verify="/nowhere/ca.pem" if how == "option" else True
    )
    with pytest.raises(StoreError, match=r"CA bundle /nowhere/ca\.pem is not there: verify= or AWS_CA_BUNDLE"):
        S3Store(options).get("s3://bkt/a")


def test_a_cut_answer_to_the_end_of_an_upload_is_no_success(server: FaultServer) -> None:
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", backoff=0.01))
    server.script("m#complete", Step(cut=0))
    assert store.put("s3://bkt/m", bytes(17 << 20)) == server.etag("m")
    assert (len(server.seen("m#complete")), len(server.seen("m"))) == (2, 1)
