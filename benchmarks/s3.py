"""Reading from an S3 store: listing, small objects at 16 requests at a time, tar shards of 64 MiB, a slow network.

nginx serves prepared pages and objects on the loopback (no signatures are checked), so the clients are what is
measured. Each contender has its client, or its pipe, made before; it is drained in turn in every round, and its own CPU
time stands beside. webdataset reads S3 its usual way, `pipe:curl`; torchdata's way is one boto3 body after another,
parsed by `tarfile`. The slow network is a small server that waits 20 ms before each answer, so 16 requests at a time
can bring 800 objects a second.

s3fs asks for a botocore older than the newest boto3's, so the extra `bench` leaves it out: run this in an environment
of its own (`pip install s3fs boto3 obstore webdataset s3torchconnector`) to have it beside the others.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from report import Row, arguments, interleaved, median, row, show, spread

from pipes.formats.webdataset import group_samples
from pipes.iter import IterableWrapper, S3FileLister
from pipes.sources.s3_names import S3Url

CONCURRENCY = 16
KEYS, PAGE = 10_000, 1000
SIZE = 100_000
LATENCY = 0.020
_NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

for name, value in (("ACCESS_KEY_ID", "AKBENCH"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
    os.environ[f"AWS_{name}"] = value
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_listing(folder: Path) -> None:
    """The pages of a listing, each under the name of the token that asks for it."""
    for page in range(KEYS // PAGE):
        rows = "".join(
            f"<Contents><Key>list/{number:08d}.bin</Key><LastModified>2026-12-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{hashlib.md5(str(number).encode()).hexdigest()}&quot;</ETag><Size>{SIZE}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for number in range(page * PAGE, (page + 1) * PAGE)
        )
        more = page + 1 < KEYS // PAGE
        token = f"<NextContinuationToken>t{page + 1}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>bkt</Name><Prefix>list/</Prefix><KeyCount>{PAGE}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
            f"<EncodingType>url</EncodingType><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
            "</ListBucketResult>"
        )
        (folder / f"page-{f't{page}' if page else ''}").write_text(text)


def write_shard(path: Path, size: int) -> int:
    """A tar of 100 KB samples, about `size` bytes; how many samples it has."""
    draw, count = random.Random(0), size // (SIZE + 2048)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(count):
            for extension, data in (("jpg", draw.randbytes(SIZE)), ("cls", str(number % 10).encode())):
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return count


@contextmanager
def nginx(root: Path) -> Iterator[str]:
    """Serve `root` as a store with one bucket; gives its endpoint."""
    port, run = free_port(), root / "run"
    run.mkdir()
    paths = "".join(f"{kind}_temp_path {run}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (run / "conf").write_text(
        f"daemon off; worker_processes 1; pid {run}/pid; error_log {run}/error;\nevents {{ worker_connections 512; }}\n"
        f"http {{ access_log off; sendfile on; tcp_nopush off; tcp_nodelay on; keepalive_requests 10000000; {paths}\n"
        f"default_type application/octet-stream; server {{ listen 127.0.0.1:{port}; root {root};\n"
        "location ~ ^/bkt/?$ { default_type application/xml; "
        "rewrite ^ /pages/page-$arg_continuation-token break; } } }\n".replace(
            "$arg_continuation-token", "$page"
        ).replace("location", "set $page ''; if ($args ~ continuation-token=(t[0-9]+)) { set $page $1; }\nlocation", 1)
    )
    server = subprocess.Popen([str(_NGINX), "-p", str(run), "-c", str(run / "conf")], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = bytes(SIZE)
    head = f'HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\nETag: "e"\r\nLast-Modified: {"Tue, 01 Dec 2026 00:00:00 GMT"}'
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(LATENCY)
            writer.write(head.encode() + b"\r\n\r\n" + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", port, backlog=256)
    await server.serve_forever()


@contextmanager
def slow_server() -> Iterator[str]:
    """A store whose every answer, an object of `SIZE` bytes, begins after `LATENCY`; a process of its own."""
    port = free_port()
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def boto_client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=64, s3={"addressing_style": "path"})
    return boto3.Session().client("s3", endpoint_url=endpoint, config=config)


def listers(endpoint: str) -> dict[str, Callable[[], int]]:
    client = boto_client(endpoint)

    def boto3_pages() -> int:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket="bkt", Prefix="list/")
        return sum(len(page["Contents"]) for page in pages)

    pipe = S3FileLister("s3://bkt/list/", endpoint_url=endpoint)
    found: dict[str, Callable[[], int]] = {
        "pipes": lambda: sum(1 for _ in pipe),
        "boto3": boto3_pages,
    }
    if find_spec("s3fs"):
        import s3fs

        found["s3fs"] = lambda: len(
            s3fs.S3FileSystem(client_kwargs={"endpoint_url": endpoint}, skip_instance_cache=True).find("bkt/list/")
        )
    return found


def small_readers(endpoint: str, keys: list[str]) -> dict[str, Callable[[], int]]:
    client = boto_client(endpoint)
    names = [S3Url(f"s3://bkt/{key}", SIZE) for key in keys]

    pipe = IterableWrapper(names).load_files_by_s3(endpoint_url=endpoint, concurrency=CONCURRENCY)

    def in_threads(get: Callable[[str], int]) -> int:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return sum(pool.map(get, keys))

    found: dict[str, Callable[[], int]] = {
        "pipes": lambda: sum(len(stream.read()) for _, stream in pipe),
        "boto3 threads": lambda: in_threads(lambda key: len(client.get_object(Bucket="bkt", Key=key)["Body"].read())),
    }
    if find_spec("s3fs"):
        import s3fs

        files = s3fs.S3FileSystem(client_kwargs={"endpoint_url": endpoint})
        found["s3fs"] = lambda: sum(
            map(len, files.cat([f"bkt/{key}" for key in keys], batch_size=CONCURRENCY).values())
        )
    if find_spec("s3torchconnectorclient"):
        from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

        connector = MountpointS3Client(
            "us-east-1", endpoint=endpoint, force_path_style=True, throughput_target_gbps=10.0
        )
        found["s3torchconnector"] = lambda: in_threads(lambda key: sum(map(len, connector.get_object("bkt", key))))
    import obstore
    from obstore.store import S3Store

    store = S3Store("bkt", endpoint=endpoint, client_options={"allow_http": True})
    found["bare obstore loop"] = lambda: in_threads(lambda key: len(obstore.get(store, key).bytes()))
    return found


def shard_readers(endpoint: str, keys: list[str]) -> dict[str, Callable[[], int]]:
    client = boto_client(endpoint)
    names = [f"s3://bkt/{key}" for key in keys]

    pipe = IterableWrapper(names).load_files_by_s3(endpoint_url=endpoint).load_from_tar().webdataset()

    def ours() -> int:
        return sum(len(sample["jpg"].read()) for sample in pipe)

    def torchdata_style() -> int:
        total = 0
        for key in keys:
            body = client.get_object(Bucket="bkt", Key=key)["Body"]
            with tarfile.open(fileobj=body, mode="r|*") as archive:
                members = ((each.name, archive.extractfile(each).read()) for each in archive)  # type: ignore[union-attr]
                total += sum(len(sample["jpg"]) for sample in group_samples(members))
        return total

    found: dict[str, Callable[[], int]] = {"pipes": ours, "boto3 body + tarfile (torchdata's way)": torchdata_style}
    if find_spec("webdataset") and shutil.which("curl"):
        import webdataset

        urls = [f"pipe:curl -s -f {endpoint}/bkt/{key}" for key in keys]
        found["webdataset pipe:curl"] = lambda: sum(
            len(sample["jpg"]) for sample in webdataset.WebDataset(urls, shardshuffle=False)
        )
    return found


def cpu_seconds() -> float:
    """User and system time of this process and of the programs it started and that have ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, who))


