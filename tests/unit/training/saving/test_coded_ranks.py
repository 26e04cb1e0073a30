"""Saves that compress, by several ranks: who writes what, packs in stores of objects, and settings that differ."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import step_folder
from holdfast.errors import InvalidError
from tests.doubles.framework import GlobalTensor
from tests.support.chunk_decoder import stored_tensors
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, World, saved

MIN_BYTES = 1024
ON = tuned(replace(PATIENT, compression="on"), coded_bytes_min=MIN_BYTES)
R, S = Placement(None), Placement(0)
LAYOUTS = {
    "data parallel": (2, None),
    "hybrid": (4, MeshLayout((2, 2), (0, 1, 2, 3), (R, S))),
    "sharded": (2, MeshLayout((2,), (0, 1), (S,))),
}


def mixed_state(layout: MeshLayout | None, seed: int = 0) -> dict[str, GlobalTensor]:
    chance = np.random.default_rng(seed)
    state = {}
    for number in range(4):
        master = (chance.standard_normal((48, 100 + number)) * 0.02).astype(np.float32)
        weight = _bfloat16(master)
        moment = (chance.standard_normal(master.shape) * 0.001).astype(np.float32)
        state[f"model.l{number}.w"] = GlobalTensor("bfloat16", weight, layout)
        state[f"master.l{number}.w"] = GlobalTensor("float32", master, layout, Role.BUFFER)
        state[f"opt.l{number}.w.exp_avg"] = GlobalTensor("float32", moment, layout, Role.OPTIMIZER)
    return state


def _bfloat16(master: np.ndarray) -> np.ndarray:
    bits = master.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def expected(state: Mapping[str, GlobalTensor]) -> dict[str, bytes]:
    return {fqn: tensor.array.tobytes() for fqn, tensor in state.items()}


def play(world: World, layout: MeshLayout | None) -> list[object]:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, mixed_state(layout))

    return world.play(part)


@pytest.mark.parametrize("objects", [False, True], ids=["files", "objects"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_with_both_stores_masters_as_what_their_weights_lack(name: str, objects: bool) -> None:
    ranks, layout = LAYOUTS[name]
    store = MemoryStore(uuid.uuid4().hex, object_bytes_max=1 << 16 if objects else None)
    world = World(ranks, tuned(ON, coded_bytes_min=MIN_BYTES, full_pack_bytes=16384) if objects else ON, store)
    reports = play(world, layout)
    assert all(isinstance(report, SaveReport) for report in reports), reports
    assert stored_tensors(store, step_folder(1)) == expected(mixed_state(layout))
    pieces = world.pieces(1)
    for fqn in (name for name in pieces if name.startswith("master.")):
        large = [piece for piece in pieces[fqn] if piece.bytes >= MIN_BYTES]
        assert sum(piece.bytes for piece in large) > 0.9 * 4 * 48 * 100
        for piece in large:
            # The last chunk may be too short to shrink.
            assert piece.coding is not None and piece.codec_of(0) == "residual", fqn
            assert piece.coding.pair is not None and piece.coding.pair.region == piece.region
    loads = [report.bytes for report in reports if isinstance(report, SaveReport)]
    assert max(loads) <= 1.35 * sum(loads) / ranks


def test_ranks_that_do_not_agree_about_compression_save_nothing() -> None:
    world = World(2, PATIENT, chosen={1: ON})
    for error in play(world, None):
        assert isinstance(error, InvalidError)
        assert "settings.compression is 'on' or 'auto' on ranks [1] and 'off' on ranks [0]" in str(error)
    assert world.committed() == []


def test_ranks_may_skip_different_names() -> None:
    skipping = replace(ON, compression_skip=("model.*",))
    world = World(2, ON, chosen={1: skipping})
    reports = play(world, None)
    assert all(isinstance(report, SaveReport) for report in reports), reports
    assert stored_tensors(world.store, step_folder(1)) == expected(mixed_state(None))
