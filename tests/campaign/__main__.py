"""`make campaign-stores`: races, faults, kills and properties against real servers of objects, for hours.

`make campaign-tiers` (`CAMPAIGN=tiers`) does the same with what a near tier must survive, and `make campaign-memory`
(`CAMPAIGN=memory`) with one in memory and its agent, each in under an hour.

Leaves `bench/results/stores-campaign.json`, or the like of the other two. The same command goes on after Ctrl-C;
`SEED=n` draws the same again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.campaign import secrets, suites
from tests.campaign.record import FOLDER, RESULTS, ROOT, Options, Record, options_now, write_results
from tests.campaign.server_parts import SERVERS, wanted
from tests.servers import azurite, ceph, packages
from tests.support.object_server import ACCESS_KEY, SECRET_KEY

_JOBS = int(os.environ.get("JOBS") or 2)
"""Servers that run side by side."""

_NEEDS = {"ministack": (), "ceph": ("ceph",), "ceph-bluestore": ("ceph",), "azurite": ("azurite",)}
_FOLDERS = ("ministack", "ceph", "azurite", "google", "rclone", "sftp")
"""How the names of the folders of servers begin: a server must know the credentials that it checks."""

_SECRETS = (ACCESS_KEY, SECRET_KEY, ceph.ACCESS_KEY, ceph.SECRET_KEY, azurite.KEY)


def main() -> int:
    """Do what is asked for; return the exit status."""
    # A scheduler that ends the campaign may continue it, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = options_now(os.environ)
    record = Record(options)
    print(f"campaign: seed {options.seed}; {asdict(options)}")
    print(f"campaign: everything that is said is in {FOLDER.relative_to(ROOT)}", flush=True)
    parts = [*wanted(options), *suites.wanted(options)]
    canary: dict[str, object] = {}
    try:
        names = dict.fromkeys(server for server, part, rounds in parts if not _is_done(record, (server, part, rounds)))
        packages.install(sorted({needed for name in names for needed in _needs(name)}))
        # Servers of a campaign that was interrupted left files.
        shutil.rmtree(_temporary())
        with ThreadPoolExecutor(_JOBS) as jobs, _ended_with_us():
            list(jobs.map(lambda name: _work_with(name, options), names))
        canary = _canary()
        is_complete = all(_is_done(record, each) for each in parts)
    except KeyboardInterrupt:
        write_results(record, parts, canary)
        print("campaign: interrupted; the same command goes on", flush=True)
        return 130
    is_well = write_results(record, parts, canary)
    print(f"campaign: {'passed' if is_well else 'FAILED'}; results in {RESULTS.relative_to(ROOT)}", flush=True)
    if is_complete:
        record.end()
    return 0 if is_well else 1


def _needs(name: str) -> tuple[str, ...]:
    """Return what must be installed for a server or a suite."""
    return _NEEDS[name] if name in SERVERS else suites.SUITES[name].needs


def _is_done(record: Record, part: tuple[str, str, int]) -> bool:
    return sum(each.asked for each in record.blocks() if (each.server, each.part) == part[:2]) >= part[2]


_running: list[subprocess.Popen[str]] = []


@contextmanager
def _ended_with_us() -> Iterator[None]:
    """Kill what is running, with all that it began, if the block ends by an exception such as Ctrl-C.

    Each block of rounds that is lost so is done again.
    """
    try:
        yield
    except BaseException:
        for process in _running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        raise


def _work_with(name: str, options: Options) -> None:
    module = "server_parts" if name in SERVERS else "suites"
    _passed_on([sys.executable, "-u", "-m", f"tests.campaign.{module}", name], name, options)


def _passed_on(command: list[str], name: str, options: Options) -> None:
    """Run a process; show what it says for people, and keep everything in a log."""
    environment = os.environ | {"CAMPAIGN_OPTIONS": options.to_json(), "TMPDIR": str(_temporary())}
    with (FOLDER / f"{name.replace(' ', '-')}.log").open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        _running.append(process)
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if line.startswith("campaign: "):
                    print(line, end="", flush=True)
    if process.returncode:
        print(f"campaign: {name} ended with {process.returncode}; see {log.name}", flush=True)


def _temporary() -> Path:
    folder = FOLDER / "temporary"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _canary() -> dict[str, object]:
    """Look for credentials in all that the campaign left, and for cores."""
    servers = [path for name in _FOLDERS for path in _temporary().glob(f"{name}-*")]
    # The launcher of the tests gives its ranks their variables in this file.
    specifications = list(_temporary().rglob("spec.json"))
    sought = secrets.in_files(FOLDER, _SECRETS, besides=[*servers, *specifications])
    cores = secrets.core_files(FOLDER)
    return {
        "files": sought.looked_at,
        "bytes": sought.bytes,
        "cores": len(cores),
        "found": [name.replace(f"{ROOT}/", "") for name in (*sought.found, *cores)],
    }


if __name__ == "__main__":
    sys.exit(main())