def measure(
    case: str, contenders: dict[str, Callable[[], int]], amount: float, unit: str, expected: int, rounds: int,
    targets: dict[str, float], per: float,
) -> tuple[list[Row], str]:  # fmt: skip
    """The rows of one case, and its spread; `per` is what the CPU time is divided by (GB or thousands of keys)."""
    spent: dict[str, list[float]] = {name: [] for name in contenders}

    def timed(name: str) -> None:
        before = cpu_seconds()
        found = contenders[name]()
        spent[name].append(cpu_seconds() - before)
        assert found == expected, f"{name}: {found} and not {expected}"

    seconds = interleaved({name: lambda name=name: timed(name) for name in contenders}, rounds)
    rate = {name: amount / median(values) for name, values in seconds.items()}
    cpu = {name: median(values[1:]) / per for name, values in spent.items()}
    rows = []
    for peer in contenders:
        if peer != "pipes":
            note = f"CPU {cpu['pipes']:.2f} against {cpu[peer]:.2f} s, {cpu[peer] / cpu['pipes']:.1f}x"
            rows.append(
                row(
                    "s3",
                    case,
                    peer,
                    rate["pipes"],
                    rate[peer],
                    unit,
                    more_is_better=True,
                    target=targets.get(peer),
                    note=note,
                )
            )
    return rows, f"{case}: " + ", ".join(f"{name} {spread(values)}" for name, values in seconds.items())


