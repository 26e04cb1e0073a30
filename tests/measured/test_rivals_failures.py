"""Failures measured in other checkpointers, each a test that ours does not share them, named after what must hold."""

from __future__ import annotations

import errno
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.core.format import digest, manifest
from holdfast.core.format.index.index_file import encode_index
from holdfast.core.format.values import values
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.settings import PAGE_BYTES, Settings
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, FaultySyscalls, raise_error
from tests.support.crashed_run import (
    MANIFEST,
    NEW,
    NEXT,
    OLD,
    SETTINGS,
    attempted,
    committed_at,
    content_under,
    in_child,
    local_store,
    require_whole,
    run_at,
    step_path,
    training_state,
)
from tests.support.tuning import tuned

DEFAULTS = Settings()


# ---------------------------------------------------------------- what is reported as saved is saved


@pytest.mark.parametrize("at", range(1, 8))
def test_failed_writer_thread_never_reports_success(tmp_path: Path, at: int) -> None:
    """DCP with `thread_count=4`: one writer thread failed, `save()` succeeded with 2 of 8 tensors stored."""
    root = tmp_path / "root"
    committed_at(root, OLD)
    faults = Faults(raise_error(UnavailableError), at=at, names={"upload.write"})
    run = run_at(FaultyStore(local_store(root), faults))
    _, error = attempted(run, NEW, training_state(NEW))
    assert faults.met == 1
    assert isinstance(error, UnavailableError)
    assert "upload.write" in str(error)
    assert run.steps() == [OLD]
    require_whole(root, {OLD})


class Boom(Exception):
    """An error that no checkpointer knows."""


def test_an_unknown_error_in_a_writer_thread_never_reports_success(tmp_path: Path) -> None:
    def fail(operation: FaultPoint) -> None:
        raise Boom("in a thread")

    run = run_at(FaultyStore(local_store(tmp_path / "root"), Faults(fail, at=2, names={"upload.write"})))
    handle, error = attempted(run, NEW, training_state(NEW))
    assert handle is not None
    assert isinstance(error, UnavailableError)
    assert "Boom" in str(error)
    assert run.steps() == []


def test_crash_during_save_never_destroys_previous(tmp_path: Path) -> None:
    """DCP's default `overwrite=True`: a crash while the same path was saved again destroyed what was there."""
    path = tmp_path / "checkpoint"
    holdfast.save(path, training_state(OLD))
    before = content_under(path)
    with pytest.raises(ConflictError, match="already there"):
        holdfast.save(path, training_state(NEW))
    assert content_under(path) == before, "what is committed is never written to, so no crash can destroy it"


def test_an_old_step_survives_whatever_the_next_one_meets(tmp_path: Path) -> None:
    """Others deleted the old checkpoint before the new one was durable."""
    root = tmp_path / "root"
    committed_at(root, OLD)
    faults = Faults()
    run = run_at(local_store(root, faults))
    run.save(NEW, training_state(NEW)).wait()
    touching = ("unlink", "rmdir", "rename", "pwrite", "ftruncate", "fallocate", "link", "mkdir")
    old = step_path(root, OLD).name
    assert not [each for each in faults.seen if each.name in touching and old in each.subject]


def test_interrupted_checkpoint_is_never_chosen_on_resume(tmp_path: Path) -> None:
    """HF Trainer writes straight into `checkpoint-N`; the largest N is chosen, whole or not."""
    root = tmp_path / "root"
    committed_at(root, OLD, NEW)
    (step_path(root, NEW) / MANIFEST).unlink()
    step_path(root, NEXT).mkdir()
    with holdfast.CheckpointManager(root) as manager:
        assert manager.latest == OLD
        assert manager.steps() == [OLD]
        assert manager.load(training_state(1)) == OLD


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_save_is_never_chosen_on_resume(tmp_path: Path) -> None:
    """As above, with a real kill just before the commit; every other moment is in `crash/test_kill_sweep.py`."""
    root = tmp_path / "root"
    committed_at(root, OLD)

    def save() -> None:
        def die(operation: FaultPoint) -> None:
            if operation.subject.endswith(MANIFEST):
                os.kill(os.getpid(), 9)

        faults = Faults(die, names={"put_if_absent"}, lasting=True)
        run_at(FaultyStore(local_store(root), faults)).save(NEW, training_state(NEW)).wait()

    assert in_child(save).killed
    assert list(step_path(root, NEW).rglob("*.safetensors")), "it came as far as it could"
    require_whole(root, {OLD})


