"""Someone removes steps of a run by hand, with the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.api import list_steps, remove_steps
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.core.format.names import link_name
from holdfast.stored.leases.process import this_process
from holdfast.stored.leases.reader import put_lease
from holdfast.stored.repository.removal import is_link_key, is_pack_key, mark_keys
from tests.unit.cli.running import holdfast as command
from tests.unit.cli.running import separately

FROZEN = torch.ones(100_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four steps of a run whose backbone is stored with the first."""
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, {"head": torch.full((1000,), float(step)), "backbone": FROZEN}).wait()
        manager.tag(300, "best")
    return tmp_path


def content(root: Path, step: int | str | None = None) -> tuple[int | None, float]:
    """Return the step that a load takes, and what it holds."""
    head, backbone = torch.zeros(1000), torch.zeros(100_000)
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        loaded = manager.load({"head": head, "backbone": backbone}, step)
    assert torch.equal(backbone, FROZEN)
    return loaded, head[0].item()


def files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("step-*/**/*") if path.is_file()
    }


def test_the_named_steps_go_and_the_others_stay_whole(root: Path) -> None:
    ended = separately("rm", root, 100, 200, "--grace", 0)
    assert ended.status == 0, ended.err
    assert "removed: steps 100, 200; " in ended.out
    assert [record.step for record in list_steps(root).steps if record.manifest] == [300, 400]
    assert content(root) == (400, 400.0) and content(root, 300) == (300, 300.0)
    for step in (300, 400):
        assert command("verify", root / f"step-{step:012d}").status == 0


def test_the_newest_step_may_go(root: Path) -> None:
    assert command("rm", root, 400, "--grace", 0).status == 0
    assert content(root) == (300, 300.0)


def test_a_dry_run_shows_what_would_go_and_touches_nothing(root: Path) -> None:
    before = files(root)
    planned = json.loads(command("rm", root, 100, 200, "--dry-run", "--json").out)
    assert files(root) == before
    assert planned["dry_run"] and planned["removed"]["steps"] == ["100", "200"] and planned["left"] == {}
    done = json.loads(command("rm", root, 100, 200, "--grace", 0, "--json").out)
    assert done["removed"] == planned["removed"] and not done["dry_run"]
    left = files(root).keys()
    gone = before.keys() - left
    # A link takes no space, and the pack of the backbone none beside the links of the steps that are left.
    linked = {name.rpartition("/")[2] for name in left if is_link_key(name)}
    uncounted = {name for name in gone if name.endswith("manifest.json") or is_link_key(name)}
    uncounted |= {name for name in gone if is_pack_key(name) and link_name(name) in linked}
    assert len(linked) == 1
    assert sum(len(before[name]) for name in gone - uncounted) == done["removed"]["bytes"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([100, 999], "no committed step 999; committed, newest first: 400, 300"),
        ([100, 300], "steps have tags: 300 (best). Nothing was removed. Remove a tag first"),
        ([100, "400@ffff"], "no committed step 400@ffff"),
        ([100, "soon"], "no tag 'soon'; there are: best"),
        ([100, "best"], "steps have tags: 300 (best). Nothing was removed"),
        (["so on"], "expected a whole number"),
    ],
)
def test_one_wrong_step_and_nothing_is_removed(root: Path, steps: list[object], message: str) -> None:
    before = files(root)
    ended = command("rm", root, *steps, "--grace", 0)
    assert ended.status == 2 and message in ended.err
    assert files(root) == before


def test_tagged_steps_go_with_their_tags(root: Path) -> None:
    assert command("rm", root, 300, "--tagged", "--grace", 0).status == 0
    assert list_steps(root).tags == ()
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.tag(400, "best")


def test_the_last_step_goes_only_when_asked_for(root: Path) -> None:
    ended = command("rm", root, 100, 200, 300, 400, "--tagged", "--grace", 0)
    assert ended.status == 2 and "no step that a resume could take would stay" in ended.err
    assert content(root) == (400, 400.0)
    assert command("rm", root, 100, 200, 300, 400, "--tagged", "--all", "--grace", 0).status == 0
    assert not list(root.glob("step-*"))
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load({"head": torch.zeros(1000)}) is None
        manager.save(1, {"head": torch.zeros(1000)}).wait()


def test_superseded_steps_are_named_by_number_and_digest(root: Path) -> None:
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.load({"head": torch.zeros(1000), "backbone": torch.zeros(100_000)}, 200)
        for step in (300, 350):
            manager.save(step, {"head": torch.full((1000,), -float(step)), "backbone": FROZEN}).wait()
    superseded = [record.name for record in list_steps(root).steps if record.superseded]
    (name,) = (name for name in superseded if name.startswith("300@"))
    assert command("rm", root, name, "--tagged", "--grace", 0).status == 0
    assert [record.name for record in list_steps(root).steps if record.superseded] == [
        each for each in superseded if each != name
    ]
    assert content(root, 300) == (300, -300.0)
    # The steps of before must not come back with the last step of the newer timeline.
    assert command("rm", root, 300, 350, "--grace", 0).status == 0
    assert content(root) == (200, 200.0)
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load({"head": torch.zeros(1000), "backbone": torch.zeros(100_000)}) == 200
        manager.save(360, {"head": torch.zeros(1000)}).wait()
        assert manager.steps() == [100, 200, 360]


def test_the_same_command_ends_what_a_reader_held_up(root: Path) -> None:
    store = LocalStore(root, settings=holdfast.Settings())
    key = put_lease(store, this_process(SystemClock(), 60.0), 200, 1)
    ended = command("rm", root, 100, 200, "--grace", 0)
    assert ended.status == 2 and "removed: steps 100; " in ended.out and "step 200 stays: read by" in ended.out
    planned = json.loads(command("rm", root, 100, 200, "--dry-run", "--json").out)
    assert planned["removed"]["gone"] == ["100"] and list(planned["left"]) == ["200"]
    store.delete([key])
    ended = command("rm", root, 100, 200, "--grace", 0)
    assert ended.status == 0 and "removed: steps 200; " in ended.out
    assert "steps 100 were removed before, by a removal that did not end" in ended.out
    assert content(root) == (400, 400.0) and not mark_keys(store)
    assert command("rm", root, 100, 200, "--grace", 0).status == 2, "nothing tells of a removal that has ended"


def test_a_run_in_use_is_left_alone(root: Path) -> None:
    before = files(root)
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.load({"head": torch.zeros(1000), "backbone": torch.zeros(100_000)})
        manager.save(500, {"head": torch.zeros(1000), "backbone": FROZEN}).wait()
        with pytest.raises(holdfast.ConflictError, match="another job writes here"):
            remove_steps(root, [100], grace_seconds=0.0)
    assert files(root).items() >= {name: data for name, data in before.items() if "reports" not in name}.items()
