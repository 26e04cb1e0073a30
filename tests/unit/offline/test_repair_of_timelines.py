"""Repairing manifests of a run with timelines: no step enters the chain of a timeline that did not save it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.api import StepRepair, list_steps, repair
from holdfast.base.clock import SystemClock
from holdfast.errors import ConflictError
from holdfast.offline.repair.repair import Repair
from holdfast.stored.checkpoint.location import none_allowed
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.quarantine import identity_at, list_records, quarantine
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.newer_format import write_newer
from tests.unit.training.runs.test_going_back import (
    SETTINGS,
    go_on,
    manager_at,
    resumed,
    save_steps,
    step_path,
    store_of,
    superseded,
)


def repaired(root: Path, step: int, *, unfinished: bool = False) -> StepRepair:
    (found,) = repair(root, step, unfinished=unfinished, settings=SETTINGS).steps
    return found


def manifest_path(root: Path, step: int) -> Path:
    return step_path(root, step) / "manifest.json"


def steps_of_chain(root: Path) -> list[int]:
    with manager_at(root) as manager:
        return list(manager.steps())


@pytest.fixture
def rewound(tmp_path: Path) -> Path:
    """A run with steps 1 to 3 of the first timeline; the second one left at step 1 and saved steps 2 and 4."""
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2, 4)
    return tmp_path


@pytest.mark.parametrize(("step", "number"), [(1, 1), (4, 2)])
def test_a_rebuilt_manifest_states_its_timeline(rewound: Path, step: int, number: int) -> None:
    path = manifest_path(rewound, step)
    path.write_bytes(path.read_bytes()[:-10])
    assert repaired(rewound, step).outcome == "repaired"
    assert read_manifest(store_of(rewound), f"{path.parent.name}/").timeline.number == number
    assert steps_of_chain(rewound) == [1, 2, 4] and resumed(rewound) == (4, -4)


_NAME = rb'"timeline"', rb'"tXmXlXnX"'
_ID = rb'(?<="id": ")[0-9a-f]{4}', b"0000"


@pytest.mark.parametrize("change", [_NAME, _ID, (rb"(?s).*", b"")], ids=["name", "id", "all"])
def test_a_step_whose_timeline_is_lost_is_superseded(rewound: Path, change: tuple[bytes, bytes]) -> None:
    path = manifest_path(rewound, 4)
    data = path.read_bytes()
    path.write_bytes(re.sub(*change, data, count=1))
    found = repaired(rewound, 4)
    assert found.outcome == "repaired" and "timeline, so the step is superseded" in found.done[0]
    assert steps_of_chain(rewound) == [1, 2] and resumed(rewound) == (2, -2)
    (name,) = (name for name in superseded(rewound) if name.startswith("4@"))
    assert resumed(rewound, name) == (4, -4)
    # The next timeline has a number of its own.
    go_on(rewound, 1, 5)
    assert read_manifest(store_of(rewound), "step-000000000005/").timeline.number == 3


def test_what_may_be_the_newest_step_is_not_rebuilt_without_its_timeline(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    go_on(tmp_path, 1, 3)
    path = manifest_path(tmp_path, 3)
    path.write_bytes(re.sub(*_NAME, path.read_bytes()))
    found = repaired(tmp_path, 3)
    assert found.outcome == "damaged" and "does not tell its timeline" in found.lost[0]


@pytest.mark.parametrize("loaded", [3, 1], ids=["newer than all", "same number"])
def test_a_fenced_manifest_of_a_timeline_that_never_counted_is_not_accepted(tmp_path: Path, loaded: int) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2)
    path = manifest_path(tmp_path, 2)
    data = path.read_bytes()
    path.unlink()
    # Another writer goes on without it, on the first timeline or on another second one.
    go_on(tmp_path, loaded, 4)
    path.write_bytes(data)
    found = repaired(tmp_path, 2, unfinished=True)
    assert found.outcome == "unfinished" and "is of timeline 2, of which no step counts" in found.lost[0]
    assert path.read_bytes() == data and resumed(tmp_path) == (4, -4)


def test_a_fenced_manifest_of_an_older_timeline_is_accepted_as_superseded(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    go_on(tmp_path, 1, 2)
    path = manifest_path(tmp_path, 2)
    data = path.read_bytes()
    path.unlink()
    go_on(tmp_path, 1, 4)
    go_on(tmp_path, 1, 5)
    # Of the second timeline that took its place no step is left either.
    manifest_path(tmp_path, 4).unlink()
    go_on(tmp_path, None, 6)
    path.write_bytes(data)
    assert repaired(tmp_path, 2, unfinished=True).outcome == "repaired"
    assert resumed(tmp_path) == (6, -6)
    names = superseded(tmp_path)
    assert [name[0] for name in names] == ["2", "2", "3"]
    assert sorted(resumed(tmp_path, name) for name in names[:2]) == [(2, -2), (2, 2)]


def test_a_step_that_is_saved_again_while_it_is_repaired_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    path = manifest_path(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[data.index(b"run_id")] ^= 1
    path.write_bytes(data)

    def train(operation: FaultPoint) -> None:
        # The repair has corrected the bit and reads the tensors. It writes nothing yet, so it does not hold the lease.
        go_on(tmp_path, None, 2)

    store = FaultyStore(store_of(tmp_path), Faults(train, names=("read_into",)))
    with pytest.raises(ConflictError, match=r"step 2: its manifest is another one .* Nothing was written"):
        Repair(store, none_allowed, SystemClock(), SETTINGS).run(2)
    assert resumed(tmp_path) == (2, -2)


# --------------------------------------------------------------------------------- manifests under superseded/


def moved_path(root: Path) -> Path:
    (path,) = (root / "superseded").glob("*.json")
    return path


def test_a_damaged_manifest_under_superseded_is_listed_and_corrected(rewound: Path) -> None:
    path = moved_path(rewound)
    whole = path.read_bytes()
    assert resumed(rewound, f"2@{path.name[13:21]}") == (2, 2)
    path.write_bytes(whole.replace(b'"step"', b'"stdp"', 1))
    (record,) = (record for record in list_steps(rewound).steps if record.error)
    assert record.step == 2 and record.superseded and path.name in str(record.error)
    planned = repair(rewound, None, dry_run=True, settings=SETTINGS)
    assert path.read_bytes() != whole
    assert repair(rewound, None, settings=SETTINGS) == planned
    (found,) = planned.steps
    assert (found.step, found.outcome) == (2, "repaired") and path.name in found.done[0]
    assert path.read_bytes() == whole and resumed(rewound, f"2@{path.name[13:21]}") == (2, 2)
    assert len([name for name in (rewound / "quarantine").iterdir() if path.name in name.name]) == 1
    assert repair(rewound, None, settings=SETTINGS).steps == ()


def test_a_manifest_under_superseded_that_cannot_be_corrected_is_told(rewound: Path) -> None:
    path = moved_path(rewound)
    path.write_bytes(path.read_bytes()[:-40])
    damaged = path.read_bytes()
    found = repaired(rewound, 2)
    assert found.outcome == "damaged" and path.name in found.lost[0]
    assert path.read_bytes() == damaged and resumed(rewound, 2) == (2, -2)


def test_a_manifest_of_a_newer_format_under_superseded_is_not_taken_for_damaged(rewound: Path) -> None:
    path = moved_path(rewound)
    newer = write_newer(path)
    (record,) = (record for record in list_steps(rewound).steps if record.error)
    assert record.step == 2 and "Read it with a newer Holdfast" in str(record.error)
    assert repair(rewound, None, settings=SETTINGS).steps == ()
    assert repaired(rewound, 2).outcome == "whole"
    assert path.read_bytes() == newer


def test_a_repair_keeps_the_record_of_the_other_manifest_of_its_step(rewound: Path) -> None:
    store, moved, key = store_of(rewound), f"superseded/{moved_path(rewound).name}", "step-000000000002/manifest.json"
    for damaged in (moved, key):
        quarantine(store, 2, damaged, identity_at(store, damaged), "damage", "")
    assert repaired(rewound, 2).outcome == "whole"
    assert list_records(store) == [(2, identity_at(store, moved))]
