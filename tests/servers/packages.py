"""Installs the servers of `make campaign-stores` on a bare machine: `python -m tests.servers.packages [NAME …]`.

Ceph, rclone and OpenSSH come from the distribution, by apt-get. Azurite comes from npm, into a folder of its own.
What is there is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "runs" / "servers"
"""What npm installs: git leaves it out, and `make clean` removes it."""

AZURITE_VERSION = "3.35.0"
"""The newest one that runs under the Node.js of Debian 12."""

AZURITE = FOLDER / "azurite" / AZURITE_VERSION / "node_modules" / ".bin" / "azurite-blob"

_DEBIAN = {
    "ceph": {
        "ceph-common": ("ceph", "ceph-authtool", "radosgw-admin"),
        "ceph-mon": ("ceph-mon", "monmaptool"),
        "ceph-osd": ("ceph-osd",),
        "radosgw": ("radosgw",),
    },
    "azurite": {"nodejs": ("node",), "npm": ("npm",)},
    "rclone": {"rclone": ("rclone",)},
    "sftp": {"openssh-server": ("sshd",), "openssh-client": ("ssh-keygen",)},
}
"""By server, the packages it needs, and the programs in each one."""

NAMES = tuple(_DEBIAN)
"""The servers that can be installed."""


def program(name: str) -> str | None:
    """Return the path of a program; None if it is not installed."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


def lacks(name: str) -> list[str]:
    """Return what a server needs and this machine lacks: names of Debian's packages, or `azurite`."""
    missing = [package for package, programs in _DEBIAN[name].items() if not all(program(each) for each in programs)]
    return [*missing, "azurite"] if name == "azurite" and not AZURITE.exists() else missing


def install(names: Sequence[str] = NAMES) -> None:
    """Install what these servers need and this machine lacks.

    Raises:
        SystemExit: It cannot be installed; the message says what to do by hand.
    """
    missing = sorted({package for name in names for package in lacks(name)} - {"azurite"})
    if missing:
        _install_from_debian(missing)
    if "azurite" in names and not AZURITE.exists():
        print(f"holdfast: installing azurite {AZURITE_VERSION} into {FOLDER}")
        folder = AZURITE.parents[2]
        folder.mkdir(parents=True, exist_ok=True)
        quietly = ["--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        _run("npm", "install", *quietly, f"azurite@{AZURITE_VERSION}")
    for name in names:
        if left := lacks(name):
            raise SystemExit(f"holdfast: {name} still lacks {', '.join(left)} after its installation")


_AS_ROOT = """
set -e
if [ ! -e /usr/sbin/policy-rc.d ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --no-install-recommends "$@"
"""
"""Installs packages. The policy keeps each one from starting its service, which would listen on all addresses."""


def _install_from_debian(packages: Sequence[str]) -> None:
    by_hand = f"the servers need {', '.join(packages)}; install them by hand: apt-get install {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise SystemExit(f"holdfast: there is no apt-get here, and {by_hand}")
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if as_root and shutil.which("sudo") is None:
        raise SystemExit(f"holdfast: only root may install packages, and {by_hand}")
    print(f"holdfast: installing {', '.join(packages)}")
    _run(*as_root, "sh", "-c", _AS_ROOT, "sh", *packages)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"holdfast: {command[0]} {command[-1]} failed:\n{(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    install(sys.argv[1:] or NAMES)
