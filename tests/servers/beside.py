"""Runs a command beside Ceph: `python -m tests.servers.beside COMMAND …`. The server ends with the command.

The command finds the server in its variables. In its arguments `{url}` becomes the URL of a folder that nobody has
used, and `{server}` what the server is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from tests.servers.ceph import ceph
from tests.servers.packages import install

_DEVICE_BYTES = 10 << 30
"""In memory, and taken as it is used: a bench stores some GiB before it removes them."""


def main(command: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    install(["ceph"])
    print("holdfast: starting Ceph on loopback", flush=True)
    with ceph(device_bytes=_DEVICE_BYTES) as server:
        known = {"url": server.new_url(), "server": f"Ceph {server.version}, everything in memory, plain HTTP"}
        arguments = [each.format(**known) if each.startswith("{") else each for each in command]
        # Ctrl-C goes to the command too, which ends in its own way.
        with subprocess.Popen(arguments, env=os.environ | server.environment) as process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
