"""Another system's checkpoint as a step of a run: by reference, copied, changed behind its back, and refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import api
from holdfast._face.wiring import checkpoint_at
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.types.events import Progress
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.offline.imports.import_step import import_step
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.training.coordination.job import Job
from tests.support.tuning import tuned

SETTINGS = tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=2 * PAGE_BYTES, read_window_bytes=3 * PAGE_BYTES)
STEP = 7
DEEPSPEED = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed" / "zero1_dp2" / "ckpt"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(60, 70), torch.nn.Linear(70, 30)).to(torch.bfloat16)


def blank() -> torch.nn.Module:
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(-1)
    return made


def require_model(found: torch.nn.Module) -> None:
    expected = model().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face model in two files."""
    folder = tmp_path / "models" / "hf"
    folder.mkdir(parents=True)
    weights = model().state_dict()
    weight_map = {name: SHARDS[name.startswith("1")] for name in weights}
    for shard in SHARDS:
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def step_path(root: Path, step: int = STEP) -> Path:
    return root / f"step-{step:012d}"


def allowing(*roots: Path) -> Settings:
    return replace(SETTINGS, allowed_roots=tuple(map(str, roots)))


def imported(source: Path, root: Path, **options: object) -> api.ImportReport:
    return api.import_checkpoint(source, root, **{"step": STEP, "settings": SETTINGS, **options})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ by reference


def test_a_referenced_model_is_loaded_from_where_it_lies(source: Path, root: Path) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    report = imported(source, root)
    assert (report.step, report.copied, report.allowed_roots) == (STEP, False, (str(source),))
    assert report.bytes == sum(tensor.nbytes for tensor in model().state_dict().values())
    loaded = blank()
    holdfast.load(step_path(root), {"model": loaded}, process_group=False, settings=allowing(source))
    require_model(loaded)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    # Nothing but the index and the manifest was written, and what the load reports of itself.
    written = sorted(path.name for path in step_path(root).rglob("*") if path.is_file() and "reports" not in path.parts)
    assert written == ["index-00000.msgpack", "manifest.json"]


def test_every_verb_works_on_a_referenced_step(source: Path, root: Path) -> None:
    imported(source, root)
    settings = allowing(source.parent)
    with holdfast.CheckpointManager(root, process_group=False, settings=settings) as manager:
        assert manager.steps() == [STEP]
        loaded = blank()
        assert manager.load({"model": loaded}) == STEP
        require_model(loaded)
        manager.save(STEP + 1, {"model": loaded}).wait()
    (record,) = [record for record in api.list_steps(root).steps if record.step == STEP]
    assert record.manifest is not None and record.manifest.origin == "safetensors"
    checkpoint = holdfast.open_checkpoint(step_path(root), settings=settings)
    assert list(checkpoint.verify()) == []
    assert checkpoint.written_by("model.0.weight") == {}
    assert len(checkpoint.references) == 2
    part = checkpoint.read("model.0.weight", (slice(1, 3), 5), framework="torch")
    assert isinstance(part, torch.Tensor) and torch.equal(part, model().state_dict()["0.weight"][1:3, 5])
    assert checkpoint.plan_for("fsdp=2").ranks
    parent = holdfast.open_checkpoint(step_path(root, STEP + 1)).manifest.parent
    assert parent is not None and parent.digest == checkpoint.manifest.digest
    assert holdfast.diff(step_path(root, STEP + 1), checkpoint).equal


def test_the_manifest_is_as_the_format_says(source: Path, root: Path) -> None:
    imported(source, root)
    document = json.loads((step_path(root) / "manifest.json").read_text())
    # An import takes the epoch of its root for as long as it lasts, and a manifest that names one is of 1.2.
    assert document["holdfast"] == {"format": [1, 2], "kind": "checkpoint"}
    assert document["epoch"] == 1
    assert document["origin"] == "safetensors"
    assert [(name, count) for name, count, _ in document["packs"]] == [
        (f"file://{source}/{shard}", (source / shard).stat().st_size) for shard in SHARDS
    ]
    assert document["parts"] == []
    own = holdfast.save(root.parent / "own", {"x": torch.ones(2)}, process_group=False)
    assert json.loads((root.parent / "own" / "manifest.json").read_text())["holdfast"]["format"] == [1, 0], own


