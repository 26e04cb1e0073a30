"""Runs of the command line: in this process, in one without torch, and on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from holdfast.cli.app import app

SOURCE = Path(__file__).resolve().parents[3] / "src"

_WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {source!r})
import warnings
warnings.simplefilter("error")
# An interrupt in the middle of an import leaves the module's file to the collector.
warnings.simplefilter("ignore", ResourceWarning)
from holdfast.cli import main
main()
"""
"""A program whose imports of some packages fail as if they were not installed."""


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    def json(self) -> dict:
        assert self.out.isascii()
        return json.loads(self.out)


def command(*arguments: object, absent: tuple[str, ...] = ("torch",)) -> list[str]:
    program = _WITHOUT.format(absent=absent, source=str(SOURCE))
    return [sys.executable, "-c", program, *map(str, arguments)]


def holdfast(*arguments: object) -> Ended:
    """Run in this process, which is quick; torch is there."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ended(done.exit_code, done.stdout, done.stderr)


def separately(*arguments: object, absent: tuple[str, ...] = ("torch",), **environment: str) -> Ended:
    """Run as a user's shell does, with no torch to be had."""
    done = subprocess.run(
        command(*arguments, absent=absent),
        capture_output=True,
        timeout=60,
        check=False,
        env={**_plain_environment(), **environment},
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def on_terminal(*arguments: object, columns: int = 100, interrupt: bool = False) -> Ended:
    """Run on a terminal of this width; what both streams show comes as `out`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**_plain_environment(), "TERM": "xterm-256color"}
    process = subprocess.Popen(command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:
                break
            shown += data
            if interrupt and data:
                process.send_signal(signal.SIGINT)
                interrupt = False
            if not data:
                break
        status = process.wait(60)
    finally:
        process.kill()
        os.close(ours)
    return Ended(status, shown.decode().replace("\r\n", "\n"), "")


def _plain_environment() -> dict[str, str]:
    shaping = {"COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TERM", "PYTHONPATH"}
    return {name: value for name, value in os.environ.items() if name not in shaping}
