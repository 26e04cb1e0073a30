"""Repairing a damaged step: what can be proven is made again, the rest is named, nothing is thrown away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.names import step_folder
from holdfast.errors import CorruptError, MissingError
from holdfast.offline.repair.repair import Repair, StepRepair
from holdfast.stored.checkpoint.location import none_allowed
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.epochs import RELEASED
from holdfast.stored.repository.tags import put_tag, read_tags
from tests.crash.damage.damages import DAMAGES, damage_a_chunk, flip, index_of, largest_pack_of, manifest_of, truncate
from tests.crash.damage.test_resume import resumed
from tests.support.crashed_run import (
    NEW,
    NEXT,
    OLD,
    SETTINGS,
    committed_at,
    content_under,
    expected_fingerprint,
    local_store,
    require_whole,
    run_at,
    step_path,
    training_state,
)
from tests.support.tuning import tuned

SPLIT = tuned(SETTINGS, index_chunks_max=8)


def repair(store: Store, step: int = NEW, **options: bool) -> StepRepair:
    (found,) = Repair(store, none_allowed, SystemClock(), SETTINGS, **options).run(step).steps
    return found


def part_of(step: Path) -> Path:
    (found,) = step.glob("*/parts/*.msgpack")
    return found


@pytest.fixture
def root(in_memory: Path) -> Path:
    committed_at(in_memory / "root", OLD, NEW)
    return in_memory / "root"


def test_a_manifest_made_again_keeps_the_tags_of_its_step(root: Path) -> None:
    store = local_store(root)
    for name in ("release", "paper"):
        put_tag(store, NEW, name, "now")
    put_tag(store, OLD, "old", "now")
    truncate(step_path(root, NEW) / "manifest.json")
    found = repair(store)
    assert "2 tags of the previous manifest: set again" in " ".join(found.done), found
    tags = read_tags(store)
    assert set(tags.of(NEW, read_manifest(store, step_folder(NEW)).digest)) == {"release", "paper"}
    assert tags.of(OLD, read_manifest(store, step_folder(OLD)).digest) == ("old",)


def test_a_whole_step_is_left_alone(root: Path) -> None:
    before = content_under(root)
    assert repair(local_store(root)) == StepRepair(NEW, "whole", (), (), ())
    assert content_under(root) == before


@pytest.mark.parametrize("from_packs", [False, True], ids=["from-parts", "from-packs"])
@pytest.mark.parametrize("harm", [lambda path: flip(path, -20), truncate, Path.unlink], ids=["bit", "cut", "missing"])
def test_an_index_is_made_again_to_the_byte(root: Path, harm: Callable[[Path], None], from_packs: bool) -> None:
    step = step_path(root, NEW)
    before = content_under(step)
    harm(index_of(step))
    if from_packs:
        flip(part_of(step), 60)
        lost_part = part_of(step).read_bytes()
    with pytest.raises(CorruptError):
        resumed(run_at(local_store(root)), NEW)
    found = repair(local_store(root))
    assert ("packs" if from_packs else "parts") in found.done[0]
    if from_packs:
        # Everything a load needs is there again; what the rank kept as its own cannot be.
        assert found.outcome == "damaged"
        assert all("parts/r00000" in said for said in found.lost)
        part_of(step).write_bytes(before[f"{part_of(step).relative_to(step)}"])
        assert lost_part != part_of(step).read_bytes()
    else:
        assert found.outcome == "repaired"
    after = {name: data for name, data in content_under(step).items() if not name.startswith("reports/load-")}
    assert after == before
    assert repair(local_store(root)).outcome == "whole"
    require_whole(root, {OLD, NEW})


@pytest.mark.parametrize("offset", [5, 300, 2000, -50, -20, -3, -1])
def test_a_flipped_bit_in_a_manifest_is_put_right(root: Path, offset: int) -> None:
    before = content_under(root)
    flip(manifest_of(step_path(root, NEW)), offset)
    damaged = manifest_of(step_path(root, NEW)).read_bytes()
    found = repair(local_store(root))
    assert (found.outcome, found.lost) == ("repaired", ())
    after = content_under(root)
    key = f"{step_path(root, NEW).name}/manifest.json"
    if offset < 0:
        # Its digest was hurt, so that no bit proves another: it is rebuilt and published under the epoch of the repair.
        assert told(after.pop(key)) == told(before.pop(key))
    assert {name: after[name] for name in before if not name.startswith("epochs/")} == {
        name: data for name, data in before.items() if not name.startswith("epochs/")
    }
    (kept,) = [name for name in after if name.startswith("quarantine/")]
    assert after[kept] == damaged
    require_whole(root, {OLD, NEW})


def told(manifest: bytes) -> dict[str, object]:
    return {name: value for name, value in json.loads(manifest).items() if name not in ("epoch", "digest")}


@pytest.mark.parametrize("bytes_left", [0, 40, 700, -10])
def test_a_manifest_cut_short_is_rebuilt_from_parts(root: Path, bytes_left: int) -> None:
    manifest = manifest_of(step_path(root, NEW))
    saved = holdfast.open_checkpoint(step_path(root, NEW))
    before = (saved.objects, saved.tensors, saved.aliases, saved.manifest.packs, saved.manifest.parts)
    manifest.write_bytes(manifest.read_bytes()[:bytes_left])
    found = repair(local_store(root))
    assert found.outcome == "repaired", found
    assert "rebuilt from 1 parts" in found.done[0]
    again = holdfast.open_checkpoint(step_path(root, NEW))
    assert before == (
        again.objects,
        again.tensors,
        again.aliases,
        again.manifest.packs,
        again.manifest.parts,
    )
    require_whole(root, {OLD, NEW})


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_a_step_that_was_resumed_past_is_taken_again_once_it_is_whole(root: Path, kind: str) -> None:
    DAMAGES[kind](step_path(root, NEW))
    assert resumed(run_at(local_store(root)))[0] == OLD
    found = repair(local_store(root))
    mendable = kind.startswith(("manifest", "index"))
    assert found.outcome == ("repaired" if mendable else "damaged")
    taken = NEW if mendable else OLD
    assert resumed(run_at(local_store(root))) == (taken, expected_fingerprint(taken))
    records = list((root / "quarantine").glob("step-*.????????????????.json"))
    assert len(records) == (0 if mendable else 1)


def test_what_is_lost_in_a_pack_is_told_by_tensor(root: Path) -> None:
    step = step_path(root, NEW)
    damage_a_chunk(step)
    index_of(step).unlink()
    found = repair(local_store(root))
    assert found.outcome == "damaged"
    assert "index: rebuilt from parts" in found.done
    assert len(found.lost_tensors) == 1
    assert "hashes to" in found.lost[0]
    others = [name for name in holdfast.open_checkpoint(step).tensors if name not in found.lost_tensors]
    assert others
    for name in others:
        holdfast.open_checkpoint(step).read(name)


def test_nothing_is_vouched_for_that_nothing_proves(root: Path) -> None:
    """Index, part and pack damaged: digests made anew would be those of damaged bytes."""
    step = step_path(root, NEW)
    damage_a_chunk(step)
    pack = largest_pack_of(step).name
    index_of(step).unlink()
    part_of(step).unlink()
    before = content_under(root)
    found = repair(local_store(root))
    assert found.outcome == "damaged"
    assert pack in found.lost[0]
    assert found.lost_tensors
    assert content_under(root) == before


def test_a_manifest_without_parts_is_not_made_up(root: Path) -> None:
    step = step_path(root, NEW)
    truncate(manifest_of(step))
    part_of(step).unlink()
    before = content_under(root)
    found = repair(local_store(root))
    assert (found.outcome, found.done) == ("damaged", ())
    assert "part" in found.lost[0] or "how many ranks" in found.lost[0]
    assert content_under(root) == before


def test_a_part_that_nothing_proves_is_not_believed(root: Path) -> None:
    step = step_path(root, NEW)
    manifest_of(step).write_bytes(b"")
    data = part_of(step).read_bytes()
    # A plausible value that nobody saved: the text of the state, one digit changed.
    at = data.index(b'"step":20')
    flip(part_of(step), at + len(b'"step":2'))
    found = repair(local_store(root))
    assert (found.outcome, found.done) == ("damaged", ())
    assert "nothing proves" in found.lost[0]


def test_a_step_that_was_copied_to_another_number_stays_damaged(root: Path) -> None:
    step_path(root, OLD).rename(step_path(root, 40))
    found = repair(local_store(root), 40)
    assert found.outcome == "damaged"
    assert f"of step {OLD}" in found.lost[0]


def test_an_unfinished_attempt_is_told_and_not_adopted(root: Path) -> None:
    manifest_of(step_path(root, NEW)).unlink()
    before = content_under(root)
    assert repair(local_store(root)).outcome == "unfinished"
    assert content_under(root) == before


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_a_dry_run_tells_the_same_and_writes_nothing(root: Path, kind: str) -> None:
    DAMAGES[kind](step_path(root, NEW))
    before = content_under(root)
    told = repair(local_store(root), dry_run=True)
    assert content_under(root) == before
    assert repair(local_store(root)) == told


def test_an_index_that_was_split_otherwise_comes_as_one_file(in_memory: Path) -> None:
    root = in_memory / "root"
    run = run_at(local_store(root), settings=SPLIT)
    run.save(NEW, training_state(NEW)).wait()
    run.close()
    step = step_path(root, NEW)
    indexes = sorted(step.glob("*/index-*.msgpack"))
    assert len(indexes) > 2
    indexes[1].unlink()
    found = repair(local_store(root))
    assert found.outcome == "repaired"
    assert "as one file" in found.done[0]
    assert len(list(step.glob("*/index-*.msgpack"))) == 1
    assert not list(step.glob("*/overview.msgpack"))
    require_whole(root, {NEW})
    assert json.loads(manifest_of(step).read_text())["step"] == NEW


@pytest.fixture
def restored(root: Path) -> Path:
    """A root of which the newest step was away while another writer took over."""
    step_path(root, NEW).rename(root.parent / "aside")
    (root / "epochs" / "000000000001.beat").write_bytes(RELEASED)
    committed_at(root, NEXT)
    (root.parent / "aside").rename(step_path(root, NEW))
    assert run_at(local_store(root)).steps() == [OLD, NEXT]
    return root


def test_a_step_that_was_restored_after_a_takeover_is_taken_in(restored: Path) -> None:
    before = content_under(restored)
    with pytest.raises(MissingError, match=r"was moved away and back.*holdfast repair ROOT --step N --unfinished"):
        resumed(run_at(local_store(restored)), NEW)
    assert repair(local_store(restored)).outcome == "unfinished"
    assert repair(local_store(restored), unfinished=True, dry_run=True).outcome == "repaired"
    assert content_under(restored) == before
    found = repair(local_store(restored), unfinished=True)
    assert (found.outcome, found.done) == ("repaired", ("manifest.json: was fenced off, and is published again",))
    require_whole(restored, {OLD, NEW, NEXT})
    assert repair(local_store(restored), unfinished=True).outcome == "whole"


def test_one_that_is_not_whole_is_not_taken_in(restored: Path) -> None:
    pack = largest_pack_of(step_path(restored, NEW))
    flip(pack, pack.stat().st_size // 2)
    before = content_under(restored)
    found = repair(local_store(restored), unfinished=True)
    assert (found.outcome, found.done) == ("unfinished", ())
    assert found.lost_tensors
    after = content_under(restored)
    assert {name: after[name] for name in before if name.startswith("step-")} == {
        name: data for name, data in before.items() if name.startswith("step-")
    }
    assert run_at(local_store(restored)).steps() == [OLD, NEXT]