# ------------------------------------------------------------------------------------------------ what changed since


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replaced_by_a_link_to_another(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    (path.parent / "other").write_bytes(data)
    path.unlink()
    path.symlink_to("other")


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (changed, r"bytes \d+–\d+ hash to"),
        (truncated, r"\d+ bytes; expected"),
        (grown, r"\d+ bytes; expected"),
        (Path.unlink, "missing"),
        (replaced_by_a_link_to_another, r"bytes \d+–\d+ hash to"),
        (replaced_by_a_folder, "missing"),
    ],
)
def test_a_file_that_changed_since_is_corrupt(
    source: Path, root: Path, damage: Callable[[Path], None], said: str
) -> None:
    imported(source, root)
    victim = source / SHARDS[1]
    damage(victim)
    settings = allowing(source)
    checkpoint = holdfast.open_checkpoint(step_path(root), settings=settings)
    with pytest.raises(CorruptError, match=said) as raised:
        checkpoint.read("model.1.weight")
        checkpoint.read("model.1.bias")
    assert str(victim) in str(raised.value)
    with pytest.raises(CorruptError, match=said) as raised:
        holdfast.load(step_path(root), {"model": blank()}, process_group=False, settings=settings)
    assert str(victim) in str(raised.value)
    damages = list(checkpoint.verify())
    assert damages and {each.file for each in damages} == {f"file://{victim}"}
    with pytest.raises(CorruptError):
        api.import_checkpoint(step_path(root), root.parent / "copy", copy=True, settings=settings)
    assert not (root.parent / "copy" / step_path(root).name / "manifest.json").exists()
    # What lies in the other file is whole, and is loaded.
    first = blank()
    holdfast.load(step_path(root), {"model": first}, only="model.0.*", process_group=False, settings=settings)
    assert torch.equal(first.state_dict()["0.weight"], model().state_dict()["0.weight"])


def test_bytes_that_no_tensor_lies_in_may_change(source: Path, root: Path) -> None:
    imported(source, root)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    assert list(holdfast.open_checkpoint(step_path(root), settings=allowing(source)).verify()) == []


# ------------------------------------------------------------------------------------------------ what is allowed


@pytest.mark.parametrize("roots", ((), ("models/h",), ("run",), ("models/hf/model-00001-of-00002.safetensors",)))
def test_nothing_is_read_outside_the_folders_that_were_allowed(
    source: Path, root: Path, tmp_path: Path, roots: tuple[str, ...]
) -> None:
    imported(source, root)
    settings = allowing(*(tmp_path / each for each in roots))
    checkpoint = holdfast.open_checkpoint(step_path(root), settings=settings)
    assert set(checkpoint.tensors) == {f"model.{name}" for name in model().state_dict()}
    calls: list[Callable[[], object]] = [
        lambda: checkpoint.read("model.0.weight"),
        lambda: list(checkpoint.verify()),
        lambda: holdfast.load(step_path(root), {"model": blank()}, process_group=False, settings=settings),
        lambda: api.import_checkpoint(step_path(root), tmp_path / "copy", copy=True, settings=settings),
        lambda: holdfast.diff(checkpoint, source),
    ]
    for call in calls:
        with pytest.raises(InvalidError, match="allowed_roots") as raised:
            call()
        assert str(source / SHARDS[0]) in str(raised.value)


def test_a_link_that_leads_out_of_what_was_allowed_is_not_followed(source: Path, root: Path, tmp_path: Path) -> None:
    imported(source, root)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(source / SHARDS[0], elsewhere)
    (source / SHARDS[0]).symlink_to(elsewhere)
    with pytest.raises(InvalidError, match="leads out of the folder"):
        holdfast.open_checkpoint(step_path(root), settings=allowing(source)).read("model.0.weight")
    # With all of it allowed the link is one within.
    checkpoint = holdfast.open_checkpoint(step_path(root), settings=allowing(tmp_path))
    assert list(checkpoint.verify()) == []


