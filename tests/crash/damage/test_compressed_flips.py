"""One flipped bit anywhere in a compressed checkpoint is found and located, or nobody reads it: never other values.

The suite draws some bytes of each kind of file; `FLIPPED_BYTES=all` takes every byte in turn, as `make campaign` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from holdfast._face import wiring
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.geometry.tensor import Role
from holdfast.base.types.plan import Piece
from holdfast.core.format.names import step_folder
from holdfast.errors import CorruptError
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from tests.doubles.comm import ThreadComm, run_ranks
from tests.doubles.framework import GlobalTensor
from tests.property.states import SETTINGS, fresh_store, run_of
from tests.support.coded_states import training_values
from tests.support.tuning import tuned

STEP = 3
ON = tuned(replace(SETTINGS, compression="on"), coded_bytes_min=256)
DRAWN = {"payload": 120, "header": 30, "index": 20}
"""Bytes that the suite flips. Every one costs a load, and one outside the index a verification too."""


@dataclass(frozen=True)
class Stored:
    store: MemoryStore
    values: Mapping[str, bytes]
    files: Mapping[str, bytes]
    """Packs and index files as they were saved, by key."""
    headers: Mapping[str, int]
    """Bytes before the data of each pack."""
    pieces: tuple[Piece, ...]

    def open(self) -> Checkpoint:
        location = CheckpointLocation(self.store, step_folder(STEP), STEP, root=self.store)
        return Checkpoint(location, ON, lambda array, _: array, codecs=wiring.codecs())


@pytest.fixture(scope="module")
def stored() -> Stored:
    store, shape = fresh_store(), (37, 211)
    masters, weights = training_values(shape, 8)
    ids = np.arange(3000, dtype=np.int64)
    state = {
        "model.weight": GlobalTensor("bfloat16", weights, None, Role.PARAMETER),
        "masters.weight": GlobalTensor("float32", masters, None, Role.OPTIMIZER),
        "moments.weight.exp_avg_sq": GlobalTensor("float32", np.square(masters), None, Role.OPTIMIZER),
        "ids": GlobalTensor("int64", ids, None, Role.BUFFER),
    }

    def save(comm: ThreadComm) -> None:
        run = run_of(comm, store, ON)
        run.save(STEP, state).wait()
        run.close()

    run_ranks(2, save)
    found = Stored(store, {fqn: each.array.tobytes() for fqn, each in state.items()}, {}, {}, ())
    checkpoint = found.open()
    folder = f"{step_folder(STEP)}{checkpoint.manifest.attempt}/"
    packs = {folder + pack.name for pack in checkpoint.manifest.packs}
    keys = packs | {folder + record.name for record in checkpoint.manifest.index_files}
    files = {key: store.get(key, 1 << 30) for key in keys}
    headers = {key: 8 + int.from_bytes(files[key][:8], "little") for key in packs}
    assert any("/coded/" in key for key in packs)
    return replace(found, files=files, headers=headers, pieces=tuple(checkpoint.index.all_pieces()))


def chosen(stored: Stored, kind: str) -> Iterator[tuple[str, int]]:
    """Yield bytes of a kind: all of them, or those drawn for the suite."""
    places = [
        (key, at)
        for key, data in sorted(stored.files.items())
        for at in range(len(data))
        if kind_of(stored, key, at) == kind
    ]
    count = int(os.environ.get("FLIPPED_BYTES", DRAWN[kind])) if os.environ.get("FLIPPED_BYTES") != "all" else 0
    drawn = np.random.default_rng(5).permutation(len(places))[: count or None]
    yield from (places[number] for number in sorted(drawn.tolist()))


def kind_of(stored: Stored, key: str, at: int) -> str:
    if key not in stored.headers:
        return "index"
    return "header" if at < stored.headers[key] else "payload"


class Flipped:
    """Flips a bit of a stored byte for the length of a block."""

    def __init__(self, stored: Stored, key: str, at: int) -> None:
        self.stored, self.key, self.at = stored, key, at

    def __enter__(self) -> None:
        changed = bytearray(self.stored.files[self.key])
        changed[self.at] ^= 1 << (self.at % 8)
        self.stored.store.put(self.key, bytes(changed))

    def __exit__(self, *_: object) -> None:
        self.stored.store.put(self.key, self.stored.files[self.key])


def require_values(stored: Stored) -> None:
    found = stored.open().read_all(stored.values)
    for fqn, expected in stored.values.items():
        assert np.ascontiguousarray(found[fqn]).tobytes() == expected, fqn


def test_a_payload_byte_is_found_where_it_is_needed(stored: Stored) -> None:
    places = {
        (piece.pack, *piece.stored_range(number)): (piece.tensor.fqn, number)
        for piece in stored.pieces
        for number in range(chunk_count(piece.bytes, piece.chunk_bytes))
    }
    unread = 0
    for key, at in chosen(stored, "payload"):
        ((fqn, number, start, stop),) = [
            (fqn, number, start, stop)
            for (pack, start, stop), (fqn, number) in places.items()
            if key.endswith(f"/{stored.open().manifest.attempt}/{pack}") and start <= at < stop
        ]
        with Flipped(stored, key, at):
            damages = list(stored.open().verify())
            try:
                require_values(stored)
            except CorruptError as error:
                said = str(error)
                assert fqn in said and key in said and f"{start}–{stop}" in said, said
                assert re.search(rf"chunk {number}\b", said) or "coded/" not in key, said
                struck = [damage for damage in damages if damage.fqn == fqn]
                assert [(damage.start, damage.stop) for damage in struck] == [(start, stop)]
                assert {damage.fqn for damage in damages} <= {fqn, "masters.weight"}
            else:
                assert not damages
                unread += 1
    # A few bits of a frame have no meaning for its decoder; what they decode to is what was saved.
    assert unread <= 20 or "FLIPPED_BYTES" in os.environ
    require_values(stored)


def test_a_header_byte_is_found_by_verifying(stored: Stored) -> None:
    for key, at in chosen(stored, "header"):
        with Flipped(stored, key, at):
            require_values(stored)  # A load takes places from the index.
            damages = list(stored.open().verify())
            assert damages and all(damage.file.endswith(key.rpartition("/")[2]) for damage in damages)
            assert damages[0].start == 0


def test_an_index_byte_is_found_before_anything_is_read(stored: Stored) -> None:
    for key, at in chosen(stored, "index"):
        with Flipped(stored, key, at), pytest.raises(CorruptError, match=key.rpartition("/")[2]):
            require_values(stored)
