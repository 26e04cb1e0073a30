"""Public names and modules are there after `import holdfast`, and each is imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import holdfast
from holdfast import api

USES = """
import sys
import holdfast
assert not [name for name in sys.modules if name.startswith("holdfast.")]
holdfast.api.list_steps, holdfast.policies.LatestN, holdfast.observers.jsonl, holdfast.errors.InvalidError
"""

LOADS = """
import sys
import holdfast
holdfast.load, holdfast.save
unneeded = [name for name in sys.modules if name.startswith(("holdfast.offline", "holdfast.training.runs"))]
assert not unneeded, unneeded
"""


@pytest.mark.parametrize("code", [USES, LOADS], ids=["modules are reachable", "a load by path imports no run"])
def test_first_use(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", [holdfast, api], ids=["holdfast", "holdfast.api"])
def test_every_public_name_is_there(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert [name for name in names if not hasattr(module, name)] == []
    assert not hasattr(module, "no_such_name")
