"""`rclone serve s3`: a server that speaks S3 over a folder, and takes every create, whatever the condition says."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.servers.packages import RCLONE
from tests.servers.process import ServerProcess, accepts, free_port
from tests.servers.server import BUCKET, S3Server

ACCESS_KEY, SECRET_KEY = "CANARYRCLONEACCESSKE", "canary-rclone-secret-canary-rclone-secre"


class RcloneServer(S3Server):
    """A folder with one bucket. Its program: `rclone`."""

    def __init__(self, folder: Path, port: int) -> None:
        """Remember where it is."""
        super().__init__(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
        self.name = "rclone"
        said = subprocess.run([RCLONE, "version"], capture_output=True, text=True, check=True).stdout
        self.version = said.split()[1].removeprefix("v")
        command = [
            RCLONE, "serve", "s3", folder / "data", "--addr", f"127.0.0.1:{port}", "--auth-key",
            f"{ACCESS_KEY},{SECRET_KEY}", "--config", folder / "rclone.conf", "--cache-dir", folder / "cache",
        ]  # fmt: skip
        self.processes = {"rclone": ServerProcess(command, folder / "rclone.log", lambda: accepts(port))}


@contextmanager
def rclone(folder: Path | None = None) -> Iterator[RcloneServer]:
    """Run `rclone serve s3` for the length of a block.

    Args:
        folder: Where it writes; None: a temporary folder that is removed.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rclone-")))
        (folder / "data" / BUCKET).mkdir(parents=True)
        (folder / "rclone.conf").write_text("")
        server = RcloneServer(folder, free_port())
        stack.callback(server.kill, "rclone")
        server.restart("rclone")
        yield server
