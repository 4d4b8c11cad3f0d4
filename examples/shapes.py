"""A data set for the examples: drawn shapes as JPEGs with a class number, in tar shards, uploaded to an S3 store."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle", "cross")
SIDE = 32


def draw_shape(kind: str, draw: random.Random) -> bytes:
    """Return a JPEG of one shape: random place, size and colours, with some noise in the background."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(draw.randrange(90) for _ in range(3)))
    canvas = ImageDraw.Draw(image)
    for _ in range(8):
        x, y = draw.randrange(SIDE), draw.randrange(SIDE)
        canvas.point((x, y), tuple(draw.randrange(256) for _ in range(3)))
    radius = draw.randint(7, 11)
    x, y = draw.randint(radius, SIDE - radius), draw.randint(radius, SIDE - radius)
    colour: Any = tuple(draw.randint(130, 255) for _ in range(3))
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        canvas.ellipse(box, fill=colour)
    elif kind == "square":
        canvas.rectangle(box, fill=colour)
    elif kind == "triangle":
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    else:
        width = max(3, radius // 2)
        canvas.line((x - radius, y, x + radius, y), fill=colour, width=width)
        canvas.line((x, y - radius, x, y + radius), fill=colour, width=width)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_shard(path: Path, numbers: range, seed: int) -> None:
    """Write samples `NUMBER.jpg` and `NUMBER.cls` to a tar file."""
    draw = random.Random(seed)
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            label = number % len(CLASSES)
            for extension, data in (("jpg", draw_shape(CLASSES[label], draw)), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def upload_shards(bucket: str, folder: Path, samples: int, shards: int) -> int:
    """Make `shards` training shards and one held-out shard, upload them below `bucket`, return the bytes sent."""
    import boto3
    from botocore.exceptions import ClientError

    name, prefix = urlsplit(bucket).netloc, urlsplit(bucket).path.strip("/")
    client = boto3.client("s3")
    try:
        client.head_bucket(Bucket=name)
    except ClientError:
        client.create_bucket(Bucket=name)
    each = -(-samples // shards)
    parts = [
        (f"train/{place:03d}.tar", range(place * each, min(samples, (place + 1) * each))) for place in range(shards)
    ]
    sent = 0
    for place, (key, numbers) in enumerate([*parts, ("val/000.tar", range(400))]):
        path = folder / key.replace("/", "-")
        write_shard(path, numbers, seed=place)
        client.upload_file(str(path), name, f"{prefix}/{key}" if prefix else key)
        sent += path.stat().st_size
        path.unlink()
    return sent
