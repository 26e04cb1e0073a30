"""Someone reads, verifies, converts, copies and repairs steps that were saved with `compression="on"`."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.core.format import sealed_json
from holdfast.core.format.names import is_coded_pack_name, step_folder
from holdfast.errors import CorruptError, InvalidError
from holdfast.pieces import BoxReader, TensorPiece
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from tests.everyday.frozen_run import ran, step_path
from tests.unit.cli.running import holdfast as command

ON = Settings(compression="on", chunk_bytes=4 * PAGE_BYTES)
STEPS = (1, 2)


def layer_at(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in bfloat16, and the float32 masters that they were rounded from."""
    master = torch.randn(300, 257, generator=torch.Generator().manual_seed(seed)) * 0.02
    return master.to(torch.bfloat16), master


def state_at(step: int) -> dict[str, object]:
    """A state of which one layer never changes, and the other always does."""
    (frozen, frozen_master), (trained, master) = layer_at(7), layer_at(100 + step)
    return {
        "model": {"frozen.weight": frozen, "trained.weight": trained},
        "masters": {"frozen.weight": frozen_master, "trained.weight": master},
        "moments": {"trained.weight.exp_avg_sq": master.square(), "ids": torch.arange(50_000)},
        "values": {"step": step},
    }


def require_step(path: Path | str, step: int) -> None:
    """Require that a path loads as a step of the run, bit for bit, and that every byte of it verifies."""
    saved = state_at(step)
    loaded: dict[str, dict[str, object]] = {
        group: {
            name: torch.full_like(value, 9) if isinstance(value, torch.Tensor) else 0 for name, value in values.items()
        }
        for group, values in saved.items()
        if isinstance(values, dict)
    }
    holdfast.load(path, loaded, process_group=False)
    for group, values in saved.items():
        assert isinstance(values, dict)
        for name, value in values.items():
            found = loaded[group][name]
            if isinstance(value, torch.Tensor):
                assert isinstance(found, torch.Tensor) and torch.equal(found, value), name
            else:
                assert found == value
    assert list(holdfast.open_checkpoint(path).verify()) == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compressed") / "run"
    with holdfast.CheckpointManager(root, process_group=False, settings=ON) as manager:
        for step in STEPS:
            manager.save(step, state_at(step)).wait()
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy, with its hard links, of a compressed run of steps 1 and 2, of which 2 refers to packs of 1."""
    ran("cp", "-a", made, tmp_path / "run")
    return tmp_path / "run"


def coded_packs(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("coded/*.safetensors"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x01
    path.write_bytes(data)


def piece_of(step: Path, fqn: str) -> tuple[Path, int]:
    """Return the pack of a tensor's only piece, and where it begins."""
    (piece,) = holdfast.open_checkpoint(step).pieces(fqn)
    (pack,) = step.glob(f"*/{piece.pack}")
    return pack, piece.offset


def test_steps_load_and_verify(made: Path) -> None:
    for step in STEPS:
        require_step(step_path(made, step), step)
    checkpoint = holdfast.open_checkpoint(made, step=2)
    assert any(is_coded_pack_name(pack.name) for pack in checkpoint.manifest.packs)
    assert checkpoint.packs_of_other_steps, "the frozen layer stays where it is"
    (masters,) = checkpoint.pieces("masters.trained.weight")
    assert masters.coding is not None and masters.coding.pair_fqn == "model.trained.weight"
    assert masters.stored_bytes < 0.55 * masters.bytes


class CountingStore(LocalStore):
    """Counts the bytes of packs that are read."""

    read_bytes = 0

    def read_into(self, key, ranges, buffers, on_range=None):  # type: ignore[no-untyped-def]
        if key.endswith(".safetensors"):
            self.read_bytes += sum(stop - start for start, stop in ranges)
        super().read_into(key, ranges, buffers, on_range)