# ---------------------------------------------------------------- what is loaded is what was saved


@pytest.mark.parametrize("which", ["first", "last"])
def test_mixed_steps_are_never_loaded(tmp_path: Path, which: str) -> None:
    """DCP loads a mix of two steps silently, one shard file exchanged as after a killed re-save."""
    root = tmp_path / "root"
    run = run_at(local_store(root), settings=replace(SETTINGS, deduplicate=False))
    for step in (OLD, NEW):
        run.save(step, training_state(step)).wait()
    run.close()
    old, new = (sorted(step_path(root, step).rglob("*.safetensors")) for step in (OLD, NEW))
    at = 0 if which == "first" else -1
    assert old[at].stat().st_size == new[at].stat().st_size, "nothing but the content tells"
    new[at].write_bytes(old[at].read_bytes())
    with pytest.raises(CorruptError, match=new[at].name), holdfast.CheckpointManager(root) as manager:
        manager.load(training_state(1), NEW)


def test_flipped_bit_is_never_loaded_silently(tmp_path: Path) -> None:
    """torch.save, safetensors and DCP load 99 of 100 flips silently; `crash/test_bit_flips.py` does a thousand."""
    path = tmp_path / "checkpoint"
    holdfast.save(path, {"weights": torch.randn(1000)})
    (pack,) = path.rglob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptError, match="weights"):
        holdfast.load(path, {"weights": torch.zeros(1000)})


@pytest.mark.parametrize("wanted", [torch.int8, torch.float64, torch.bfloat16, torch.uint8])
def test_load_never_casts_silently(tmp_path: Path, wanted: torch.dtype) -> None:
    """DCP loads fp32 into int8 and says nothing."""
    path = tmp_path / "checkpoint"
    saved = torch.tensor([0.5, 300.0, -1.25])
    holdfast.save(path, {"weights": saved})
    target = torch.ones(3).to(wanted)
    says = "cast=True" if wanted.is_floating_point else "one side is quantised"
    for casts in (False,) if wanted.is_floating_point else (False, True):
        with pytest.raises(InvalidError, match=rf"weights.*float32 saved.*{says}"):
            holdfast.load(path, {"weights": target}, cast=casts)
    assert torch.equal(target, torch.ones(3).to(wanted)), "nothing was changed"
    if wanted.is_floating_point:
        holdfast.load(path, {"weights": target}, cast=True)
        assert torch.equal(target, saved.to(wanted))


class Counted(Syscalls):
    """The operating system, counting what is read of packs."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        count = super().preadv(fd, buffers, offset, flags)
        self.read_bytes += count
        return count


def test_partial_read_does_not_read_whole_shard(tmp_path: Path) -> None:
    """DCP read 64 MiB on each of four ranks to obtain 16 MiB of a checkpoint saved by one."""
    settings = tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=4 * PAGE_BYTES)
    path = tmp_path / "checkpoint"
    weights = torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512)
    holdfast.save(path, {"weights": weights}, settings=settings)
    whole_bytes = weights.numel() * 4
    checkpoint = holdfast.open_checkpoint(path, settings=settings)
    checkpoint.index  # noqa: B018 -- read now, so that only packs are counted
    syscalls = Counted()
    location = checkpoint._location
    object.__setattr__(location, "store", LocalStore(path, settings=settings, syscalls=syscalls))
    for quarter in range(4):
        before = syscalls.read_bytes
        rows = slice(quarter * 128, (quarter + 1) * 128)
        found = checkpoint.read("weights", (rows, slice(None)), framework="torch")
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, weights[rows])
        read_bytes = syscalls.read_bytes - before
        # A chunk at either end, and the pages around an unaligned range.
        assert whole_bytes / 4 <= read_bytes <= whole_bytes / 4 + 2 * (PAGE_BYTES + 2 * PAGE_BYTES)


# ---------------------------------------------------------------- reading executes nothing

EXECUTES = "executes-code"


def pickled(marker: Path) -> bytes:
    """Return a pickle, written by hand, that makes a file when it is loaded."""
    return b"cos\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR."


def torch_saved(marker: Path) -> bytes:
    """Return what `torch.save` would write around such a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(marker))
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def test_the_crafted_pickle_would_execute(tmp_path: Path) -> None:
    """Or the tests below would test nothing."""
    pickle = __import__("pickle")
    pickle.loads(pickled(tmp_path / EXECUTES))
    assert (tmp_path / EXECUTES).exists()


