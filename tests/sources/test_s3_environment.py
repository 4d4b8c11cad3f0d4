"""The variables that other S3 tools obey, with both clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_server import FaultServer, Step
from loading import loader_of

from pipes.errors import StoreConnectionError
from pipes.iter import S3FileLister, S3FileLoader
from pipes.sources.s3_client import S3Store
from pipes.sources.s3_options import S3Options

pytestmark = pytest.mark.parametrize("client", ["boto3", "obstore"])


@pytest.fixture
def server(shared_server: FaultServer) -> FaultServer:
    shared_server.reset({"a": b"abc"})
    return shared_server


def signed(server: FaultServer, key: str) -> set[str]:
    """Access key and region in the requests for `key`, as "KEY/region"."""
    found = [{name.lower(): value for name, value in request.headers.items()} for request in server.seen(key)]
    scopes = [each["authorization"].partition("Credential=")[2].split("/") for each in found]
    return {f"{scope[0]}/{scope[2]}" for scope in scopes}


@pytest.fixture
def profiles(server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(
        f"[profile lab]\nregion = eu-lab-1\nendpoint_url = {server.url}\n"
        f"[profile other]\nregion = eu-other-1\nendpoint_url = {server.url}\nmax_attempts = 9\n"
    )
    credentials.write_text(
        "[lab]\naws_access_key_id = LAB\naws_secret_access_key = s1\n"
        "[other]\naws_access_key_id = OTHER\naws_secret_access_key = s2\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "lab")


def read(pair: Any) -> bytes:
    return pair[1].read()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("profiles")
def test_a_profile_gives_keys_region_and_endpoint(
    server: FaultServer, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert S3Store(S3Options(client=client)).get("s3://bkt/a") == b"abc"
    assert signed(server, "a") == {"LAB/eu-lab-1"}
    server.requests.clear()
    assert S3Store(S3Options(client=client, profile="other")).get("s3://bkt/a") == b"abc"
    assert signed(server, "a") == {"OTHER/eu-other-1"}
    server.requests.clear()
    monkeypatch.setenv("AWS_REGION", "eu-test-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3")
    assert S3Store(S3Options(client=client)).get("s3://bkt/a") == b"abc"
    assert signed(server, "a") == {"ENV/eu-test-1"}, "keys and region of the environment come first"


@pytest.mark.usefixtures("profiles")
def test_a_profile_reaches_workers(server: FaultServer, client: str) -> None:
    options = S3Options(client=client)
    pipe = S3FileLister("s3://bkt/", options=options).sharding_filter().load_files_by_s3(options=options).map(read)
    with loader_of(pipe, 2) as loader:
        assert list(loader) == [b"abc"]
    assert signed(server, "a") == {"LAB/eu-lab-1"}


def test_a_profile_that_is_not_there_is_named(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(ValueError, match="profile 'nowhere' is in none of the AWS configuration files"):
        S3Store(S3Options(client=client)).get("s3://bkt/a")


def test_the_number_of_attempts(server: FaultServer, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.script("a", Step(status=500, forever=True))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("AWS_RETRY_MODE", "adaptive")
    for attempts, asked in ((None, 2), (3, 3)):
        server.requests.clear()
        options = S3Options(endpoint_url=server.url, unsigned=True, client=client, attempts=attempts, backoff=0.01)
        with pytest.raises(StoreConnectionError, match=f"gave up after {asked} attempts"):
            S3Store(options).get("s3://bkt/a")
        assert len(server.seen("a")) == asked


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5"])
def test_a_number_of_attempts_that_is_none(client: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", text)
    with pytest.raises(ValueError, match=f"AWS_MAX_ATTEMPTS='{text}'"):
        S3FileLoader([], options=S3Options(client=client))
    S3FileLoader([], options=S3Options(client=client, attempts=1))


def test_a_proxy(server: FaultServer, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, server.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    options = S3Options(endpoint_url="http://store.example:9000", unsigned=True, client=client)
    assert S3Store(options).get("s3://bkt/a") == b"abc"
    (request,) = server.seen("a")
    assert request.target == "http://store.example:9000/bkt/a"
