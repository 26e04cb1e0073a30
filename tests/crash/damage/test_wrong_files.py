"""Files that are not what the manifest says: cut short, gone, exchanged, foreign, or no files at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from tests.support.crashed_run import (
    MANIFEST,
    NEW,
    NEXT,
    OLD,
    attempted,
    committed_at,
    expected_fingerprint,
    fingerprint,
    local_store,
    require_whole,
    run_at,
    step_path,
    training_state,
)

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True)
class Files:
    """The files of one committed step, and those of the one before it."""

    root: Path
    manifest: Path
    packs: list[Path]
    index: Path
    part: Path
    older: Files | None

    @classmethod
    def of(cls, root: Path, step: int, older: Files | None = None) -> Files:
        folder = step_path(root, step)
        (attempt,) = (path for path in folder.iterdir() if path.is_dir() and path.name != "reports")
        packs = sorted(attempt.glob("*.safetensors"))
        assert len(packs) >= 2
        index, part = attempt / "index-00000.msgpack", attempt / "parts/r00000.msgpack"
        return cls(root, folder / MANIFEST, packs, index, part, older)


@pytest.fixture
def files(in_memory: Path) -> Iterator[Files]:
    root = in_memory / "root"
    committed_at(root, OLD, NEW)
    yield Files.of(root, NEW, Files.of(root, OLD))


def load(files: Files, step: int | None = NEW) -> int | None:
    """Load a step, and require that what came is bit-exact."""
    loaded = training_state(NEXT)
    found = run_at(local_store(files.root)).load(loaded, step)
    assert found is None or fingerprint(loaded) == expected_fingerprint(found)
    return found


def exchange(first: Path, second: Path) -> None:
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def cut(path: Path, left_bytes: int) -> None:
    os.truncate(path, left_bytes if left_bytes >= 0 else path.stat().st_size + left_bytes)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def older(files: Files) -> Files:
    assert files.older is not None
    return files.older


def link_to_itself_elsewhere(path: Path) -> None:
    """Leave a symbolic link to the very file, whole, at another place."""
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


Damage = Callable[[Path, Path], object]
"""What is done to a file; the other path is the same file of an older step."""

ANY_FILE: dict[str, Damage] = {
    "truncated by a byte": lambda path, _: cut(path, -1),
    "truncated to half": lambda path, _: cut(path, path.stat().st_size // 2),
    "empty": lambda path, _: cut(path, 0),
    "missing": lambda path, _: path.unlink(),
    "of another step": lambda path, other: shutil.copyfile(other, path),
    "a symbolic link": lambda path, _: link_to_itself_elsewhere(path),
    "a link to nowhere": lambda path, _: (path.unlink(), path.symlink_to("nowhere")),
    "a fifo": lambda path, _: fifo(path),
    "a folder": lambda path, _: folder(path),
}
WHICH: dict[str, Callable[[Files], Path]] = {
    "first pack": lambda files: files.packs[0],
    "last pack": lambda files: files.packs[-1],
    "index": lambda files: files.index,
    "part": lambda files: files.part,
}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("damage", ANY_FILE)
def test_a_wrong_file_of_the_attempt(files: Files, which: str, damage: str) -> None:
    path = WHICH[which](files)
    ANY_FILE[damage](path, WHICH[which](older(files)))
    reported = list(holdfast.open_checkpoint(files.manifest.parent).verify())
    assert reported
    assert any(path.name in each.file for each in reported)
    if which == "part":
        assert load(files) == NEW, "parts are for whoever commits; nobody loads them"
    else:
        with pytest.raises((CorruptError, InvalidError)) as caught:
            load(files)
        assert path.name in str(caught.value)
        with pytest.raises((CorruptError, InvalidError)):
            read_everything(files)
        expected = InvalidError if "link" in damage or "fifo" in damage else CorruptError
        assert isinstance(caught.value, expected)
    assert load(files, OLD) == OLD


def read_everything(files: Files) -> None:
    checkpoint = holdfast.open_checkpoint(files.manifest.parent)
    for fqn in checkpoint.tensors:
        checkpoint.read(fqn)


def test_two_packs_exchanged(files: Files) -> None:
    exchange(files.packs[0], files.packs[1])
    with pytest.raises(CorruptError, match=r"r00000.*safetensors"):
        load(files)
    assert {files.packs[0].name, files.packs[1].name} <= {
        Path(each.file).name for each in holdfast.open_checkpoint(files.manifest.parent).verify()
    }


def test_a_longer_pack_is_reported(files: Files) -> None:
    lengthen(files.packs[0])
    assert load(files) == NEW, "every byte that belongs to it is there, and checked"
    (damage,) = holdfast.open_checkpoint(files.manifest.parent).verify()
    assert files.packs[0].name in damage.file


@pytest.mark.parametrize("name", ["r00009.safetensors", "notes.txt", "parts/r00007.msgpack", "index-00001.msgpack"])
def test_an_extra_file_is_reported_and_never_read(files: Files, name: str) -> None:
    extra = files.index.parent / name
    shutil.copyfile(files.packs[0], extra)
    assert load(files) == NEW
    (damage,) = holdfast.open_checkpoint(files.manifest.parent).verify()
    assert damage.file.endswith(name)
    assert "does not name" in damage.message


@pytest.mark.parametrize("damage", ANY_FILE)
def test_a_wrong_manifest(files: Files, damage: str) -> None:
    ANY_FILE[damage](files.manifest, older(files).manifest)
    with pytest.raises((CorruptError, MissingError, InvalidError)) as caught:
        load(files)
    assert MANIFEST in str(caught.value) or "no committed step" in str(caught.value)
    expected: type[CheckpointError] = CorruptError
    if damage in ("missing", "a folder"):
        expected = MissingError
    elif "link" in damage or "fifo" in damage:
        expected = InvalidError
    assert isinstance(caught.value, expected)
    if damage == "of another step":
        return
    with pytest.raises(expected):
        holdfast.open_checkpoint(files.manifest.parent)


@pytest.mark.parametrize("damage", ["truncated by a byte", "empty", "missing", "a folder", "of another step"])
def test_a_step_with_a_wrong_manifest_is_passed_over(files: Files, damage: str) -> None:
    ANY_FILE[damage](files.manifest, older(files).manifest)
    assert load(files, None) == OLD


def test_a_step_under_the_name_of_another_is_refused(files: Files) -> None:
    """A folder copied or renamed by hand would make training resume at the wrong step."""
    shutil.rmtree(step_path(files.root, NEW))
    shutil.copytree(step_path(files.root, OLD), step_path(files.root, NEW))
    with pytest.raises(CorruptError, match=rf"step.*{OLD}"):
        load(files, NEW)
    assert load(files, None) == OLD


@pytest.mark.parametrize("damage", ["truncated by a byte", "empty", "a symbolic link", "a fifo"])
def test_a_damaged_run_file_stops_saving_and_never_loading(files: Files, damage: str) -> None:
    run_file = files.root / "holdfast.json"
    if damage == "a symbolic link":
        run_file.rename(files.root.parent / "elsewhere")
        run_file.symlink_to(files.root.parent / "elsewhere")
    else:
        ANY_FILE[damage](run_file, run_file)
    require_whole(files.root, {OLD, NEW})
    _, error = attempted(run_at(local_store(files.root)), NEXT, training_state(NEXT))
    assert isinstance(error, CorruptError | InvalidError)
    assert "holdfast.json" in str(error)
    require_whole(files.root, {OLD, NEW})


def test_a_link_in_place_of_the_attempt_is_not_followed(files: Files) -> None:
    attempt = files.index.parent
    attempt.rename(files.root.parent / "elsewhere")
    attempt.symlink_to(files.root.parent / "elsewhere")
    with pytest.raises(InvalidError, match="link"):
        load(files)
    assert list(holdfast.open_checkpoint(files.manifest.parent).verify())