def test_a_part_is_read_alone(made: Path) -> None:
    """Weights need no masters; masters need their pairs; a slice needs the chunks that it meets, and their bases."""
    store = CountingStore(made, settings=ON)
    location = CheckpointLocation(store, step_folder(1), 1, root=store)
    checkpoint = Checkpoint(location, ON, lambda array, _: torch.from_numpy(array), codecs=wiring.codecs())
    (weights,), (masters,) = (checkpoint.pieces(f"{name}.trained.weight") for name in ("model", "masters"))

    def read(fqn: str, rows: slice) -> int:
        before = store.read_bytes
        found = checkpoint.read(fqn, rows, framework="torch")
        group, name = fqn.split(".", 1)
        expected = state_at(1)[group][name][rows]  # type: ignore[index]
        assert torch.equal(found.view(expected.dtype), expected)  # type: ignore[attr-defined]
        return store.read_bytes - before

    assert read("model.trained.weight", slice(None)) == weights.stored_bytes
    assert read("masters.trained.weight", slice(None)) == masters.stored_bytes + weights.stored_bytes
    row_bytes = 4 * 257
    first, last = 10 * row_bytes // ON.chunk_bytes, (21 * row_bytes - 1) // ON.chunk_bytes
    needed = {("m", number) for number in range(first, last + 1)} | {
        ("w", number // 2) for number in range(first, last + 1)
    }
    lengths = {"m": masters, "w": weights}
    needed_bytes = sum(stop - start for name, number in needed for start, stop in [lengths[name].stored_range(number)])
    assert read("masters.trained.weight", slice(10, 21)) == needed_bytes < masters.stored_bytes / 4


def test_mapped_tensors_that_are_coded_are_read(made: Path) -> None:
    mapped = holdfast.read(made, step=2, mmap=True)
    state = state_at(2)
    for group in ("model", "masters", "moments"):
        for name, value in state[group].items():  # type: ignore[attr-defined]
            assert torch.equal(mapped[group][name], value)  # type: ignore[index]


def test_boxes_are_read_into_given_memory(made: Path) -> None:
    reader = BoxReader(made, step=2)
    memory = torch.zeros(40, 257)
    reader.read([TensorPiece("masters.trained.weight", (300, 257), (100, 0), memory)])
    assert torch.equal(memory, state_at(2)["masters"]["trained.weight"][100:140])  # type: ignore[index]


@pytest.mark.parametrize("to", ("safetensors", "torch", "dcp", "holdfast"))
def test_an_export_is_of_the_values(made: Path, tmp_path: Path, to: str) -> None:
    api.export(made, tmp_path / "out", to=to, step=2, model_only=False)
    plain = replace(ON, compression="off")
    holdfast.save(tmp_path / "plain", state_at(2), process_group=False, settings=plain)
    api.export(tmp_path / "plain", tmp_path / "expected", to=to, model_only=False)
    found, expected = tmp_path / "out", tmp_path / "expected"
    if to == "holdfast":
        assert api.diff(found, expected).equal
        assert not coded_packs(found), "an export is plain unless asked otherwise"
        return
    if found.is_file():
        assert found.read_bytes() == expected.read_bytes()
        return
    names = sorted(path.relative_to(found) for path in found.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert all((found / name).read_bytes() == (expected / name).read_bytes() for name in names if to != "dcp")


def test_export_compresses_and_decompresses(made: Path, tmp_path: Path) -> None:
    step = step_path(made, 2)
    ended = command("export", step, tmp_path / "off", "--to", "holdfast", "--compression", "off")
    assert (ended.status, ended.err) == (0, "")
    assert not coded_packs(tmp_path / "off")
    ended = command("export", tmp_path / "off", tmp_path / "on", "--to", "holdfast", "--compression", "on")
    assert (ended.status, ended.err) == (0, "")
    assert coded_packs(tmp_path / "on")
    for copy in ("off", "on"):
        require_step(tmp_path / copy, 2)
        assert api.diff(step, tmp_path / copy).equal
    assert stored_bytes(tmp_path / "on") < 0.85 * stored_bytes(tmp_path / "off")
    api.export(step, tmp_path / "alike", to="holdfast", settings=replace(ON, compression="off"))
    assert api.diff(step, tmp_path / "alike").read_bytes == 0, "digests of chunks decide, however they are stored"
    refused = command("export", step, tmp_path / "torch", "--to", "torch", "--compression", "on")
    assert refused.status != 0 and "--to holdfast" in refused.err
    refused = command("export", step, tmp_path / "other", "--to", "holdfast", "--compression", "auto")
    assert refused.status != 0 and "expected on or off" in refused.err


@pytest.mark.parametrize("chunk_pages", (1, 8))
def test_what_is_compressed_on_the_way_of_a_copy_keeps_its_values(made: Path, tmp_path: Path, chunk_pages: int) -> None:
    """A copy reads its source front to back, whatever the size of the chunks that it encodes."""
    step = step_path(made, 2)
    settings = replace(ON, chunk_bytes=chunk_pages * PAGE_BYTES)
    api.export(step, tmp_path / "again", to="holdfast", settings=settings)
    assert coded_packs(tmp_path / "again")
    require_step(tmp_path / "again", 2)


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_import_compresses_what_it_copies(made: Path, tmp_path: Path) -> None:
    api.export(made, tmp_path / "plain.pt", to="torch", step=1, model_only=False)
    ended = command("import", tmp_path / "plain.pt", tmp_path / "run", "--copy", "--step", "5", "--compression", "on")
    assert (ended.status, ended.err) == (0, "")
    assert coded_packs(step_path(tmp_path / "run", 5))
    assert list(holdfast.open_checkpoint(tmp_path / "run", step=5).verify()) == []
    again = command("import", tmp_path / "run", tmp_path / "third", "--copy", "--from-step", "5")
    assert (again.status, again.err) == (0, "")
    assert api.diff(step_path(tmp_path / "run", 5), step_path(tmp_path / "third", 5)).equal
    refused = command("import", tmp_path / "plain.pt", tmp_path / "run", "--step", "6", "--compression", "on")
    assert refused.status != 0 and "--copy" in refused.err


def test_a_diff_of_two_steps_measures_what_changed(made: Path) -> None:
    found = api.diff(step_path(made, 1), step_path(made, 2))
    changed = {each.fqn for each in found.tensors if each.change is not None and each.change.changed}
    assert changed == {"model.trained.weight", "masters.trained.weight", "moments.trained.weight.exp_avg_sq"}


def test_cp_copies_packs_as_they_are(run: Path, tmp_path: Path) -> None:
    for copy, source in (("run-copy", run), ("step-copy", step_path(run, 2))):
        ended = command("cp", source, tmp_path / copy)
        assert (ended.status, ended.err) == (0, ""), ended.err
    for step in STEPS:
        require_step(step_path(tmp_path / "run-copy", step), step)
    require_step(tmp_path / "step-copy", 2)
    ours, theirs = (
        {p.name: p.read_bytes() for p in coded_packs(step_path(r, 1))} for r in (run, tmp_path / "run-copy")
    )
    assert ours == theirs


def nudged(masters: torch.Tensor) -> torch.Tensor:
    """Return other masters of the same weights."""
    low = masters.view(torch.int32) & 0xFFFF
    return (masters.view(torch.int32) + ((low > 0) & (low < 0x7FF0)).int()).view(torch.float32)


def test_packs_are_proven_by_the_values_of_a_pair_that_they_were_written_with(tmp_path: Path) -> None:
    """Masters change, weights stay in the pack of step 2; that of step 1 has earlier ones beside a frozen layer."""
    (frozen, _), (before, old), (weights, masters) = map(layer_at, (7, 8, 9))
    states = ((before, old), (weights, masters), (weights, nudged(masters)))
    assert torch.equal(nudged(masters).to(torch.bfloat16), weights)
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, process_group=False, settings=ON) as manager:
        for step, (trained, master) in enumerate(states, 1):
            state = {"model": {"frozen": frozen, "trained": trained}, "masters": {"trained": master}}
            manager.save(step, state).wait()
    (piece,) = holdfast.open_checkpoint(step_path(run, 3)).pieces("masters.trained")
    assert piece.coding is not None and piece.coding.pair is not None
    assert piece.coding.pair.pack.startswith(step_folder(2))
    assert api.copy_run(run, tmp_path / "copy").steps == 3
    loaded = holdfast.open_checkpoint(step_path(tmp_path / "copy", 3))
    assert list(loaded.verify()) == []
    assert torch.equal(loaded.read("masters.trained", framework="torch"), states[2][1])


@pytest.mark.parametrize("fqn", ("model.trained.weight", "masters.trained.weight", "moments.trained.weight.exp_avg_sq"))
def test_cp_names_the_damaged_chunk(run: Path, tmp_path: Path, fqn: str) -> None:
    pack, offset = piece_of(step_path(run, 2), fqn)
    flip(pack, offset + 300)
    ended = command("cp", run, tmp_path / "copy")
    assert ended.status != 0
    assert fqn in ended.err and pack.name in ended.err, ended.err


def test_verify_names_chunk_and_codec_and_what_is_coded_against_it(run: Path) -> None:
    step = step_path(run, 2)
    pack, offset = piece_of(step, "model.trained.weight")
    flip(pack, offset + 20)
    damages = list(holdfast.open_checkpoint(step).verify())
    weights, *against = sorted(damages, key=lambda damage: damage.fqn != "model.trained.weight")
    assert (weights.fqn, weights.start) == ("model.trained.weight", offset)
    assert "chunk 0" in weights.message and "planes" in weights.message
    assert [damage.fqn for damage in against] == ["masters.trained.weight"] * 2, "both chunks of the base"
    assert all("is coded against a damaged one" in damage.message for damage in against)
    assert all("model.trained.weight" in damage.message and pack.name in damage.message for damage in against)
    with pytest.raises(CorruptError, match=r"masters\.trained.*model\.trained\.weight.*chunk 0"):
        require_step(step, 2)


def test_a_header_that_was_changed_is_found(run: Path) -> None:
    step = step_path(run, 2)
    pack, _ = piece_of(step, "masters.trained.weight")
    flip(pack, 200)
    (damage,) = holdfast.open_checkpoint(step).verify()
    assert damage.start == 0 and damage.file.endswith(pack.name)


@pytest.mark.parametrize("from_packs", (False, True), ids=("from parts", "from packs"))
def test_the_index_is_made_again_to_the_byte(run: Path, from_packs: bool) -> None:
    step = step_path(run, 1)
    (index,), (part,) = step.glob("*/index-00000.msgpack"), step.glob("*/parts/*.msgpack")
    before, part_before = index.read_bytes(), part.read_bytes()
    flip(index, -20)
    if from_packs:
        flip(part, 60)
    with pytest.raises(CorruptError):
        holdfast.open_checkpoint(step).read("masters.trained.weight")
    (found,) = api.repair(run, step=1).steps
    assert ("packs" if from_packs else "parts") in found.done[0], found
    assert index.read_bytes() == before
    if from_packs:
        part.write_bytes(part_before)  # What the rank kept as its own cannot be rebuilt.
    require_step(step, 1)


def test_the_manifest_is_made_again_from_parts(run: Path) -> None:
    manifest = step_path(run, 2) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:700])
    (found,) = api.repair(run, step=2).steps
    assert found.outcome == "repaired", found
    require_step(step_path(run, 2), 2)


