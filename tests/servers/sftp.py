"""OpenSSH's sshd as a server for files: on loopback, with keys of its own, for one user and sftp alone."""

from __future__ import annotations

import getpass
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.servers.packages import program
from tests.servers.process import ServerProcess, accepts, free_port
from tests.servers.server import Server

_CONFIGURATION = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PidFile none
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin prohibit-password
StrictModes no
AllowTcpForwarding no
X11Forwarding no
MaxStartups 1000
MaxSessions 1000
Subsystem sftp internal-sftp
ForceCommand internal-sftp
LogLevel ERROR
"""
_PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Where sshd keeps its unprivileged half, if root runs it."""


class SftpServer(Server):
    """A folder behind sshd, looked at past it: its files are files of this machine. Its program: `sshd`."""

    def __init__(self, folder: Path, port: int) -> None:
        """Remember where it is."""
        self.name = "sftp"
        said = subprocess.run([program("sshd") or "sshd", "-V"], capture_output=True, text=True)
        self.version = (said.stdout + said.stderr).strip().splitlines()[-1].split(",")[0].removeprefix("OpenSSH_")
        self.host, self.port, self.user = "127.0.0.1", port, getpass.getuser()
        self.key_file, self.host_key_file = folder / "client_key", folder / "host_key.pub"
        self.data = folder / "data"
        self.root_url = f"sftp://{self.host}:{port}{self.data}"
        self.variables = {}
        command = [program("sshd") or "sshd", "-D", "-e", "-f", folder / "sshd_config"]
        self.processes = {"sshd": ServerProcess(command, folder / "sshd.log", lambda: accepts(port))}

    def keys(self, url: str) -> list[str]:
        """Return all keys under the URL of a folder, sorted, without that folder."""
        root = self.data if url == self.root_url else self.data / self.name_of(url)
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def read(self, url: str) -> bytes:
        """Return the content of an object."""
        return (self.data / self.name_of(url)).read_bytes()

    def write(self, url: str, data: bytes) -> None:
        """Store an object, whatever is there."""
        path = self.data / self.name_of(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def remove(self, url: str) -> None:
        """Remove an object."""
        (self.data / self.name_of(url)).unlink()


@contextmanager
def sftp(folder: Path | None = None) -> Iterator[SftpServer]:
    """Run sshd for the length of a block.

    Args:
        folder: Where keys and files are; None: a temporary folder that is removed.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sftp-")))
        port = free_port()
        (folder / "data").mkdir()
        for name in ("host_key", "client_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name], check=True)
        (folder / "sshd_config").write_text(_CONFIGURATION.format(folder=folder, port=port))
        if os.geteuid() == 0:
            _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        server = SftpServer(folder, port)
        stack.callback(server.kill, "sshd")
        server.restart("sshd")
        yield server
