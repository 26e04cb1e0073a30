"""What has not changed is stored once: what a save leaves out, where it says it lies, and what becomes of that."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import manifest_key, step_folder
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.publish import packs_named_by
from holdfast.stored.repository.quarantine import identity_at, quarantine
from tests.support.tuning import tuned

MIB = 1 << 20
SMALL = tuned(Settings(chunk_bytes=4096), window_bytes=8192, unchanged_bytes_min=4096)
UNLINKED = replace(SMALL, link_unchanged=False)
"""As on storage without hard links."""
Tensors = dict[str, torch.Tensor]


def manager_at(root: Path, settings: Settings = SMALL, *, start_over: bool = False) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, start_over=start_over, process_group=False, settings=settings)


def saved(manager: holdfast.CheckpointManager, step: int, state: dict[str, object]) -> SaveReport:
    report = manager.save(step, state).wait()
    assert isinstance(report, SaveReport)
    return report


def step_path(root: Path, step: int) -> Path:
    return root / step_folder(step).rstrip("/")


def bytes_under(folder: Path) -> int:
    """Bytes of the files that have no name elsewhere."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink == 1)


def packs_at(root: Path, step: int) -> list[str]:
    return [pack.name for pack in holdfast.open_checkpoint(step_path(root, step)).manifest.packs]


def steps_under(root: Path, step: int) -> list[int]:
    """The other steps that a step refers to."""
    return list(holdfast.open_checkpoint(step_path(root, step)).packs_of_other_steps)


def weights(seed: int, count: int = 4) -> Tensors:
    chance = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(3000, generator=chance) for number in range(count)}


def require_same(root: Path, step: int, state: Tensors) -> None:
    loaded = {name: torch.full_like(tensor, 9) for name, tensor in state.items()}
    holdfast.load(step_path(root, step), loaded, process_group=False)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
    assert list(holdfast.open_checkpoint(step_path(root, step)).verify()) == []


