import pickle

import pytest

from pipes.sources.s3_options import S3Options

SECRETS = {"access_key": "AKIA-VISIBLE", "secret_key": "hush-hush", "session_token": "token-token"}


def test_repr_shows_what_was_set_and_no_secret() -> None:
    text = repr(S3Options(endpoint_url="http://me:pass@host:1", attempts=2, client=object(), **SECRETS))
    assert text == (
        "S3Options(endpoint_url='http://***@host:1', access_key='***', secret_key='***', session_token='***', "
        "client='<boto3 client>', attempts=2)"
    )


def test_pickles() -> None:
    options = S3Options(region="eu-west-1", verify="/ca.pem", **SECRETS)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"client": "s3fs"}, "choose one of auto, obstore, boto3"),
        ({"endpoint_url": "host:9000"}, "should begin with http"),
        ({"access_key": "a"}, "go together"),
        ({"session_token": "a"}, "needs access_key"),
        ({"attempts": 0}, "at least one request"),
        ({"verify": "crc"}, "verify is about certificates.* checksum=True checks objects"),
        ({"verify": "CRC32C"}, "checksum=True checks objects"),
        ({"deadline": 0}, "positive number of seconds"),
        ({"read_timeout": -1}, "positive number of seconds"),
        ({"backoff": float("nan")}, "positive number of seconds"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        S3Options(**settings)  # type: ignore[arg-type]


def test_a_password_in_a_bad_endpoint_is_not_shown() -> None:
    with pytest.raises(ValueError, match="should begin with http") as caught:
        S3Options(endpoint_url="ftp://me:pass@host")
    assert "pass" not in str(caught.value).replace("pass a", "")


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        ({"S3_ENDPOINT_URL": "http://old:1"}, "http://old:1"),
        ({"S3_ENDPOINT_URL": "old:1"}, "https://old:1"),
        ({"S3_ENDPOINT_URL": "old:1", "S3_USE_HTTPS": "0"}, "http://old:1"),
        ({"S3_ENDPOINT_URL": "http://old:1", "AWS_ENDPOINT_URL": "http://new:1"}, None),
        ({"S3_ENDPOINT_URL": "http://old:1", "AWS_ENDPOINT_URL_S3": "http://new:1"}, None),
    ],
)
def test_endpoint_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], endpoint: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert S3Options().resolved_endpoint() == endpoint
    assert S3Options(endpoint_url="http://own:1").resolved_endpoint() == "http://own:1"


def test_region_and_certificates_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert S3Options().resolved_region() is None
    assert S3Options().resolved_verify() is None
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("S3_VERIFY_SSL", "0")
    assert S3Options().resolved_region() == "eu-west-1"
    assert S3Options(region="us-west-2").resolved_region() == "us-west-2"
    assert S3Options().resolved_verify() is False
    assert S3Options(verify="/ca.pem").resolved_verify() == "/ca.pem"