def test_a_hugging_face_cache_is_referenced_through_its_links(source: Path, root: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    imported(snapshot, root)
    for allowed in (snapshot, snapshot.parent, repository, tmp_path):
        loaded = blank()
        holdfast.load(step_path(root), {"model": loaded}, process_group=False, settings=allowing(allowed))
        require_model(loaded)


@pytest.mark.parametrize("roots", ["/models", ["/models"], (1,), ("",), ("file://",), ("a\0b",)])
def test_settings_refuse_what_is_no_tuple_of_paths(roots: object) -> None:
    with pytest.raises(InvalidError, match="allowed_roots"):
        Settings(allowed_roots=roots)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ copied


def test_a_copy_lives_on_when_the_source_is_gone(source: Path, root: Path) -> None:
    report = imported(source, root, copy=True)
    assert (report.copied, report.allowed_roots) == (True, ())
    shutil.rmtree(source)
    loaded = blank()
    with holdfast.CheckpointManager(root, process_group=False, settings=SETTINGS) as manager:
        assert manager.load({"model": loaded}) == STEP
    require_model(loaded)
    checkpoint = holdfast.open_checkpoint(step_path(root))
    assert list(checkpoint.verify()) == []
    assert (checkpoint.origin, checkpoint.references) == ("safetensors", ())
    # One piece to a tensor, in a file that any reader of safetensors opens.
    assert {len(checkpoint.pieces(fqn)) for fqn in checkpoint.tensors} == {1}


def test_a_referenced_step_is_copied_with_its_digests_checked(source: Path, root: Path, tmp_path: Path) -> None:
    imported(source, root)
    api.import_checkpoint(step_path(root), tmp_path / "copy", copy=True, settings=allowing(source))
    shutil.rmtree(source)
    copy = holdfast.open_checkpoint(step_path(tmp_path / "copy"))
    assert list(copy.verify()) == []
    assert (copy.step, copy.origin) == (STEP, "safetensors")


def test_a_checkpoint_of_our_own_is_copied_whole(root: Path, tmp_path: Path) -> None:
    trained = model().float()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.5)
    trained(torch.ones(2, 60)).sum().backward()
    optimizer.step()
    trained[0].tied = trained[1].weight  # type: ignore[index, union-attr]
    state = {
        "model": trained,
        "optimizer": optimizer,
        "rng": holdfast.RngState(),
        "epoch": 3,
        "nothing": torch.empty(0, 4),
        "halves": torch.view_as_complex(torch.randn(5, 2)).to(torch.complex128),
    }
    holdfast.save(tmp_path / "own", state, process_group=False, settings=SETTINGS)
    other_chunks = replace(SETTINGS, chunk_bytes=3 * PAGE_BYTES)
    api.import_checkpoint(tmp_path / "own", root, step=STEP, copy=True, settings=other_chunks)
    own, copy = holdfast.open_checkpoint(tmp_path / "own"), holdfast.open_checkpoint(step_path(root))
    assert list(copy.verify()) == []
    assert holdfast.diff(own, copy, full=True).equal
    assert copy.manifest.tree == own.manifest.tree and copy.aliases == own.aliases != {}
    assert copy.origin is None
    np.testing.assert_equal(copy.per_rank(0), own.per_rank(0))
    with pytest.raises(InvalidError, match="a checkpoint of Holdfast"):
        api.import_checkpoint(tmp_path / "own", root, step=STEP + 1)


def test_a_copy_of_a_step_keeps_what_the_loop_said_of_it(tmp_path: Path, root: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "first", process_group=False) as manager:
        manager.save(STEP, {"a": 1}, metrics={"loss": 0.5}).wait()
    api.import_checkpoint(step_path(tmp_path / "first"), root, copy=True)
    assert holdfast.open_checkpoint(step_path(root)).manifest.metrics == {"loss": 0.5}


def test_export_to_holdfast_is_a_checkpoint_of_our_own_by_path(source: Path, root: Path, tmp_path: Path) -> None:
    report = api.export(source, tmp_path / "out", to="holdfast", settings=SETTINGS)
    files = {
        path.relative_to(tmp_path / "out").as_posix(): path.stat().st_size for path in (tmp_path / "out").rglob("*.*")
    }
    assert report.files == files and report.format == "holdfast"
    shutil.move(source, tmp_path / "gone")
    loaded = blank()
    holdfast.load(tmp_path / "out", {"model": loaded}, process_group=False)
    require_model(loaded)
    exported = holdfast.open_checkpoint(tmp_path / "out")
    assert (list(exported.verify()), exported.step, exported.origin) == ([], None, "safetensors")
    with pytest.raises(ConflictError, match="already there"):
        api.export(tmp_path / "gone", tmp_path / "out", to="holdfast")
    for wrong in ({"dtype": "float16"}, {"workers": 2}):
        with pytest.raises(InvalidError, match="one process"):
            api.export(tmp_path / "gone", root, to="holdfast", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="outside"):
        api.export(tmp_path / "gone", tmp_path / "gone" / "in", to="holdfast")
    # And on to others from there.
    api.export(tmp_path / "out", tmp_path / "back", to="safetensors")
    assert holdfast.diff(tmp_path / "back", tmp_path / "gone", tensors="*").equal


