"""Packs that are stored in two places: each chunk is read from the first place that has it whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.ports.readable import Buffers, OnBytes
from holdfast.base.types.plan import LoadPlan, WantedBoxes
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.decoding.decode import Decoder
from holdfast.core.engine.other_places import read_elsewhere
from holdfast.core.engine.placing import Placing
from holdfast.core.engine.read import execute, read_through
from holdfast.core.engine.target import HostTarget
from holdfast.core.plan.reads import load_plan
from holdfast.errors import CheckpointError, CorruptError, UnavailableError
from holdfast.settings import MIB, Settings
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.support.coded_states import ATTEMPT, CHUNK, CodedPieces, stored_training, training_values
from tests.support.tuning import tuned

SHAPE = (60, 211)
WHOLE = Box.whole(SHAPE)
SETTINGS = tuned(Settings(chunk_bytes=CHUNK), window_bytes=CHUNK, read_window_bytes=4 * CHUNK, windows_in_flight=2)


class Direct(ForwardingStore):
    """Files of which nothing is cached."""

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        return 0


class Cached(ForwardingStore):
    """Files of which everything is cached."""

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        count = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(bytearray(count))
        self._inner.read_into(key, [(start, start + count)], [data])
        for buffer in buffers:
            buffer[:], data = data[: buffer.nbytes], data[buffer.nbytes :]
            if on_bytes is not None:
                on_bytes(buffer)
        return count


class IntoAnyMemory(Direct):
    """A store that reads into any memory alike."""

    def __init__(self, inner: LocalStore) -> None:
        super().__init__(inner)
        self.traits = replace(self.traits, read_alignment=1)


PATHS: Mapping[str, tuple[Callable[[LocalStore], ForwardingStore], int]] = {
    "cached": (Cached, 1),
    "straight into targets": (IntoAnyMemory, 1),
    "buffered": (Direct, 1),
    "all buffered": (Cached, MIB),
}
"""Where the bytes come from, and the size from which on a chunk needs no buffer."""


def plain_training() -> CodedPieces:
    made = CodedPieces()
    masters, weights = training_values(SHAPE, 3)
    made.add(TensorSpec("w", "bfloat16", SHAPE), WHOLE, weights, "r00000.safetensors", [])
    made.add(TensorSpec("m", "float32", SHAPE), WHOLE, masters, "r00000.safetensors", [])
    return made


def pair_elsewhere() -> CodedPieces:
    """Masters that are coded against weights of another pack."""
    made = CodedPieces()
    masters, weights = training_values(SHAPE, 4)
    pair = made.add(TensorSpec("w", "bfloat16", SHAPE), WHOLE, weights, "r00000.safetensors", [])
    made.add(TensorSpec("m", "float32", SHAPE), WHOLE, masters, "coded/r00000.safetensors", ["residual"], pair)
    return made


STATES = {"plain": plain_training(), "coded": stored_training(SHAPE, [WHOLE], 5), "pair elsewhere": pair_elsewhere()}


class TwoRoots:
    """The same packs in a near root and in another, as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.state = STATES[name]
        self.near, self.far = (LocalStore(folder / each, settings=SETTINGS) for each in ("near", "far"))
        for store in (self.near, self.far):
            for pack, data in self.state.packs.items():
                store.put(ATTEMPT + pack, bytes(data))

    def flip(self, store: LocalStore, fqn: str, *numbers: int) -> None:
        (piece,) = self.state.pieces[fqn]
        path = Path(store.url, ATTEMPT + piece.pack)
        data = bytearray(path.read_bytes())
        for number in numbers:
            data[piece.stored_range(number)[0] + 30] ^= 4
        path.write_bytes(data)

    def packs(self, path: str = "buffered") -> Packs:
        near, far = (PATHS[path][0](store) for store in (self.near, self.far))
        return lambda name: Stored(near, ATTEMPT + name, (Stored(far, ATTEMPT + name),))

    def plan(self, fqns: Sequence[str]) -> LoadPlan:
        wanted = [WantedBoxes(fqn, (WHOLE,)) for fqn in fqns]
        return load_plan(wanted, self.state.near, SETTINGS._tuning.read_window_bytes)

    def load(self, path: str = "buffered", packs: Packs | None = None) -> Mapping[str, int]:
        """Read everything, and require every element; return the bytes read by place."""
        fqns = sorted(self.state.pieces)
        targets = [HostTarget(self.state.pieces[fqn][0].tensor.dtype, WHOLE) for fqn in fqns]
        chosen = tuned(SETTINGS, zero_copy_bytes_min=PATHS[path][1])
        sources = execute(self.plan(fqns), packs or self.packs(path), targets, chosen, wiring.codecs())
        for fqn, target in zip(fqns, targets, strict=True):
            assert target.array.tobytes() == self.state.values[fqn].tobytes(), fqn
        assert sum(sources.values()) == self.plan(fqns).bytes
        return sources


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", STATES)
def test_each_chunk_is_read_where_it_is_whole(
    tmp_path: Path, name: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    roots = TwoRoots(tmp_path, name)
    for fqn in ("w", "m"):
        roots.flip(roots.near, fqn, 1, 3)
        roots.flip(roots.far, fqn, 0, 2, 4)
    pieces = [roots.state.pieces[fqn][0] for fqn in ("w", "m")]
    damaged = sum(stop - start for piece in pieces for start, stop in map(piece.stored_range, (1, 3)))
    assert roots.load(path)[roots.far.url] == damaged
    said = [record.message for record in caplog.records]
    assert len(said) == len(roots.state.packs), "one warning a pack"
    for pack in roots.state.packs:
        (line,) = [each for each in said if each.startswith(f"{roots.near.url}/{ATTEMPT}{pack}: ")]
        assert f"{roots.far.url}/{ATTEMPT}{pack}" in line


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", STATES)
def test_a_pack_that_is_missing_is_read_elsewhere(
    tmp_path: Path, name: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    roots = TwoRoots(tmp_path, name)
    pack = roots.state.pieces["w"][0].pack
    roots.near.delete([ATTEMPT + pack])
    sources = roots.load(path)
    assert sources.get(roots.near.url, 0) == sum(
        piece.stored_bytes for pieces in roots.state.pieces.values() for piece in pieces if piece.pack != pack
    )
    (said,) = caplog.records
    assert f"{pack}: the pack is missing" in said.message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", STATES)
def test_the_front_of_a_pack_that_is_too_short_is_read(tmp_path: Path, name: str, path: str) -> None:
    roots = TwoRoots(tmp_path, name)
    (piece,) = roots.state.pieces["w"]
    end = piece.stored_range(1)[1]
    with Path(roots.near.url, ATTEMPT + piece.pack).open("r+b") as file:
        file.truncate(end)
    roots.flip(roots.far, "w", 1)
    sources = roots.load(path)
    assert sources[roots.near.url] >= end - piece.stored_range(0)[0]
    assert sources[roots.far.url] >= piece.stored_bytes - end + piece.offset


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("fqn", ("w", "m"))
def test_a_chunk_that_no_place_has_whole_is_damage(tmp_path: Path, name: str, path: str, fqn: str) -> None:
    roots = TwoRoots(tmp_path, name)
    for store in (roots.near, roots.far):
        roots.flip(store, fqn, 2)
    (piece,) = roots.state.pieces[fqn]
    start, stop = piece.stored_range(2)
    with pytest.raises(CorruptError) as caught:
        roots.load(path)
    said = str(caught.value)
    near, far = said.split("; and ")
    for store, line in ((roots.near, near), (roots.far, far)):
        assert fqn in line and f"{store.url}/{ATTEMPT}{piece.pack}: " in line and f"{start}–{stop}" in line, line


def test_a_pack_that_no_place_has_is_damage(tmp_path: Path) -> None:
    roots = TwoRoots(tmp_path, "plain")
    for store in (roots.near, roots.far):
        store.delete([ATTEMPT + "r00000.safetensors"])
    with pytest.raises(CorruptError, match=r"near/.*the pack is missing.*far/.*the pack is missing"):
        roots.load()


def test_a_place_that_fails_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A broken disk of one place does not end a load while another place answers."""
    roots = TwoRoots(tmp_path, "plain")

    def failing(*operations: str) -> Packs:
        fails = Faults(raise_error(UnavailableError), names={"read_into"}, lasting=True)
        near = FaultyStore(roots.near, fails) if "near" in operations else roots.near
        far = FaultyStore(roots.far, fails) if "far" in operations else roots.far
        return lambda name: Stored(near, ATTEMPT + name, (Stored(far, ATTEMPT + name),))

    assert set(roots.load(path="all buffered", packs=failing("near"))) == {roots.far.url}
    assert len(caplog.records) == 1
    roots.flip(roots.near, "m", 2)
    with pytest.raises(UnavailableError, match=r"near/"):
        roots.load(path="all buffered", packs=failing("far"))


@pytest.mark.parametrize("name", STATES)
def test_bytes_for_other_ranks_are_those_of_the_whole_chunks(tmp_path: Path, name: str) -> None:
    roots = TwoRoots(tmp_path, name)
    roots.flip(roots.near, "w", 0)
    roots.flip(roots.near, "m", 1)
    roots.flip(roots.far, "m", 0)
    for run in roots.plan(["m"]).runs:
        placing = Placing(roots.packs(), [HostTarget("float32", WHOLE)], Decoder(wiring.codecs()))
        views = read_through(run, placing, allocate_aligned(16 * CHUNK))
        for part, view in zip((run, *run.bases), views, strict=True):
            assert bytes(view) == roots.state.packs[part.pack][part.start : part.stop]


@pytest.mark.parametrize("error", [CorruptError("damaged"), UnavailableError("off")])
def test_without_another_place_the_error_stays(tmp_path: Path, error: CheckpointError) -> None:
    roots = TwoRoots(tmp_path, "pair elsewhere")
    (run, *_) = roots.plan(["m"]).runs
    packs = lambda name: Stored(roots.near, ATTEMPT + name)  # noqa: E731
    placing = Placing(packs, [HostTarget("float32", WHOLE)], Decoder(wiring.codecs()))
    with pytest.raises(type(error)) as caught:
        read_elsewhere(run, placing, allocate_aligned(16 * CHUNK), error)
    assert caught.value is error


def test_bytes_read_are_counted_by_the_root_of_each_pack(tmp_path: Path) -> None:
    roots = TwoRoots(tmp_path, "pair elsewhere")
    places = {"r00000.safetensors": roots.far}
    packs = lambda name: Stored(places.get(name, roots.near), ATTEMPT + name)  # noqa: E731
    assert roots.load(packs=packs) == {
        roots.near.url: roots.state.pieces["m"][0].stored_bytes,
        roots.far.url: roots.state.pieces["w"][0].stored_bytes,
    }
    assert execute(LoadPlan(()), packs, [], SETTINGS, wiring.codecs()) == {}
