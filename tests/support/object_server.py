"""ministack, a real server that speaks S3, for the tests of one session: on loopback, gone with the process that began
it."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tests.servers.process import ServerProcess, free_port
from tests.servers.server import BUCKET, S3Server

__all__ = ["ACCESS_KEY", "BUCKET", "SECRET_KEY", "VARIABLES", "ObjectServer", "object_server"]

ACCESS_KEY, SECRET_KEY = "AKIACANARYCANARYAAAA", "canary/secret/canary/secret/canary/secre"
VARIABLES = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
"""What a process needs besides the endpoint."""

PROGRAM = "ministack"
"""Its only program, for `kill` and `restart`."""

_TRIES = 5


class ObjectServer(S3Server):
    """The server, and one bucket in it."""

    def __init__(self, folder: Path, port: int, *, keeps_data: bool = False) -> None:
        """Remember where it is.

        Args:
            folder: Gets what it writes.
            port: Its port.
            keeps_data: Whether it writes each object to a file before it answers, so that it may be killed.
        """
        super().__init__(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
        self.name, self.version = "ministack", version("ministack")
        # It knows the keys that it is started with, and checks them where a URL is signed.
        environment = {
            **VARIABLES,
            "GATEWAY_PORT": str(port),
            "BIND_HOST": "127.0.0.1",
            "MINISTACK_HOST": "127.0.0.1",
            "IOT_MTLS_ENABLED": "0",
            "SFTP_ENABLED": "0",
            "S3_PERSIST": str(int(keeps_data)),
            "STATE_DIR": str(folder / "state"),
            "S3_DATA_DIR": str(folder / "data"),
            "TMPDIR": str(folder),
        }
        command = (sys.executable, "-m", "ministack")
        self.processes = {PROGRAM: ServerProcess(command, folder / "server.log", self._answers, environment)}

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/_ministack/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@contextmanager
def object_server(folder: Path, *, keeps_data: bool = False) -> Iterator[ObjectServer]:
    """Run a server for the length of a block; what it writes goes to a folder."""
    for turn in range(_TRIES):
        server = ObjectServer(folder, free_port(), keeps_data=keeps_data)
        try:
            try:
                server.restart(PROGRAM)
            except AssertionError:
                if turn == _TRIES - 1:
                    raise
                continue  # Another process took the port meanwhile.
            server.client().create_bucket(Bucket=BUCKET)
            yield server
            return
        finally:
            server.kill(PROGRAM)