def test_a_damaged_checkpoint_of_our_own_is_not_copied(root: Path, tmp_path: Path) -> None:
    holdfast.save(tmp_path / "own", {"model": model()}, process_group=False, settings=SETTINGS)
    (pack,) = (tmp_path / "own").rglob("*.safetensors")
    changed(pack)
    with pytest.raises(CorruptError, match=r"bytes \d+–\d+ hash to"):
        api.import_checkpoint(tmp_path / "own", root, step=STEP, copy=True)
    assert api.list_steps(root).steps == [] or not api.list_steps(root).steps[0].committed
    assert not [path for path in root.rglob("*") if path.suffix == ".safetensors"]


def test_progress_is_told_up_to_the_last_byte(source: Path, root: Path) -> None:
    class Heard:
        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []

        def on_event(self, event: Progress) -> None:
            self.calls.append((event.done_bytes, event.total_bytes))

    total = sum(tensor.nbytes for tensor in model().state_dict().values())
    for step, copied in ((1, False), (2, True)):
        heard = Heard()
        imported(source, root, step=step, copy=copied, observer=heard)
        assert heard.calls == sorted(heard.calls) and heard.calls[-1] == (total, total)


class WritesAgain:
    """Another process that saves the same model into the same file, its tensors in another order, while it is read."""

    def __init__(self, path: Path) -> None:
        self._path, self.done = path, False

    def on_event(self, event: Progress) -> None:
        if not self.done:
            self.done = True
            swap_tensors(self._path)


def swap_tensors(path: Path) -> None:
    """Replace a file by one of the same tensors and size, of which two of one size lie the other way round."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["a"], header["b"] = header["b"], header["a"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(start - 8)
    half = start + (len(data) - start) // 2
    path.with_name("new").write_bytes(data[:8] + text + data[half:] + data[start:half])
    os.replace(path.with_name("new"), path)
    assert path.stat().st_size == len(data)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A file of two tensors of a megabyte each."""
    path = tmp_path / "models" / "pair.safetensors"
    path.parent.mkdir()
    save_file({"a": torch.full((1 << 18,), 1.0), "b": torch.full((1 << 18,), 2.0)}, path)
    return path


@pytest.mark.parametrize("copied", (False, True))
def test_a_source_that_is_written_again_meanwhile_is_not_imported(pair: Path, root: Path, copied: bool) -> None:
    writer = WritesAgain(pair)
    with pytest.raises(ConflictError, match=r"pair\.safetensors: was written again"):
        imported(pair, root, copy=copied, observer=writer)
    assert writer.done
    assert not [path for path in step_path(root).rglob("*") if path.is_file()]
    imported(pair, root, copy=copied)
    found = holdfast.open_checkpoint(step_path(root), settings=allowing(pair.parent)).read("model.b")
    assert isinstance(found, np.ndarray) and (found == 2).all()


@pytest.mark.parametrize("copied", (False, True))
def test_a_source_that_was_written_again_since_it_was_listed_is_not_imported(
    pair: Path, root: Path, copied: bool
) -> None:
    listed = checkpoint_at(pair, SETTINGS)
    swap_tensors(pair)
    job = Job(AloneComm(), SystemClock(), SETTINGS)
    with pytest.raises(ConflictError, match=r"pair\.safetensors: was written again"):
        import_step(listed, LocalStore(root, settings=SETTINGS), job, STEP, copied=copied)
    job.close()
    assert not [path for path in step_path(root).rglob("*") if path.is_file()]


