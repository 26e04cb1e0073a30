"""How many functions and files a warm save and a warm load pass through, before the first byte and in all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.house.source import ROOT

BOUNDS = {
    "save": {"functions_before_first_byte": 388, "files_before_first_byte": 87, "functions": 630, "files": 118},
    "load": {"functions_before_first_byte": 372, "files_before_first_byte": 98, "functions": 459, "files": 104},
}
"""Measured, plus 3 for the timing of threads. Goal of a save before the first byte: 280 functions in 60 files."""


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.house.hops"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("verb", BOUNDS)
def test_a_reader_passes_through_few_functions_and_files(verb: str, counts: dict[str, dict[str, int]]) -> None:
    over = {name: (count, BOUNDS[verb][name]) for name, count in counts[verb].items() if count > BOUNDS[verb][name]}
    assert not over, (
        f"a warm {verb} calls more than the bound, (measured, bound): {over}. Remove functions that only pass "
        "arguments on. `python -m tests.house.hops` measures"
    )
