"""Ceph: a monitor, an OSD and a RADOS Gateway that speaks S3 over plain HTTP and over TLS, without systemd or root."""

from __future__ import annotations

import re
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from tests.servers.process import SECONDS_MAX, ServerProcess, accepts, free_port
from tests.servers.server import BUCKET, TLS, S3Server

ACCESS_KEY, SECRET_KEY = "CANARYCEPHACCESSKEYA", "canary-ceph-secret-canary-ceph-secret-ca"
_GIB = 1 << 30

_CAPABILITIES = {
    "mon.": ["--cap", "mon", "allow *"],
    "client.admin": ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"],
    "osd.0": ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
    "client.rgw.a": ["--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"],
}

_CONFIGURATION = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{mon_port}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = true
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
run_dir = {folder}
admin_socket =
pid_file =
keyring = {folder}/keyring
log_file = {folder}/$name.log
crash_dir = {folder}
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_max_pg_per_osd = 2000
mon_data_avail_crit = 1
[mon.a]
mon_data = {folder}/mon.a
[osd.0]
osd_data = {folder}/osd.0
osd_objectstore = {objectstore}
memstore_device_bytes = {device_bytes}
bluestore_block_size = {device_bytes}
osd_memory_target = 939524096
[client.rgw.a]
rgw_frontends = beast endpoint=127.0.0.1:{port} ssl_endpoint=127.0.0.1:{tls_port} ssl_certificate={certificate}
rgw_thread_pool_size = 64
rgw_enable_usage_log = false
rgw_dynamic_resharding = false
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 1
"""
# The garbage collector of the gateway frees the bytes of deleted objects at once: a campaign would fill the OSD.


class CephServer(S3Server):
    """The gateway at one of its two ports. Its programs: `rgw`, `osd` (keeps its data on bluestore only), `mon`."""

    def __init__(self, folder: Path, port: int, tls_port: int, *, is_tls: bool = False) -> None:
        """Remember where it is."""
        endpoint = f"https://127.0.0.1:{tls_port}" if is_tls else f"http://127.0.0.1:{port}"
        super().__init__(endpoint, ACCESS_KEY, SECRET_KEY, str(TLS / "authority.pem") if is_tls else None)
        self.name = "ceph"
        self.folder, self._ports = folder, (port, tls_port)
        said = subprocess.run(["ceph", "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"version (\S+)", said)
        self.version = found[1] if found else said.strip()
        self.processes = {
            "mon": self._process("ceph-mon", "-i", "a", answers=lambda: self._says("mon", "stat")),
            "osd": self._process("ceph-osd", "-i", "0", answers=lambda: "1 up" in (self._says("osd", "stat") or "")),
            "rgw": self._process("radosgw", "-n", "client.rgw.a", "--no-mon-config", answers=lambda: accepts(port)),
        }

    def over_tls(self) -> CephServer:
        """Return the same server at its port for TLS, whose certificate an authority of the tests has signed."""
        other = CephServer(self.folder, *self._ports, is_tls=True)
        other.processes = self.processes
        return other

    def kill(self, program: str) -> None:
        """Kill one of its programs by SIGKILL, and wait until it is gone."""
        super().kill(program)
        if program == "osd":
            # The monitor would believe for a while that it still runs, and `restart` would believe the monitor.
            self.run("ceph", "osd", "down", "0")

    def new_user(self, name: str, access_key: str, secret_key: str) -> None:
        """Make a user: one who is not the first may do nothing here until a policy of the bucket allows it."""
        self.run(
            "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}", f"--access-key={access_key}",
            f"--secret-key={secret_key}",
        )  # fmt: skip

    def run(self, program: str, *arguments: str | Path) -> str:
        """Run a program of Ceph with this cluster's configuration; return what it prints."""
        command = [program, "-c", str(self.folder / "ceph.conf"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
        return done.stdout

    def _says(self, *arguments: str) -> str:
        """Return what the monitor says; nothing if it does not answer in time."""
        command = ["ceph", "-c", str(self.folder / "ceph.conf"), "--connect-timeout", "10", *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout

    def _process(self, program: str, *arguments: str, answers: object) -> ServerProcess:
        command = [program, "-f", "-c", self.folder / "ceph.conf", *arguments]
        return ServerProcess(command, self.folder / f"{program}.out", lambda: bool(answers()))  # type: ignore[operator]


@contextmanager
def ceph(
    folder: Path | None = None,
    *,
    objectstore: Literal["memstore", "bluestore"] = "memstore",
    device_bytes: int = 4 * _GIB,
) -> Iterator[CephServer]:
    """Run Ceph for the length of a block.

    Args:
        folder: Where it writes; None: a temporary folder that is removed.
        objectstore: `memstore` holds everything in memory, and loses it if the OSD is killed. `bluestore` is a file.
        device_bytes: Most bytes that it can hold.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ceph-")))
        port, tls_port, mon_port = free_port(), free_port(), free_port()
        fsid = str(uuid.uuid4())
        # The gateway reads certificate and key from one file.
        (folder / "ceph.conf").write_text(
            _CONFIGURATION.format(
                fsid=fsid, folder=folder, objectstore=objectstore, device_bytes=device_bytes, port=port,
                tls_port=tls_port, mon_port=mon_port, certificate=TLS / "server.pem",
            )
        )  # fmt: skip
        server = CephServer(folder, port, tls_port)
        for process in server.processes.values():
            stack.callback(process.kill)
        _begin_monitor(server, fsid, mon_port)
        _begin_osd(server)
        server.new_user("tests", ACCESS_KEY, SECRET_KEY)
        server.restart("rgw")
        server.client().create_bucket(Bucket=BUCKET)
        yield server


def _begin_monitor(server: CephServer, fsid: str, mon_port: int) -> None:
    folder, keyring = server.folder, server.folder / "keyring"
    server.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *_CAPABILITIES["mon."])
    for name in list(_CAPABILITIES)[1:]:
        server.run("ceph-authtool", keyring, "--gen-key", "-n", name, *_CAPABILITIES[name])
    address = f"v2:127.0.0.1:{mon_port}"
    server.run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", f"[{address}]", folder / "monmap")
    server.run("ceph-mon", "-i", "a", "--mkfs", "--monmap", folder / "monmap", "--keyring", keyring)
    server.restart("mon")


def _begin_osd(server: CephServer) -> None:
    number = str(uuid.uuid4())
    server.run("ceph", "osd", "new", number, "0")
    (server.folder / "osd.0").mkdir()
    server.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", number)
    server.run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default")
    server.restart("osd")
