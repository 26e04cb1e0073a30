"""Does the property test of a campaign: `python -m tests.campaign.properties`, for `__main__`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from importlib.metadata import version

from tests.campaign.record import ROOT, Block, Options, Record

NAME, PART = "memory", "property"
_BLOCK_EXAMPLES = 100
_TESTS = "tests/property/test_any_faults.py"
_FAILURE_CHARACTERS_MAX = 4000


def wanted(options: Options) -> list[tuple[str, str, int]]:
    """Return the examples that the options ask for."""
    return [(NAME, PART, options.examples)] if options.wants(NAME, PART) else []


def main() -> None:
    """Do the blocks that are not done yet."""
    record = Record(Options.from_json(os.environ["CAMPAIGN_OPTIONS"]))
    examples = record.options.examples
    for number, first in enumerate(range(0, examples, _BLOCK_EXAMPLES)):
        if record.has(NAME, PART, number):
            continue
        count = min(_BLOCK_EXAMPLES, examples - first)
        seed = zlib.crc32(f"{record.options.seed} {NAME} {number}".encode())
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout", "3600", "-o", "faulthandler_timeout=3660",
             f"--hypothesis-seed={seed}", _TESTS],
            cwd=ROOT,
            env=os.environ | {"ANY_FAULTS_EXAMPLES": str(count)},
            capture_output=True,
            text=True,
        )  # fmt: skip
        print(done.stdout, done.stderr, sep="", flush=True)
        failure = done.stdout[-_FAILURE_CHARACTERS_MAX:].replace(f"{ROOT}/", "") if done.returncode else ""
        seconds, passed = round(time.monotonic() - began, 1), 0 if failure else count
        software = f"hypothesis {version('hypothesis')}"
        record.add(Block(NAME, PART, number, seed, count, passed, seconds, software, {}, failure))
        said = "FAILED" if failure else "passed"
        print(f"campaign: {PART}: {first + count} of {examples} examples in {seconds:.0f} s: {said}", flush=True)


if __name__ == "__main__":
    main()
