"""A near tier and several layouts: two ranks die while they drain, three drain what is left, and others load it."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from tests.distributed.tiers.layout_cases import FROZEN_COUNT, loaded_alone, packs_of
from tests.support.gloo_worlds import Case, Launch, Results, run_world
from tests.support.server_folders import steps_in

CASES = "tests.distributed.tiers.layout_cases"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first job, of two ranks, was killed in its drain of step 6."""
    folder = tmp_path_factory.mktemp("layouts")
    with Launch(2, [Case(f"{CASES}:killed", {"folder": str(folder)})], folder / "killed") as launch:
        assert launch.join().exits == [-9, -9], launch.logs()
    return folder


@pytest.fixture(scope="module")
def drained(folder: Path) -> Results:
    # Rank 0 has the key-value store, and ends first: the others must not wait for it.
    case = Case(f"{CASES}:drained", {"folder": str(folder)})
    with Launch(3, [case], folder / "drained", store_host="rank0", deadline_seconds=60) as launch:
        return launch.join()


def seen(folder: Path) -> dict[str, dict[str, object]]:
    return json.loads((folder / "seen.json").read_text())


def test_a_frozen_backbone_goes_to_the_root_once_and_as_it_is_coded(folder: Path) -> None:
    root_bytes = seen(folder)["root_bytes"]
    first, second = root_bytes["2"], root_bytes["4"] - root_bytes["2"]
    assert 4 * FROZEN_COUNT * 0.3 < first < 4 * FROZEN_COUNT * 0.6, "it is coded"
    assert 0 < second < first / 20
    for path in packs_of(folder / "root"):
        assert path.read_bytes() == (folder / "near" / path.relative_to(folder / "root")).read_bytes()


def test_ranks_of_the_next_job_drain_what_was_left_each_its_share(folder: Path, drained: Results) -> None:
    values = drained.values("drained")
    for value in values:
        assert "ranks [1] do not see the folder" in value["refused"]
        assert (value["resumed"], value["digests"]) == (6, seen(folder)["digests"]["6"])
    assert "TCPStore" not in drained.logs(), "no rank asks for a key-value store that has ended"
    shares = [{*value["keys"]} for value in values]
    assert all(shares), shares
    assert not any(one & other for one, other in combinations(shares, 2)), shares
    assert steps_in(folder / "root") == [2, 4, 6, 8]


def test_other_layouts_load_the_same_bits(folder: Path, drained: Results, tmp_path: Path) -> None:
    digests = seen(folder)["digests"]
    for value in run_world(2, [Case(f"{CASES}:loaded", {"folder": str(folder)})], tmp_path).values("loaded"):
        assert value == [[8, digests["6"]], [6, digests["6"]], [4, digests["4"]]]
    for step in (2, 4, 6):
        assert loaded_alone(folder, step) == digests[str(step)]