@pytest.mark.parametrize("copied", (False, True))
def test_what_tells_where_tensors_lie_counts_too(source: Path, root: Path, copied: bool) -> None:
    listed = checkpoint_at(source, SETTINGS)
    (source / "model.safetensors.index.json").write_text("{}")
    job = Job(AloneComm(), SystemClock(), SETTINGS)
    with pytest.raises(ConflictError, match=r"index\.json: was written again"):
        import_step(listed, LocalStore(root, settings=SETTINGS), job, STEP, copied=copied)
    job.close()


@pytest.mark.parametrize("copied", (False, True))
def test_a_run_that_goes_on_beside_what_is_imported_is_no_change(tmp_path: Path, root: Path, copied: bool) -> None:
    run = shutil.copytree(DEEPSPEED, tmp_path / "run of deepspeed")
    listed = checkpoint_at(run, SETTINGS)
    (run / "latest").write_text("global_step4")
    job = Job(AloneComm(), SystemClock(), SETTINGS)
    import_step(listed, LocalStore(root, settings=SETTINGS), job, None, copied=copied)
    job.close()


def test_a_root_may_be_given_as_a_url(source: Path, root: Path) -> None:
    imported(source, root)
    settings = replace(SETTINGS, allowed_roots=(f"file://{source}",))
    assert list(holdfast.open_checkpoint(step_path(root), settings=settings).verify()) == []


# ------------------------------------------------------------------------------------------------ which step, where


@pytest.mark.parametrize("copied", (False, True))
def test_a_step_that_exists_is_not_touched(source: Path, root: Path, copied: bool) -> None:
    imported(source, root, copy=copied)
    # The root gets records of the epochs that the refused imports took; nothing else.
    before = _files_but_epochs(root)
    for again in (False, True):
        with pytest.raises(ConflictError, match="already there"):
            imported(source, root, copy=again)
    assert _files_but_epochs(root) == before


def _files_but_epochs(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.parent != root / "epochs"}


@pytest.mark.parametrize("copied", (False, True))
def test_a_source_that_tells_no_step_needs_one(source: Path, root: Path, copied: bool) -> None:
    with pytest.raises(InvalidError, match="--step"):
        imported(source, root, step=None, copy=copied)
    with pytest.raises(InvalidError, match="expected a whole number"):
        imported(source, root, step=-1, copy=copied)
    assert not root.exists()


@pytest.mark.parametrize("copied", (False, True))
def test_it_belongs_to_the_run_it_was_imported_into(source: Path, root: Path, copied: bool) -> None:
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        manager.save(1, {"x": torch.ones(2)}).wait()
    imported(source, root, copy=copied)
    run = api.list_steps(root)
    assert run.run_id == holdfast.open_checkpoint(step_path(root)).manifest.run_id
    assert [record.step for record in run.steps] == [1, STEP]


@pytest.mark.parametrize("copied", (False, True))
def test_one_checkpoint_is_no_root(source: Path, tmp_path: Path, copied: bool) -> None:
    holdfast.save(tmp_path / "own", {"x": torch.ones(2)}, process_group=False)
    with pytest.raises(InvalidError, match="is one checkpoint"):
        imported(source, tmp_path / "own", copy=copied)


@pytest.mark.parametrize("copied", (False, True))
def test_nothing_at_the_source(tmp_path: Path, root: Path, copied: bool) -> None:
    with pytest.raises(MissingError):
        imported(tmp_path / "nothing", root, copy=copied)
    assert not root.exists()


def test_a_commit_removes_what_a_killed_import_left(source: Path, root: Path) -> None:
    left = step_path(root) / "0123456789abcdef"
    left.mkdir(parents=True)
    (left / "index-00000.msgpack").write_bytes(b"half")
    imported(source, root)
    assert not left.exists()


def test_a_name_that_is_no_text_cannot_be_referenced_but_copied(tmp_path: Path, root: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    shutil.move(tmp_path / "model.safetensors", os.fsdecode(folder))
    source = Path(os.fsdecode(folder))
    with pytest.raises(InvalidError, match="plain text"):
        imported(source, root)
    imported(source, root, copy=True)
    assert list(holdfast.open_checkpoint(step_path(root)).verify()) == []


def test_one_line_is_logged(source: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="holdfast"):
        imported(source, root)
    assert [record.message for record in caplog.records if "imported" in record.message]
