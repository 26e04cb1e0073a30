"""One flipped bit anywhere in a checkpoint is found: by loading where loading reads it, by verifying everywhere."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import CorruptError
from tests.support.crashed_run import (
    MANIFEST,
    OLD,
    committed_at,
    is_of_reports,
    local_store,
    run_at,
    step_path,
    training_state,
)

pytestmark = pytest.mark.long

FLIPS = 1000


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def spread_over(files: list[Path], chance: random.Random) -> list[tuple[Path, int]]:
    """Return flips: as many in each file, so that small ones are not forgotten, evenly over its bits."""
    return [(file, chance.randrange(file.stat().st_size * 8)) for file in files for _ in range(FLIPS // len(files) + 1)]


def test_flipped_bit_is_never_loaded_silently(in_memory: Path) -> None:
    root = in_memory / "root"
    committed_at(root, OLD)
    folder = step_path(root, OLD)
    pieces = piece_ranges(folder)
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not is_of_reports(str(path.relative_to(folder)))
    )
    kinds = {path.name.partition("0")[0] for path in files}
    assert kinds == {MANIFEST, "r", "index-"}
    assert sum(path.suffix == ".safetensors" for path in files) >= 2
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}, {len(files)} files")
    run, state = run_at(local_store(root)), training_state(OLD + 1)
    flips = spread_over(files, random.Random(seed))
    assert len(flips) >= FLIPS
    at_load = 0
    for file, bit in flips:
        flip(file, bit)
        try:
            at_load += require_found(folder, file, bit // 8, pieces, lambda: run.load(state, OLD))
        except BaseException as error:
            error.add_note(f"seed {seed}, {file}, bit {bit}")
            raise
        finally:
            flip(file, bit)
    print(f"{len(flips)} flips: {at_load} found by loading, the others by verifying")
    assert at_load > len(flips) / 3
    assert run.load(state, OLD) == OLD
    assert list(holdfast.open_checkpoint(folder).verify()) == []


def piece_ranges(folder: Path) -> list[tuple[str, int, int, str]]:
    """Return pack, first byte, byte past the last and FQN of every piece."""
    checkpoint = holdfast.open_checkpoint(folder)
    pieces = [piece for fqn in checkpoint.tensors for piece in checkpoint.pieces(fqn)]
    return [(piece.pack, piece.offset, piece.offset + piece.bytes, piece.tensor.fqn) for piece in pieces]


def require_found(folder: Path, file: Path, byte: int, pieces: list[tuple[str, int, int, str]], load: object) -> bool:
    """Require that a flip is found and located; return whether loading found it."""
    assert callable(load)
    if file.name == MANIFEST:
        with pytest.raises(CorruptError, match=MANIFEST):
            holdfast.open_checkpoint(folder)
        with pytest.raises(CorruptError, match=MANIFEST):
            load()
        return True
    damages = list(holdfast.open_checkpoint(folder).verify())
    assert damages, "verify saw nothing"
    assert all(damage.file.endswith(file.relative_to(folder).as_posix()) for damage in damages)
    if file.parent.name == "parts":
        # Parts are for whoever commits; nobody loads them.
        assert load() == OLD
        return False
    if file.suffix == ".safetensors":
        struck = [fqn for pack, start, stop, fqn in pieces if pack == file.name and start <= byte < stop]
        if not struck:
            # A header serves stock readers; our loading takes offsets from the index.
            assert load() == OLD
            return False
        assert [damage.fqn for damage in damages] == struck
        assert all(damage.start <= byte < damage.stop for damage in damages)
        with pytest.raises(CorruptError, match=struck[0].replace(".", r"\.")) as caught:
            load()
        assert file.name in str(caught.value)
        return True
    with pytest.raises(CorruptError, match=file.name):
        load()
    return True
