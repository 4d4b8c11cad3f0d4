"""Objects for a test's S3 server, among them those with the hard keys of case D1."""

from __future__ import annotations

from collections.abc import Mapping

import boto3

HARD_KEYS = [
    "in",
    "in/",
    "in//dbl.txt",
    "in/a b.txt",
    "in/a%2Bb.txt",
    "in/a+b.txt",
    "in/e\u0301.txt",
    "in/h#h.txt",
    "in/q?x=1&y.txt",
    "in/sub/",
    "in/zero.bin",
    "in/\u00e9.txt",
    "in/\U0001f600.txt",
    "input/not-mine.txt",
]


def body_of(key: str) -> bytes:
    return b"" if key.endswith(("/", "zero.bin")) else key.encode()


def put_objects(endpoint_url: str, bucket: str, bodies: Mapping[str, bytes]) -> None:
    """Make the bucket and fill it."""
    client = boto3.client("s3", endpoint_url=endpoint_url)
    try:
        client.create_bucket(Bucket=bucket)
        for key, body in bodies.items():
            client.put_object(Bucket=bucket, Key=key, Body=body)
    finally:
        client.close()