@pytest.mark.parametrize("dress", [pickled, torch_saved])
@pytest.mark.parametrize("pattern", [MANIFEST, "index-*", "parts/*", "*.safetensors"])
def test_metadata_never_executes_code(tmp_path: Path, pattern: str, dress: object) -> None:
    """A crafted `.metadata` of DCP executes code; so does any `torch.load` of a foreign file."""
    assert callable(dress)
    path, marker = tmp_path / "checkpoint", tmp_path / EXECUTES
    holdfast.save(path, training_state(OLD))
    (found,) = path.rglob(pattern.removeprefix("parts/")) if "parts" not in pattern else path.glob("*/parts/*")
    found.write_bytes(dress(marker))
    with pytest.raises(CheckpointError):
        for _ in holdfast.open_checkpoint(path).verify():
            raise CorruptError("reported")
    if "parts" not in pattern:
        with pytest.raises(CheckpointError):
            holdfast.load(path, training_state(NEW))
    assert not marker.exists()


@pytest.mark.parametrize("dress", [pickled, torch_saved])
@pytest.mark.parametrize("where", ["index", "state"])
def test_sealed_metadata_never_executes_code(tmp_path: Path, dress: object, where: str) -> None:
    """As above where the attacker also made every digest fit, as who can write the files can."""
    assert callable(dress)
    path, marker = tmp_path / "checkpoint", tmp_path / EXECUTES
    holdfast.save(path, training_state(OLD))
    checkpoint = holdfast.open_checkpoint(path)
    (index,) = path.rglob("index-*")
    assert encode_index(checkpoint.index) == index.read_bytes()
    crafted = dress(marker)
    document = json.loads((path / MANIFEST).read_text())
    if where == "index":
        index.write_bytes(crafted)
        document["indexes"] = [[index.name, len(crafted), digest.hex_digest_of(crafted)]]
    else:
        document["state"] = {"__reduce__": ["os.system", [f"touch {marker}"]], "$pickle": crafted.hex()}
    document.pop("digest")
    (path / MANIFEST).write_bytes(manifest.sealed(document))
    with pytest.raises(CheckpointError):
        holdfast.load(path, training_state(NEW))
    assert not marker.exists()


def test_what_would_need_a_pickle_is_refused(tmp_path: Path) -> None:
    """Others pickle what they do not know; then only the same code base can load it."""

    class Custom:
        pass

    with pytest.raises(InvalidError, match=r"extra\.thing.*Custom"):
        holdfast.save(tmp_path / "checkpoint", {"weights": torch.ones(2), "extra": {"thing": Custom()}})
    assert not (tmp_path / "checkpoint").exists()
    assert values.dumps(values.encode({"fine": 1}, ""))


# ---------------------------------------------------------------- what is stored is readable, once, and little


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_int_in_state_dict_stays_readable_by_huggingface_reader(tmp_path: Path) -> None:
    """`HuggingFaceStorageWriter` with one int in the state dict writes a file that its own reader cannot read."""
    path = tmp_path / "checkpoint"
    weights = torch.randn(7, 5)
    holdfast.save(path, {"weights": weights, "step": 7, "nested": {"rate": 0.1}})
    (attempt,) = (each for each in path.iterdir() if each.is_dir() and each.name != "reports")
    found = {"weights": torch.zeros(7, 5)}
    torch.distributed.checkpoint.load(found, storage_reader=HuggingFaceStorageReader(str(attempt)), no_dist=True)
    assert torch.equal(found["weights"], weights)
    state: dict[str, object] = {"weights": torch.zeros(7, 5), "step": 0, "nested": {"rate": 0.0}}
    holdfast.load(path, state)
    assert (state["step"], state["nested"]) == (7, {"rate": 0.1})


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    """DCP stores tied tensors twice."""
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    model["head"].weight = model["embedding"].weight
    path = tmp_path / "checkpoint"
    report = holdfast.save(path, {"model": model})
    assert report.bytes == 64 * 32 * 4
    checkpoint = holdfast.open_checkpoint(path)
    assert len(checkpoint.tensors) == 1
    assert len(checkpoint.aliases) == 1
    (pack,) = path.rglob("*.safetensors")
    assert pack.stat().st_size == 64 * 32 * 4 + PAGE_BYTES
    other = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    other["head"].weight = other["embedding"].weight
    holdfast.load(path, {"model": other})
    assert other["head"].weight is other["embedding"].weight
    assert torch.equal(other["head"].weight, model["head"].weight)


