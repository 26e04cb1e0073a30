"""Whatever another system's files look like, imported by reference or copied they read back equal, bit for bit."""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.foreign import ForeignFiles, References
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import Region, region_boxes
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.store import Store
from holdfast.base.types.listing import ForeignListing, ListedPiece
from holdfast.base.types.values import Group
from holdfast.core.format.names import step_folder
from holdfast.errors import CorruptError
from holdfast.offline.imports.import_step import import_step
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.property.held import flat_runs, guillotine
from tests.support.tuning import tuned

STEP = 3


@dataclass(frozen=True)
class Listed:
    """What lies at a path, as a format would list it."""

    files: ForeignFiles
    known: ForeignListing
    name: str = ""
    is_file: bool = False

    def listing(self) -> ForeignListing:
        return self.known

    def require_unchanged(self, keys: Collection[str]) -> None:
        self.files.require_unchanged(keys)


@dataclass(frozen=True)
class Made:
    """Files of another system, what they hold, and how a job is set."""

    listing: ForeignListing
    content: Mapping[str, bytes]
    expected: Mapping[str, bytes]
    settings: Settings


def bytes_of(whole: np.ndarray, region: Region) -> bytes:
    boxes = region_boxes(region, whole.shape[:-1])
    return b"".join(whole[box.relative_to((0,) * len(box.start))].tobytes() for box in boxes)


@st.composite
def made(draw: st.DrawFn) -> Made:
    """Tensors as boxes or flat ranges, scattered over files with gaps; some tied, some seen as another type."""
    chance = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    keys = [f"{folder}{number} ü.bin" for number, folder in enumerate(("", "deep/", "deep/er/"))][
        : draw(st.integers(1, 3))
    ]
    content = {key: bytearray(chance.bytes(draw(st.integers(0, 9)))) for key in keys}
    tensors: dict[str, TensorSpec] = {}
    pieces: dict[str, list[ListedPiece]] = {}
    expected: dict[str, bytes] = {}
    aliases: dict[str, str] = {}
    for number in range(draw(st.integers(1, 4))):
        fqn, dtype = f"model.{number}", draw(st.sampled_from(sorted(DTYPES)))
        itemsize = DTYPES[dtype].itemsize
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        whole = np.frombuffer(chance.bytes(math.prod(shape) * itemsize), np.uint8).reshape(*shape, itemsize)
        if itemsize == 1:
            whole = whole & 1  # A bool of another byte is none, and numpy mends it on its way.
        parts = draw(st.integers(1, 5))
        regions = draw(
            st.one_of(st.just([Box.whole(shape)]), flat_runs(math.prod(shape), parts), guillotine(shape, parts))
        )
        if not whole.size:
            regions = regions[: draw(st.integers(0, 1))]
        tensors[fqn], expected[fqn], pieces[fqn] = TensorSpec(fqn, dtype, shape), whole.tobytes(), []
        for region in draw(st.permutations([region for region in regions if region.numel or not whole.size])):
            file = draw(st.sampled_from(keys))
            content[file] += chance.bytes(draw(st.integers(0, 70)))
            pieces[fqn].append(ListedPiece(region, file, len(content[file])))
            content[file] += bytes_of(whole, region)
        if draw(st.booleans()):
            aliases[f"{fqn}.tied"] = fqn
        if draw(st.booleans()):
            again = draw(st.sampled_from([name for name in sorted(DTYPES) if DTYPES[name].itemsize == itemsize]))
            twin = f"{fqn}.seen"
            tensors[twin], expected[twin], pieces[twin] = TensorSpec(twin, again, shape), expected[fqn], pieces[fqn]
    tree = Group("dict", {"model": Group("module"), "epoch": 4, "args": {"lr": 0.5, "names": ("a", "b")}})
    sizes = {key: len(data) for key, data in content.items()}
    settings = tuned(
        Settings(chunk_bytes=4096 * draw(st.integers(1, 3))),
        window_bytes=8192,
        read_window_bytes=4096 * draw(st.integers(1, 5)),
        windows_in_flight=2,
    )
    settings = tuned(
        settings,
        index_chunks_max=draw(st.sampled_from([1, 8, 1 << 17])),
    )
    listing = ForeignListing(
        format="made up", tensors=tensors, pieces=pieces, files=sizes, tree=tree, aliases=aliases, world_size=5
    )
    return Made(listing, {key: bytes(data) for key, data in content.items()}, expected, settings)