def test_a_damaged_pack_gives_way_to_a_proven_copy(run: Path, tmp_path: Path) -> None:
    """A copy without hard links has every shared pack twice: one is damaged, and the other is proven by decoding it."""
    shutil.copytree(run, tmp_path / "copied", copy_function=shutil.copyfile)
    copied = tmp_path / "copied"
    for fqn in ("masters.frozen.weight", "model.frozen.weight"):
        pack, offset = piece_of(step_path(copied, 1), fqn)
        flip(pack, offset + 30)
    (found,) = api.repair(copied, step=1).steps
    assert found.outcome == "repaired", found
    assert "proven by its digest" in found.done[0]
    for step in STEPS:
        require_step(step_path(copied, step), step)


def test_a_copy_without_links_of_coded_packs_is_copied_with_links(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "large", copy_function=shutil.copyfile)
    copied = tmp_path / "copied"
    assert api.copy_run(tmp_path / "large", copied).linked
    for step in STEPS:
        require_step(step_path(copied, step), step)


def test_a_damaged_chunk_cannot_be_mended(run: Path) -> None:
    pack, offset = piece_of(step_path(run, 2), "masters.trained.weight")
    flip(pack, offset + 30)
    (found,) = api.repair(run, step=2).steps
    assert found.outcome == "damaged" and found.lost_tensors == ("masters.trained.weight",)


def test_every_pack_is_needed(run: Path) -> None:
    """A missing pack of pairs is named, whoever needs it."""
    pack, _ = piece_of(step_path(run, 2), "model.trained.weight")
    os.unlink(pack)
    with pytest.raises(CorruptError, match=pack.name):
        holdfast.open_checkpoint(step_path(run, 2)).read("masters.trained.weight")
    assert list(itertools.islice(holdfast.open_checkpoint(step_path(run, 2)).verify(), 1))


def test_a_reader_of_an_earlier_minor_version_names_the_version(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither takes a good step for damaged nor falls back over it."""
    monkeypatch.setattr(sealed_json, "FORMAT_MINOR_MAX", 3)
    with pytest.raises(InvalidError, match=r"1\.4"):
        holdfast.open_checkpoint(step_path(run, 2))
    with (
        holdfast.CheckpointManager(run, process_group=False) as manager,
        pytest.raises(InvalidError, match=r"1\.4"),
    ):
        manager.load(state_at(0))
    assert not list(run.glob("quarantine/*"))