def slow_network(endpoint: str, count: int, rounds: int) -> tuple[list[Row], str]:
    """Against what the latency alone allows."""
    names = [S3Url(f"s3://bkt/slow/{number}", SIZE) for number in range(count)]
    pipe = IterableWrapper(names).load_files_by_s3(endpoint_url=endpoint, concurrency=CONCURRENCY)

    def ours() -> None:
        assert sum(len(stream.read()) for _, stream in pipe) == count * SIZE

    seconds = interleaved({"pipes": ours}, rounds)
    allowed = CONCURRENCY / LATENCY
    case = f"{count:,} x 100 KB, {LATENCY * 1000:.0f} ms a request"
    peer = "what the latency allows"
    ours_rate = count / median(seconds["pipes"])
    return [row("s3", case, peer, ours_rate, allowed, "objects/s", more_is_better=True, target=0.8)], case


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--objects", type=int, default=2000, help="small objects (2000)")
    parser.add_argument("--shards", type=int, default=4, help="tar shards (4)")
    parser.add_argument("--shard-mib", type=int, default=64, help="MiB a shard (64)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)


def main() -> None:
    options = arguments(__doc__ or "", rounds=5, extend=extra)
    if options.serve:
        asyncio.run(_serve(options.serve))
        return
    if _NGINX is None:
        sys.exit("nginx is not installed: it serves the objects here (Debian: nginx-light)")
    rows: list[Row] = []
    notes = [f"{peer} is not installed: pip install {peer}" for peer in
             ("s3fs", "s3torchconnector", "webdataset") if find_spec(peer) is None]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        bucket = root / "bkt"
        (root / "pages").mkdir()
        write_listing(root / "pages")
        (bucket / "small").mkdir(parents=True)
        body = random.Random(1).randbytes(SIZE)
        small = [f"small/{number:05d}" for number in range(options.objects)]
        for key in small:
            (bucket / key).write_bytes(body)
        shards = [f"{number}.tar" for number in range(options.shards)]
        samples = write_shard(bucket / shards[0], options.shard_mib << 20)
        for shard in shards[1:]:
            shutil.copy(bucket / shards[0], bucket / shard)
        with nginx(root) as endpoint:
            gigabytes = options.objects * SIZE / 1e9
            cases = [
                (f"list {KEYS:,} keys", listers(endpoint), KEYS, "keys/s", KEYS, {"boto3": 10.0, "s3fs": 10.0}, 1.0),
                (f"{options.objects:,} x 100 KB, CPU per GB", small_readers(endpoint, small), options.objects,
                 "objects/s", options.objects * SIZE,
                 {"boto3 threads": 5.0, "s3fs": 8.0, "s3torchconnector": 1.0, "bare obstore loop": 0.6}, gigabytes),
                (f"{options.shards} x {options.shard_mib} MiB of tar, CPU per GB", shard_readers(endpoint, shards),
                 options.shards * options.shard_mib * 1.048576, "MB/s", options.shards * samples * SIZE,
                 {"boto3 body + tarfile (torchdata's way)": 1.0, "webdataset pipe:curl": 3.0},
                 options.shards * options.shard_mib * 1.048576e-3),
            ]  # fmt: skip
            for case, contenders, amount, unit, expected, targets, per in cases:
                more, text = measure(case, contenders, amount, unit, expected, options.rounds, targets, per)
                rows += more
                notes.append(f"spread, {text}")
        with slow_server() as endpoint:
            more, _ = slow_network(endpoint, options.objects, options.rounds)
            rows += more
    show(rows, title="Reading from S3", as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
