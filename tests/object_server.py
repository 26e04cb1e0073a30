"""A real server that speaks S3, for the tests of one session: on loopback, gone with the process that began it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.settings import ObjectSettings, Settings

_SECONDS_MAX = 120
_PR_SET_PDEATHSIG = 1
ACCESS_KEY, SECRET_KEY = "AKIACANARYCANARYAAAA", "canary/secret/canary/secret/canary/secre"
BUCKET = "holdfast-tests"
VARIABLES = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
"""What a process needs besides the endpoint."""


class ObjectServer:
    """The server, and one bucket in it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that finds the server by them alone."""
        return {**VARIABLES, "AWS_ENDPOINT_URL": self.endpoint}

    def settings(self, **changes: object) -> Settings:
        """Return settings that name the server."""
        return Settings(object_store=ObjectSettings(endpoint=self.endpoint, **changes))  # type: ignore[arg-type]

    def new_url(self) -> str:
        """Return the URL of a folder that nobody has used."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def client(self):  # type: ignore[no-untyped-def]
        """Return a client of boto3, to look at what Holdfast left."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )

    def keys(self, url: str) -> list[str]:
        """Return all keys under a URL, by boto3."""
        prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(each["Key"].removeprefix(prefix) for page in pages for each in page.get("Contents", ()))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


_RUN = f"""
import ctypes, runpy, signal
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
runpy.run_module("ministack", run_name="__main__")
"""
"""The server ends with the process that began it, however that ends."""


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/_ministack/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def object_server(folder: Path) -> Iterator[ObjectServer]:
    """Run a server for the length of a block; what it writes goes to a folder."""
    for _ in range(5):
        port = _free_port()
        # It knows the keys that it is started with, and checks them where a URL is signed.
        environment = os.environ | {
            **VARIABLES,
            "GATEWAY_PORT": str(port),
            "BIND_HOST": "127.0.0.1",
            "MINISTACK_HOST": "127.0.0.1",
            "IOT_MTLS_ENABLED": "0",
            "SFTP_ENABLED": "0",
            "STATE_DIR": str(folder / "state"),
            "S3_DATA_DIR": str(folder / "data"),
            "TMPDIR": str(folder),
        }
        with open(folder / "server.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=folder,
            )
        endpoint = f"http://127.0.0.1:{port}"
        try:
            limit = time.monotonic() + _SECONDS_MAX
            while process.poll() is None and not _answers(endpoint):
                assert time.monotonic() < limit, (folder / "server.log").read_text()[-2000:]
                time.sleep(0.05)
            if process.poll() is not None:
                continue  # Another process took the port meanwhile.
            server = ObjectServer(endpoint)
            server.client().create_bucket(Bucket=BUCKET)
            yield server
            return
        finally:
            process.kill()
            process.wait()
    raise AssertionError((folder / "server.log").read_text()[-2000:])