def test_of_a_frozen_model_and_its_adapter_the_second_save_writes_little_more_than_the_adapter(tmp_path: Path) -> None:
    base = {f"layer{number}": torch.randn(5 * MIB // 4) for number in range(20)}
    adapter = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    state = {"base": base, "adapter": adapter, "optimizer": optimizer}
    with manager_at(tmp_path, Settings()) as manager:
        first = saved(manager, 1, state)
        adapter.weight.grad = torch.ones_like(adapter.weight)
        optimizer.step()
        second = saved(manager, 2, state)
    assert first.bytes == 101 * MIB
    assert (second.bytes, second.unchanged_bytes) == (MIB, 100 * MIB)
    assert bytes_under(step_path(tmp_path, 2)) < 2 * MIB
    assert list(holdfast.open_checkpoint(step_path(tmp_path, 2)).verify()) == []
    assert holdfast.open_checkpoint(step_path(tmp_path, 2)).written_by("base.layer3") == {0: 1}


@pytest.mark.parametrize("how", ["copy", "lazy", "awaited"])
def test_in_every_way_of_taking_a_state(tmp_path: Path, how: str) -> None:
    staging, arena_bytes_max = ("lazy" if how == "lazy" else "copy"), (0 if how == "awaited" else None)
    settings = replace(SMALL, staging=staging, arena_bytes_max=arena_bytes_max)
    trained = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    base = weights(0)
    state = {"base": base, "trained": trained, "optimizer": optimizer}
    with manager_at(tmp_path, settings) as manager:
        saved(manager, 1, state)
        trained.weight.grad = torch.ones_like(trained.weight)
        optimizer.step()
        report = saved(manager, 2, state)
        weight = trained.weight.detach().clone()
    assert report.staging == ("none" if how == "awaited" else how)
    assert report.unchanged_bytes == sum(tensor.nbytes for tensor in base.values())
    checkpoint = holdfast.open_checkpoint(step_path(tmp_path, 2))
    assert torch.equal(torch.as_tensor(checkpoint.read("trained.weight")), weight)
    for name, tensor in base.items():
        assert torch.equal(torch.as_tensor(checkpoint.read(f"base.{name}")), tensor)


def test_a_state_of_which_nothing_changed_writes_no_pack(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        report = saved(manager, 2, state)
    assert (report.bytes, report.tensors) == (0, 0)
    assert not list(step_path(tmp_path, 2).rglob("*.safetensors"))
    require_same(tmp_path, 2, state)


def test_a_reference_is_to_the_pack_that_holds_the_bytes(tmp_path: Path) -> None:
    state = weights(2)
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            saved(manager, step, state)
            state[f"w{step - 1}"].add_(1)
    # w0 changed after step 1, w1 after step 2, w2 after step 3, and w3 never.
    assert [steps_under(tmp_path, step) for step in (1, 2, 3, 4)] == [[], [1], [1, 2], [1, 2, 3]]
    pieces = {name: holdfast.open_checkpoint(step_path(tmp_path, 4)).pieces(name)[0].pack for name in state}
    assert [pieces[f"w{number}"][:17] for number in range(4)] == [
        "step-000000000002", "step-000000000003", "r00000.safetensor", "step-000000000001",
    ]  # fmt: skip


@pytest.mark.parametrize("where", [0, 1, 4095, 4096, 8191, -1])
def test_one_byte_that_changed_is_found_wherever_it_lies(tmp_path: Path, where: int) -> None:
    tensor = torch.zeros(30_001, dtype=torch.uint8)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, {"t": tensor})
        tensor[where] = 1
        assert saved(manager, 2, {"t": tensor}).unchanged_bytes == 0
        tensor[where] = 0
        assert saved(manager, 3, {"t": tensor}).unchanged_bytes == 0
        assert saved(manager, 4, {"t": tensor}).unchanged_bytes == 30_001
    require_same(tmp_path, 4, {"t": tensor})
    assert steps_under(tmp_path, 4) == [3]


@pytest.mark.parametrize(
    "other",
    [
        lambda tensor: tensor.reshape(60, 50),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: torch.cat([tensor, tensor]),
    ],
    ids=["another shape", "another dtype", "more of it"],
)
def test_what_is_another_tensor_under_the_same_name_is_written(
    tmp_path: Path, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = torch.randn(3000)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, {"t": tensor})
        assert saved(manager, 2, {"t": other(tensor)}).unchanged_bytes == 0


def test_small_pieces_are_written_every_time(tmp_path: Path) -> None:
    state = {"small": torch.zeros(1023), "large": torch.zeros(1024)}
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        report = saved(manager, 2, state)
    assert (report.bytes, report.unchanged_bytes) == (4092, 4096)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    settings = replace(SMALL, deduplicate=False)
    with manager_at(tmp_path, settings) as manager:
        saved(manager, 1, weights(1))
        assert saved(manager, 2, weights(1)).unchanged_bytes == 0
    packs = json.loads((step_path(tmp_path, 2) / "manifest.json").read_bytes())["packs"]
    assert not [name for name, *_ in packs if name.startswith("step-")]


def test_a_manifest_states_the_lowest_version_that_has_what_it_says(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        for step in (1, 2):
            saved(manager, step, weights(1))
    holdfast.save(tmp_path / "alone", {"weights": torch.ones(3)}, process_group=False)
    folders = [tmp_path / "alone", *(step_path(tmp_path, step) for step in (1, 2))]
    said = [json.loads((folder / "manifest.json").read_bytes())["holdfast"] for folder in folders]
    assert [each["format"] for each in said] == [[1, 0], [1, 2], [1, 2]], "a step of a run says its epoch"


def test_a_manager_that_loaded_nothing_refers_to_nothing(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        saved(manager, 1, weights(1))
    with manager_at(tmp_path, start_over=True) as manager:
        assert saved(manager, 2, weights(1)).unchanged_bytes == 0


@pytest.mark.parametrize("index_chunks_max", [1 << 17, 2], ids=["one index file", "several"])
def test_what_was_loaded_is_referred_to(tmp_path: Path, index_chunks_max: int) -> None:
    settings = tuned(SMALL, index_chunks_max=index_chunks_max)
    state = weights(1, 12)
    with manager_at(tmp_path, settings) as manager:
        saved(manager, 1, state)
        state["w0"].add_(1)
        saved(manager, 2, state)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with manager_at(tmp_path, settings) as manager:
        assert manager.load(loaded) == 2
        loaded["w1"].add_(1)
        report = saved(manager, 3, loaded)
    assert report.bytes == 12_000
    assert steps_under(tmp_path, 3) == [1, 2]
    require_same(tmp_path, 3, loaded)


def test_a_step_of_a_larger_number_may_be_referred_to(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 9, state)
        saved(manager, 5, state)
    assert steps_under(tmp_path, 5) == [9]
    require_same(tmp_path, 5, state)


def test_a_step_never_refers_to_itself(tmp_path: Path) -> None:
    """A step that was loaded, removed by hand and is saved anew: what it held before is on its way out."""
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        (step_path(tmp_path, 1) / "manifest.json").unlink()
        assert saved(manager, 1, state).unchanged_bytes == 0
    assert steps_under(tmp_path, 1) == []
    require_same(tmp_path, 1, state)
    assert len(list(step_path(tmp_path, 1).glob("*/r00000.safetensors"))) == 1


def test_what_was_removed_by_hand_is_written_again(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path, UNLINKED) as manager:
        saved(manager, 1, state)
        saved(manager, 2, state)
        shutil.rmtree(step_path(tmp_path, 1))
        assert saved(manager, 3, state).unchanged_bytes == 0
        assert saved(manager, 4, state).unchanged_bytes == 48_000
    require_same(tmp_path, 4, state)
    damages = list(holdfast.open_checkpoint(step_path(tmp_path, 2)).verify())
    assert [damage.file for damage in damages] == packs_at(tmp_path, 2)
    assert "step 1" in damages[0].message and "step 2" in damages[0].message


def spoil(root: Path, step: int, tensor: torch.Tensor) -> None:
    """Turn one bit of a tensor where a step holds it, in its second chunk."""
    (pack,) = step_path(root, step).glob("*/r00000.safetensors")
    data = bytearray(pack.read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 5000] ^= 1
    pack.write_bytes(data)


def test_what_a_load_did_not_read_is_written_anew_for_it_may_be_damaged(tmp_path: Path) -> None:
    """A frozen base comes from elsewhere at every resume: that the run holds it rotten is met by nobody."""
    base, adapter = torch.randn(3000), torch.randn(3000)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, {"base": base, "adapter": adapter})
    spoil(tmp_path, 1, base)
    with manager_at(tmp_path) as manager:
        assert manager.load({"base": base, "adapter": torch.zeros(3000)}, skip=["base"]) == 1
        assert saved(manager, 2, {"base": base, "adapter": adapter}).unchanged_bytes == adapter.nbytes
        assert saved(manager, 3, {"base": base, "adapter": adapter}).unchanged_bytes == base.nbytes + adapter.nbytes
    for step in (2, 3):
        require_same(tmp_path, step, {"base": base, "adapter": adapter})
    assert steps_under(tmp_path, 3) == [1, 2]


def test_nothing_under_quarantine_is_referred_to(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        for step in (1, 2):
            saved(manager, step, state)
            state["w0"].add_(1)
        spoil(tmp_path, 1, state["w3"])
        with manager_at(tmp_path) as reader, pytest.raises(CorruptError, match="all 2 committed steps are damaged"):
            reader.load(dict(weights(2)))
        assert saved(manager, 3, state).unchanged_bytes == 0
        assert saved(manager, 4, state).unchanged_bytes == 48_000
    require_same(tmp_path, 4, state)
    assert steps_under(tmp_path, 4) == [3]


def test_no_pack_that_a_step_under_quarantine_names_is_referred_to(tmp_path: Path) -> None:
    """Only step 2 was looked at: what is damaged lies in step 1, and step 3 refers to it too."""
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        for step in (2, 3):
            state["w0"].add_(1)
            saved(manager, step, state)
        spoil(tmp_path, 1, state["w3"])
        store = LocalStore(tmp_path, settings=SMALL)
        key = manifest_key(2)
        quarantine(store, 2, key, identity_at(store, key), "w3 is damaged", "now")
        assert saved(manager, 4, state).unchanged_bytes == 12_000
    require_same(tmp_path, 4, state)
    assert steps_under(tmp_path, 4) == [3]


def test_after_a_load_that_failed_everything_is_written_anew(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        spoil(tmp_path, 1, state["w3"])
        with pytest.raises(CorruptError):
            manager.load(dict(weights(2)), 1)
        assert saved(manager, 2, state).unchanged_bytes == 0
    require_same(tmp_path, 2, state)


@pytest.mark.parametrize("harm", ["removed", "cut", "longer"])
def test_a_pack_of_another_step_that_is_not_whole_is_refused_by_both_names(tmp_path: Path, harm: str) -> None:
    state = weights(1)
    with manager_at(tmp_path, UNLINKED) as manager:
        saved(manager, 1, state)
        saved(manager, 2, state)
    (pack,) = step_path(tmp_path, 1).glob("*/r00000.safetensors")
    if harm == "removed":
        pack.unlink()
    else:
        os.truncate(pack, pack.stat().st_size + (1 if harm == "longer" else -1))
    with manager_at(tmp_path) as manager, pytest.raises(CorruptError, match=r"belongs to step 1, and step 2 refers"):
        manager.load({name: torch.zeros_like(tensor) for name, tensor in state.items()}, 2)
    with pytest.raises(CorruptError, match="belongs to step 1, and step 2 refers"):
        holdfast.open_checkpoint(step_path(tmp_path, 2)).read("w3")


def test_a_pack_removed_while_a_save_is_under_way_fails_it_and_the_next_is_whole(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path, UNLINKED) as manager:
        saved(manager, 1, state)
        gate = threading.Event()
        blocked = manager._job.commits.submit(lambda: gate.wait(30.0))
        handle = manager.save(2, state)
        shutil.rmtree(step_path(tmp_path, 1))
        gate.set()
        blocked.result()
        with pytest.raises(CorruptError, match="belongs to step 1, and step 2 refers"):
            handle.wait()
        assert manager.steps() == []
        assert saved(manager, 3, state).unchanged_bytes == 0
    require_same(tmp_path, 3, state)


def test_two_saves_on_their_way_at_once_refer_to_the_last_that_is_committed(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        gate = threading.Event()
        manager._job.commits.submit(lambda: gate.wait(30.0))
        state["w0"].add_(1)
        handles = [manager.save(step, state) for step in (2, 3)]
        gate.set()
        assert [each.wait().unchanged_bytes for each in handles] == [36_000, 36_000]
        assert saved(manager, 4, state).unchanged_bytes == 48_000
    assert [steps_under(tmp_path, step) for step in (2, 3, 4)] == [[1], [1], [1, 3]]
    for step in (2, 3, 4):
        require_same(tmp_path, step, state)


def test_sweeping_leaves_what_another_step_refers_to(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        saved(manager, 2, state)
    old = step_path(tmp_path, 1) / holdfast.open_checkpoint(step_path(tmp_path, 1)).manifest.attempt
    (step_path(tmp_path, 1) / "manifest.json").unlink()
    with manager_at(tmp_path, start_over=True) as manager:
        saved(manager, 1, weights(5))
    # Its index and part are gone, the pack is there.
    assert [path.name for path in old.rglob("*") if path.is_file()] == ["r00000.safetensors"]
    require_same(tmp_path, 2, state)
    require_same(tmp_path, 1, weights(5))


def test_nothing_is_swept_while_a_manifest_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager_at(tmp_path) as manager:
        saved(manager, 1, weights(1))
        saved(manager, 2, weights(1))
    old = step_path(tmp_path, 1) / holdfast.open_checkpoint(step_path(tmp_path, 1)).manifest.attempt
    (step_path(tmp_path, 1) / "manifest.json").unlink()
    os.truncate(step_path(tmp_path, 2) / "manifest.json", 100)
    with manager_at(tmp_path, start_over=True) as manager:
        saved(manager, 1, weights(5))
    assert len([path for path in old.rglob("*") if path.is_file()]) == 3
    assert "stay for now" in caplog.text


def test_a_step_behind_a_link_finds_its_run(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path / "run") as manager:
        saved(manager, 1, state)
        saved(manager, 2, state)
    (tmp_path / "latest").symlink_to(step_path(tmp_path / "run", 2))
    assert list(holdfast.open_checkpoint(tmp_path / "latest").verify()) == []


def test_a_step_taken_out_of_its_run_says_what_it_lacks(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path / "run", UNLINKED) as manager:
        saved(manager, 1, state)
        saved(manager, 2, state)
    shutil.copytree(step_path(tmp_path / "run", 2), tmp_path / "alone")
    with pytest.raises(InvalidError, match="there is no run around it"):
        holdfast.open_checkpoint(tmp_path / "alone").read("w0")
    with pytest.raises(InvalidError, match="there is no run around it"):
        holdfast.load(tmp_path / "alone", {"w0": torch.zeros(3000)}, process_group=False)


def harmed_parent(folder: Path, harm: str) -> AbstractContextManager[None]:
    if harm == "a link in the way":
        (folder / "epochs").symlink_to("/nowhere")
        return nullcontext()
    return unlistable(folder)


@contextmanager
def unlistable(folder: Path) -> Iterator[None]:
    """A folder of which this user knows only what lies in it by name; root, who may list all, is somebody else here."""
    own = os.geteuid()
    folder.chmod(0o111)
    try:
        if own == 0:
            os.seteuid(65534)
        yield
    finally:
        if own == 0:
            os.seteuid(own)
        folder.chmod(0o755)


@pytest.mark.parametrize("harm", ["a link in the way", "not listed"])
def test_a_step_that_needs_nothing_around_it_opens_wherever_it_lies(harm: str) -> None:
    state = weights(1)
    # A temporary folder of pytest is its owner's alone.
    with TemporaryDirectory() as made:
        top = Path(made)
        top.chmod(0o755)
        with manager_at(top / "run", replace(UNLINKED, file_mode=0o644)) as manager:
            saved(manager, 1, state)
            saved(manager, 2, state)
        alone = top / "alone"
        for step in (1, 2):
            shutil.copytree(step_path(top / "run", step), step_path(alone, step))
        for path in alone.rglob("*"):
            path.chmod(0o755)
        with harmed_parent(alone, harm):
            require_same(alone, 1, state)
            with pytest.raises(InvalidError, match="could not list"):
                holdfast.open_checkpoint(step_path(alone, 2))


@pytest.mark.parametrize("way", ["export", "import"])
def test_a_copy_is_whole_without_the_run(tmp_path: Path, way: str) -> None:
    state = weights(1)
    with manager_at(tmp_path / "run") as manager:
        saved(manager, 1, state)
        state["w2"].add_(1)
        saved(manager, 2, state)
    source = step_path(tmp_path / "run", 2)
    if way == "export":
        copy = tmp_path / "copy"
        holdfast.api.export(source, copy, to="holdfast", settings=SMALL)
    else:
        holdfast.import_checkpoint(source, tmp_path / "other", copy=True, settings=SMALL)
        copy = step_path(tmp_path / "other", 2)
    made = holdfast.open_checkpoint(copy)
    assert holdfast.diff(source, copy).equal
    shutil.rmtree(tmp_path / "run")
    assert not made.packs_of_other_steps
    assert list(made.verify()) == []


def test_other_formats_are_written_of_a_step_that_refers_to_others(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path / "run") as manager:
        saved(manager, 1, state)
        saved(manager, 2, state)
    holdfast.api.export(step_path(tmp_path / "run", 2), tmp_path / "out", to="safetensors", model_only=False, workers=2)
    read = holdfast.open_checkpoint(tmp_path / "out")
    for name, tensor in state.items():
        assert torch.equal(torch.as_tensor(read.read(f"model.{name}")), tensor)


def test_differences_are_told_without_reading_what_both_refer_to(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        state["w2"].add_(1)
        saved(manager, 2, state)
    found = holdfast.diff(step_path(tmp_path, 1), step_path(tmp_path, 2))
    assert [each.fqn for each in found.tensors if each.verdict is not holdfast.api.Verdict.EQUAL] == ["w2"]
    assert (found.read_bytes, found.settled_bytes) == (2 * 12_000, 3 * 12_000)


def test_what_an_import_by_reference_holds_is_written_once_it_is_saved(tmp_path: Path) -> None:
    """Files of another system may go; a run does not come to depend on them for good."""
    foreign = tmp_path / "foreign.safetensors"
    state = weights(1)
    save_file(state, foreign)
    holdfast.import_checkpoint(foreign, tmp_path / "run", step=1)
    settings = tuned(
        Settings(chunk_bytes=MIB, allowed_roots=(str(tmp_path),)), window_bytes=MIB, unchanged_bytes_min=4096
    )
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with manager_at(tmp_path / "run", settings) as manager:
        assert manager.load({"model": loaded}) == 1
        assert saved(manager, 2, {"model": loaded}).unchanged_bytes == 0
    foreign.unlink()
    checkpoint = holdfast.open_checkpoint(step_path(tmp_path / "run", 2))
    assert list(checkpoint.verify()) == []
    assert torch.equal(torch.as_tensor(checkpoint.read("model.w2")), state["w2"])


def test_packs_that_manifests_name(tmp_path: Path) -> None:
    state = weights(1)
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3):
            saved(manager, step, state)
            state[f"w{step}"].add_(1)
    store = LocalStore(tmp_path, settings=SMALL)
    manifests = {step: read_manifest(store, step_folder(step)) for step in (1, 2, 3)}
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")}
    own = {step: next(name for name in there if name.startswith(step_folder(step))) for step in (1, 2, 3)}
    assert packs_named_by(manifests.values()) == there
    assert packs_named_by([manifests[1]]) == {own[1]}
    assert packs_named_by([manifests[2]]) == {own[1], own[2]}
    assert packs_named_by([manifests[3]]) == there
    assert packs_named_by([]) == frozenset()


def test_what_is_no_number_is_counted_where_it_is_left_too(tmp_path: Path) -> None:
    """A broken state that is saved twice is as broken the second time."""
    settings = replace(SMALL, count_nonfinite=True)
    state = weights(1)
    state["w1"][7] = float("nan")
    with manager_at(tmp_path, settings) as manager:
        saved(manager, 1, state)
        assert saved(manager, 2, state).unchanged_bytes == 48_000
    health = [holdfast.open_checkpoint(step_path(tmp_path, step)).manifest.health for step in (1, 2)]
    assert health[0] is not None and health[0].nonfinite == {"w1": 1}
    assert health[1] is not None and health[1].nonfinite == {"w1": 1}


def test_a_base_that_made_room_for_a_newer_timeline_is_referred_to(tmp_path: Path) -> None:
    state: dict[str, object] = {**weights(0)}
    with manager_at(tmp_path) as manager:
        for step in (1, 2):
            saved(manager, step, state)
        digest = read_manifest(LocalStore(tmp_path, settings=SMALL), step_folder(2)).digest
        manager.load(state, 1)
        saved(manager, 2, state)
        manager.load(state, f"2@{digest}")
        report = saved(manager, 3, state)
    assert report.unchanged_bytes == 4 * 12_000
    require_same(tmp_path, 3, weights(0))
