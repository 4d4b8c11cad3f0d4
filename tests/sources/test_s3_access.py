"""Wrong regions, expired credentials, clocks that differ, TLS, against a server that counts requests."""

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_server import LIST, FaultServer, Step

from pipes.errors import StoreError, StorePermissionError
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


@clients
def test_a_clock_that_is_wrong(server: FaultServer, client: str) -> None:
    server.script("a", Step(status=403, code="RequestTimeTooSkewed"))
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", client=client))
    with pytest.raises(StorePermissionError, match=r"RequestTimeTooSkewed.*set this machine's clock"):
        store.get("s3://bkt/a")
    assert len(server.seen("a")) == 1


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


def test_a_cut_answer_to_the_end_of_an_upload_is_no_success(server: FaultServer) -> None:
    store = S3Store(S3Options(endpoint_url=server.url, region="us-east-1", backoff=0.01))
    server.script("m#complete", Step(cut=0))
    assert store.put("s3://bkt/m", bytes(17 << 20)) == server.etag("m")
    assert (len(server.seen("m#complete")), len(server.seen("m"))) == (2, 1)
