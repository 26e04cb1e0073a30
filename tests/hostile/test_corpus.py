"""Every crafted run ends in one of the five errors, soon and small, and leaves everything as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.cases import HARMLESS
from tests.hostile.corpus import CASES
from tests.hostile.crafting import Crafted, make_template
from tests.support.mounted_file_systems import workplace

REPOSITORY = Path(__file__).resolve().parents[2]
MEMORY_MIB_MAX = 512
STAGES = ("open", "objects", "tensors", "read", "verify", "load", "content", "manager", "list")
CANARY = Path("/tmp/holdfast-was-here")

pytestmark = pytest.mark.timeout(600)

NAMES = [
    pytest.param(case.name, marks=[pytest.mark.long] if number % 4 else [], id=case.name)
    for number, case in enumerate(CASES)
]
"""`make test` tries every fourth case of the corpus, `make test-long` the others."""


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What each case came to, tried in one process that does nothing else; and what it grew to, under ''."""
    CANARY.unlink(missing_ok=True)
    trial = test_a_crafted_run_is_refused_by_name_and_does_nothing
    chosen = [each.callspec.params["name"] for each in request.session.items if getattr(each, "obj", None) is trial]
    # A module that a crafted run is the first to import would leave a folder of compiled code.
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with workplace() as folder:
        command = [sys.executable, "-W", "error", "-m", "tests.hostile.trial", str(folder), *chosen]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=550, check=False
        )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    yield {each.get("name", ""): each for each in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_crafted_run_is_refused_by_name_and_does_nothing(outcomes: dict[str, Any], name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    outcome = outcomes[name]
    assert outcome["unexpected"] == []
    first = next((stage for stage in STAGES if stage in outcome["said"]), HARMLESS)
    assert first == case.noticed_by, outcome["said"]
    assert outcome["changed"] == []
    assert outcome["did"] == []
    assert not CANARY.exists()
    assert outcome["unclean"] == [], "what the command line shows steers no terminal"


@pytest.mark.parametrize("part", ["every fourth", pytest.param("the others", marks=pytest.mark.long)])
def test_the_corpus_takes_little_memory(outcomes: dict[str, Any], part: str) -> None:
    assert outcomes[""]["peak_mib"] < MEMORY_MIB_MAX
    print(f"{part}, {len(outcomes) - 1} crafted runs: {outcomes['']['peak_mib']} MiB above one good run")


def test_the_corpus_is_as_large_as_was_promised() -> None:
    assert len(CASES) >= 100
    assert sum(case.noticed_by == HARMLESS for case in CASES) < len(CASES) / 5


def test_what_is_crafted_differs_from_what_is_good(tmp_path: Path) -> None:
    """The tools reseal so well that a run rewritten without a change is whole."""
    import holdfast

    make_template(tmp_path / "run")
    crafted = Crafted(tmp_path / "run")
    crafted.edit_manifest(lambda document: None)
    crafted.edit_index(lambda document: None)
    crafted.edit_part(lambda document: None)
    crafted.edit_header(lambda header: None)
    assert list(holdfast.open_checkpoint(crafted.folder).verify()) == []