def test_bytes_per_tiny_tensor(tmp_path: Path) -> None:
    """DCP: 1,577 bytes in the data file and 195 of metadata for each of 20,000 tensors of 16 bytes."""
    count = 20_000
    state = {"tiny": {f"layer{number:05d}.bias": torch.full((4,), float(number)) for number in range(count)}}
    path = tmp_path / "checkpoint"
    holdfast.save(path, state)
    files = [each for each in path.rglob("*") if each.is_file()]
    assert len(files) == 5, "a pack, a part, an index, a manifest and a report: no file of a tensor's own"
    kinds = Counter[str]()
    for file in files:
        kinds[file.suffix] += file.stat().st_size
    assert kinds[".safetensors"] / count < 16 + 260, "payload, and an entry in the header for readers other than ours"
    assert kinds[".msgpack"] / count < 2 * 80, "the index, and this rank's part of it"
    assert sum(kinds.values()) / count < 450
    target = {"tiny": {name: torch.zeros(4) for name in state["tiny"]}}
    holdfast.load(path, target)
    assert all(torch.equal(target["tiny"][name], tensor) for name, tensor in state["tiny"].items())


# ---------------------------------------------------------------- the file system as it is


@pytest.mark.parametrize("total_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, (9 << 20) + 13])
def test_o_direct_save_works_on_this_filesystem(tmp_path: Path, total_bytes: int) -> None:
    """torch_checkpointing's default save by O_DIRECT raised EINVAL on ext4."""
    data = torch.arange(total_bytes, dtype=torch.int64).to(torch.uint8)
    faults = Faults()
    store = LocalStore(tmp_path, settings=DEFAULTS, syscalls=cast(Syscalls, FaultySyscalls(Syscalls(), faults)))
    run = run_at(store)
    run.save(1, {"data": data}).wait()
    assert any(each.name == "set_direct" for each in faults.seen), "direct writing is what is tried by default"
    target = {"data": torch.zeros_like(data)}
    assert run.load(target, 1) == 1
    assert torch.equal(target["data"], data)


def test_a_file_system_without_o_direct_is_written_through_the_cache(tmp_path: Path) -> None:
    """The same where the file system refuses it, at the switch or at the first write."""

    class Refusing(Syscalls):
        def __init__(self, *, late: bool) -> None:
            self.late, self.direct, self.refused = late, False, 0

        def set_direct(self, fd: int, direct: bool) -> None:
            if not self.late:
                self.refused += 1
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self.direct = direct

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if self.late and self.direct:
                self.refused += 1
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().pwrite(fd, data, offset)

    for late in (False, True):
        syscalls = Refusing(late=late)
        run = run_at(LocalStore(tmp_path / str(late), settings=DEFAULTS, syscalls=syscalls))
        run.save(NEW, training_state(NEW)).wait()
        assert syscalls.refused
        require_whole(tmp_path / str(late), {NEW})


def test_every_folder_on_the_way_is_synced_before_the_save_returns(tmp_path: Path) -> None:
    """All four leaders lose a save that returned when the power goes; DCP syncs no folder at all.

    The cut itself is `crash/test_power_cut.py`; this is the order of calls, for where no power can be cut.
    """
    root = tmp_path / "made" / "now"
    faults = Faults()
    run = run_at(local_store(root, faults))
    run.save(NEW, training_state(NEW)).wait()
    seen = [(each.name, each.subject) for each in faults.seen]
    published = next(at for at, (name, _) in enumerate(seen) if name == "link" and is_manifest(faults, at, root))
    synced = [subject for name, subject in seen[:published] if name == "fsync"]
    checkpoint = holdfast.open_checkpoint(step_path(root, NEW))
    attempt = step_path(root, NEW) / checkpoint.manifest.attempt
    for pack in checkpoint.manifest.packs:
        assert str(attempt / pack.name) in synced
    for folder in (attempt, attempt / "parts", step_path(root, NEW), root, root.parent, tmp_path):
        assert str(folder) in synced, f"{folder} is not durable when its content is published"
    assert str(step_path(root, NEW)) in [subject for name, subject in seen[published:] if name == "fsync"]


def is_manifest(faults: Faults, at: int, root: Path) -> bool:
    """Return whether the operation gives a name in the step's own folder, where only the manifest lies."""
    return Path(faults.seen[at].subject).parent == step_path(root, NEW) or (
        faults.seen[at].subject.startswith(f"{step_path(root, NEW)}/.tmp-")
    )
