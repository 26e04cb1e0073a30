"""Does the parts of a campaign that are tests: `python -m tests.campaign.suites NAME`, for `__main__`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tests.campaign.record import CAMPAIGN, FOLDER, ROOT, Block, Options, Record, summed

_FAILURE_CHARACTERS_MAX = 4000
_COUNTED = re.compile(r"(\d+) (passed|failed|skipped)")


@dataclass(frozen=True)
class Suite:
    """Tests that are done in blocks."""

    part: str
    files: tuple[str, ...]
    rounds: Callable[[Options], int]
    """Examples, or how often the tests are run."""
    block_rounds: int
    rounds_variable: str = ""
    """Variable that gives the tests their number of examples."""
    needs: tuple[str, ...] = ()
    """Servers that must be installed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of these tests."""


_OF_STORES = {
    "memory": Suite(
        "property",
        ("tests/property/test_any_faults.py",),
        lambda options: options.examples,
        100,
        rounds_variable="ANY_FAULTS_EXAMPLES",
    ),
    "every server": Suite(
        "store suite",
        (
            "tests/campaign/on_servers.py",
            "tests/campaign/refused_by_servers.py",
            "tests/campaign/vendor_credentials.py",
        ),
        lambda _: 1,
        1,
        needs=("ceph", "azurite", "rclone", "clock"),
    ),
    "sftp": Suite("store suite", ("tests/campaign/on_sftp.py",), lambda _: 1, 1, needs=("sftp",)),
}
"""The servers of "every server" are in `tests/servers/all.py`."""

_OF_TIERS = {
    "both stores": Suite(
        "calls of a drain",
        ("tests/crash/kills/test_drain_kill.py",),
        lambda _: 1,
        1,
        variables={"DRAIN_STRIDE": "1"},
    ),
    "root on ministack": Suite(
        "kills",
        ("tests/distributed/tiers/test_near_kills.py",),
        lambda options: options.kills,
        10,
        rounds_variable="NEAR_LIVES",
        variables={"TIER_ROOT_ON": "ministack"},
    ),
    "root in memory": Suite(
        "lives",
        ("tests/property/test_two_roots.py",),
        lambda options: options.examples,
        100,
        rounds_variable="LIFE_EXAMPLES",
    ),
    "root on ceph": Suite(
        "situations",
        (
            "tests/unit/training/runs/tiers/test_near_tier.py",
            "tests/unit/training/runs/tiers/test_days_that_go_wrong.py",
            "tests/unit/training/runs/tiers/test_places_that_differ.py",
        ),
        lambda _: 1,
        1,
        needs=("ceph",),
        variables={"TIER_ROOT_ON": "ceph"},
    ),
    "near on ext4": Suite(
        "power cuts",
        ("tests/crash/kills/test_near_power_cut.py",),
        lambda options: 2 * options.kills,
        50,
        rounds_variable="NEAR_POWER_CUTS",
    ),
}

_OF_MEMORY = {
    "two ranks": Suite(
        "kills of each kind",
        ("tests/distributed/tiers/test_memory_kills.py",),
        lambda options: max(1, 3 * options.kills // 10),
        3,
        rounds_variable="MEMORY_KILLS",
    ),
    "readers": Suite(
        "bytes that others read",
        ("tests/distributed/tiers/test_memory_readers.py",),
        lambda options: options.kills,
        20,
        rounds_variable="MEMORY_READS",
    ),
    "one process": Suite(
        "bytes that others read",
        ("tests/unit/backends/stores/test_shelf.py",),
        lambda options: options.kills,
        50,
        rounds_variable="SHELF_ROUNDS",
    ),
    "orphans": Suite(
        "situations",
        ("tests/unit/training/runs/tiers/test_orphans.py",),
        lambda options: max(1, options.kills // 10),
        2,
        rounds_variable="ORPHAN_ROUNDS",
    ),
    "orphans of a root": Suite(
        "away for a minute",
        ("tests/unit/training/runs/tiers/test_orphans.py::test_a_root_that_was_away_gets_the_step_once",),
        lambda _: 1,
        1,
        variables={"ORPHAN_AWAY_SECONDS": "60"},
    ),
    "agent": Suite(
        "killed at each call",
        ("tests/crash/kills/test_agent_kill.py",),
        lambda _: 1,
        1,
        variables={"AGENT_STRIDE": "1"},
    ),
    "nodes": Suite(
        "losses of each kind",
        ("tests/distributed/peers/test_lost_nodes.py", "tests/distributed/peers/test_stale_nodes.py"),
        lambda options: max(1, options.kills // 10),
        2,
        rounds_variable="PEER_LOSSES",
    ),
    "rules of peers": Suite(
        "keepers and parity",
        ("tests/property/peers/test_keepers.py", "tests/property/peers/test_groups.py"),
        lambda options: options.examples,
        500,
        rounds_variable="PEER_EXAMPLES",
    ),
}

SUITES_OF = {"stores": _OF_STORES, "tiers": _OF_TIERS, "memory": _OF_MEMORY}
"""By campaign."""

SUITES = SUITES_OF[CAMPAIGN]
"""Of this campaign, by name."""


def wanted(options: Options) -> list[tuple[str, str, int]]:
    """Return name, part and rounds of all that the options ask for."""
    return [
        (name, suite.part, suite.rounds(options)) for name, suite in SUITES.items() if options.wants(name, suite.part)
    ]


def main(name: str) -> None:
    """Do the blocks of a suite that are not done yet."""
    record, suite = Record(Options.from_json(os.environ["CAMPAIGN_OPTIONS"])), SUITES[name]
    rounds = suite.rounds(record.options)
    for number, first in enumerate(range(0, rounds, suite.block_rounds)):
        if not record.has(name, suite.part, number):
            _do(record, name, suite, number, min(suite.block_rounds, rounds - first))


def _do(record: Record, name: str, suite: Suite, number: int, count: int) -> None:
    seed = zlib.crc32(f"{record.options.seed} {name} {number}".encode())
    began = time.monotonic()
    options = ["-q", "-n", "0", "--timeout", "3600", "-o", "faulthandler_timeout=3660", f"--hypothesis-seed={seed}"]
    report = FOLDER / f"{name.replace(' ', '-')}.xml"
    options += reporting(report)
    report.unlink(missing_ok=True)
    rounds = {suite.rounds_variable: str(count)} if suite.rounds_variable else {}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *suite.files],
        cwd=ROOT,
        env={**os.environ, "CAMPAIGN_SEED": str(seed), **suite.variables, **rounds},
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr, sep="", flush=True)
    failure = (done.stdout + done.stderr)[-_FAILURE_CHARACTERS_MAX:] if done.returncode else ""
    counts = {f"tests {word}": int(found) for found, word in _COUNTED.findall(done.stdout.rpartition("\n")[0])}
    counts |= counted_in(report)
    seconds, passed = round(time.monotonic() - began, 1), 0 if failure else count
    software = f"pytest {version('pytest')}, hypothesis {version('hypothesis')}"
    shown = failure.replace(f"{ROOT}/", "")
    record.add(Block(name, suite.part, number, seed, count, passed, seconds, software, counts, shown))
    said = f"{count} in {seconds:.0f} s: {'FAILED' if failure else 'passed'}"
    print(f"campaign: {name}, {suite.part}: block {number}, {said}", flush=True)


def reporting(report: Path) -> list[str]:
    """Return the options by which pytest writes a report that has the properties of tests."""
    return [f"--junitxml={report}", "-o", "junit_family=xunit1"]


def counted_in(report: Path) -> Counter[str]:
    """Return the sums of all that tests have counted by `record_property`."""
    if not report.exists():  # Of a suite that was ended by a signal.
        return Counter()
    found = (each.attrib for each in ElementTree.parse(report).getroot().iter("property"))
    # Hypothesis states its statistics as a property of a test, too.
    return summed({each["name"]: int(each["value"])} for each in found if not each["name"].startswith("hypothesis-"))


if __name__ == "__main__":
    main(sys.argv[1])
