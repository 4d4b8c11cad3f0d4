import copy
import pickle

import pytest

from pipes.sources.s3_names import S3Object, S3Url, split_s3_url
from pipes.sources.s3_obstore import can_name


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/k", ("b", "k")),
        ("s3://b//k/", ("b", "/k/")),
        ("s3://b/q?x=1&y#h%2B+ é", ("b", "q?x=1&y#h%2B+ é")),
    ],
)
def test_names_are_taken_literally(url: str, expected: tuple[str, str]) -> None:
    assert split_s3_url(url) == expected
    assert split_s3_url(url, prefix=True) == expected


@pytest.mark.parametrize("url", ["s3://b", "s3://b/"])
def test_a_bucket_alone_is_a_prefix_and_no_object(url: str) -> None:
    assert split_s3_url(url, prefix=True) == ("b", "")
    with pytest.raises(ValueError, match="names a bucket and no object"):
        split_s3_url(url)


@pytest.mark.parametrize("url", ["", "b/k", "/b/k", "http://b/k", "S3://b/k", "s3:/b/k", "s3://", "s3:///k"])
def test_bad_names_are_named(url: str) -> None:
    with pytest.raises(ValueError, match="should look like 's3://bucket/key'") as caught:
        split_s3_url(url, prefix=True)
    assert repr(url) in str(caught.value)


def test_a_name_that_is_no_string() -> None:
    with pytest.raises(TypeError, match="not int: 3"):
        split_s3_url(3)  # type: ignore[arg-type]


def test_s3_url_is_its_string_and_keeps_size_and_etag() -> None:
    url = S3Object("b", "a/é.txt", 7, '"t"', None).url
    assert url == "s3://b/a/é.txt"
    assert hash(url) == hash("s3://b/a/é.txt")
    assert {url: 1}["s3://b/a/é.txt"] == 1
    for again in (pickle.loads(pickle.dumps(url)), copy.copy(url), copy.deepcopy([url])[0]):
        assert type(again) is S3Url
        assert (again, again.size, again.etag) == (url, 7, '"t"')
    # It is never changed, and lists of many thousands are copied.
    assert copy.deepcopy(url) is url


@pytest.mark.parametrize(
    "point",
    [
        "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine",
        "arn:aws:s3:eu-west-1:123456789012:accesspoint:mine",
        "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
        "arn:aws-cn:s3-object-lambda:cn-north-1:123456789012:accesspoint/mine",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01/accesspoint/mine",
    ],
)
def test_an_access_point_stands_for_a_bucket(point: str) -> None:
    assert split_s3_url(f"s3://{point}/in/a b.txt") == (point, "in/a b.txt")
    assert split_s3_url(f"s3://{point}", prefix=True) == split_s3_url(f"s3://{point}/", prefix=True) == (point, "")
    assert not can_name(point, "k")
    url = S3Object(point, "in/a", 1, '"t"', None).url
    assert split_s3_url(url) == (point, "in/a")
    with pytest.raises(ValueError, match="no object"):
        split_s3_url(f"s3://{point}/")


@pytest.mark.parametrize("key", ["a", "a/b c+d%2B?x#y.txt", "é/😀", ".a", "a/...", "a/.b", "a:b"])
def test_obstore_may_have_plain_keys(key: str) -> None:
    assert can_name("b", key)


@pytest.mark.parametrize("key", ["a/", "/a", "a//b", ".", "..", "a/./b", "../b", "a/..", "a\x01b", "a\nb", "a\x7f", ""])
def test_obstore_may_not_have_keys_that_it_changes_or_refuses(key: str) -> None:
    assert not can_name("b", key)