def written(made: Made, tmp_path: Path) -> Path:
    folder = tmp_path / uuid.uuid4().hex
    for key, data in made.content.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def imported(made: Made, folder: Path, *, copied: bool) -> MemoryStore:
    store = MemoryStore(uuid.uuid4().hex)
    job = Job(AloneComm(), SystemClock(), made.settings)
    source = CheckpointLocation(MemoryStore(uuid.uuid4().hex), "", None, Listed(ForeignFiles(folder), made.listing))
    checkpoint = Checkpoint(source, made.settings, lambda array, _: array)
    report = import_step(checkpoint, store, job, STEP, copied=copied)
    job.close()
    assert (report.step, report.tensors, report.origin) == (STEP, len(made.expected), "made up")
    assert report.allowed_roots == (() if copied else (str(folder),))
    return store


def opened(made: Made, store: Store, *roots: Path) -> Checkpoint:
    location = CheckpointLocation(store, step_folder(STEP), STEP, references=References([str(root) for root in roots]))
    return Checkpoint(location, made.settings, lambda array, _: array)


def require_equal(made: Made, store: Store, *roots: Path) -> None:
    """Read it tensor by tensor, verify it, and load it as a job would."""
    checkpoint = opened(made, store, *roots)
    assert set(checkpoint.tensors) == set(made.expected)
    for fqn, data in made.expected.items():
        assert np.asarray(checkpoint.read(fqn)).tobytes() == data, fqn
    assert dict(checkpoint.aliases) == made.listing.aliases
    assert checkpoint.objects == {"model": {}, "epoch": 4, "args": {"lr": 0.5, "names": ("a", "b")}}
    assert checkpoint.origin == "made up"
    assert list(checkpoint.verify()) == []
    state: dict[str, object] = {
        fqn: GlobalTensor(spec.dtype, np.zeros(spec.global_shape, DTYPES[spec.dtype].numpy))
        for fqn, spec in made.listing.tensors.items()
    }
    job = Job(AloneComm(), SystemClock(), made.settings, NumpyFramework(0))
    run = CheckpointManager.over(store, job, References([str(root) for root in roots]))
    assert run.load(state, strict=False) == STEP
    run.close()
    for fqn, each in state.items():
        if isinstance(each, GlobalTensor):
            assert each.array.tobytes() == made.expected[fqn], fqn


@given(made())
def test_by_reference_it_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, made: Made) -> None:
    folder = written(made, tmp_path_factory.mktemp("listing"))
    require_equal(made, imported(made, folder, copied=False), folder)
    shutil.rmtree(folder)


@given(made())
def test_copied_it_reads_back_equal_once_the_source_is_gone(
    tmp_path_factory: pytest.TempPathFactory, made: Made
) -> None:
    folder = written(made, tmp_path_factory.mktemp("listing"))
    store = imported(made, folder, copied=True)
    shutil.rmtree(folder)
    require_equal(made, store)


@given(made(), st.data())
def test_a_byte_that_changed_later_is_found(
    tmp_path_factory: pytest.TempPathFactory, made: Made, data: st.DataObject
) -> None:
    folder = written(made, tmp_path_factory.mktemp("listing"))
    covered = [
        (fqn, piece, piece.region.numel * made.listing.tensors[fqn].itemsize)
        for fqn, pieces in made.listing.pieces.items()
        for piece in pieces
        if piece.region.numel
    ]
    if not covered:
        return
    store = imported(made, folder, copied=False)
    fqn, piece, count = data.draw(st.sampled_from(covered))
    at = piece.offset + data.draw(st.integers(0, count - 1))
    content = bytearray((folder / piece.file).read_bytes())
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (folder / piece.file).write_bytes(content)
    checkpoint = opened(made, store, folder)
    with pytest.raises(CorruptError, match=r"bytes \d+–\d+ hash to") as raised:
        checkpoint.read(fqn)
    assert piece.file in str(raised.value)
    damages = list(checkpoint.verify())
    assert damages and all(each.file.endswith(piece.file) for each in damages)
    assert all(each.start is not None and each.stop is not None and each.start <= at < each.stop for each in damages)
    shutil.rmtree(folder)
