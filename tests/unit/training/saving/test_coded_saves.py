"""Saves that compress: what is written decodes to the state, in every way of taking it."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.wiring import saving_job, store_at
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import step_folder
from holdfast.errors import InvalidError, UnavailableError
from holdfast.pieces import PieceWriter, TensorPiece
from holdfast.settings import Settings
from tests.support.chunk_decoder import stored_pieces, stored_tensors
from tests.support.object_server import ObjectServer
from tests.support.tuning import tuned

ON = tuned(
    Settings(chunk_bytes=8192, compression="on"),
    window_bytes=8192,
    windows_in_flight=2,
    coded_bytes_min=8192,
    unchanged_bytes_min=4096,
)
Tensors = dict[str, torch.Tensor]


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02


def mixed_state(seed: int = 0) -> dict[str, Tensors]:
    masters = {f"layers.{number}.weight": drawn(9000 + 31 * number, seed + number) for number in range(3)}
    return {
        "model": {name: master.bfloat16() for name, master in masters.items()},
        "master": masters,
        "moments": {f"{name}.exp_avg": drawn(9001, seed + 9) * 1e-3 for name in masters},
        "other": {
            "ids": torch.arange(9000, dtype=torch.int64),
            "zeros": torch.zeros(9000),
            "few": (drawn(9000, 1) * 200).round() / 7,
            "noise": (drawn(40000, 2) * 1e6).to(torch.int64).to(torch.uint8),
            "small": torch.ones(3),
        },
    }


def flat(state: Mapping[str, Tensors]) -> dict[str, bytes]:
    return {
        f"{group}.{name}": tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for group, tensors in state.items()
        for name, tensor in tensors.items()
    }


def store_of(root: Path) -> Store:
    return store_at(root, Settings())


def codecs_of(root: Path, folder: str = "") -> dict[str, set[str]]:
    return {
        fqn: {piece.codec_of(n) for piece in pieces for n in range(len(piece.digests) // 16)}
        for fqn, pieces in stored_pieces(store_of(root), folder).items()
    }


def manager_at(root: Path, settings: Settings = ON) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, process_group=False, settings=settings)


def saved(manager: holdfast.CheckpointManager, step: int, state: Mapping[str, object]) -> SaveReport:
    report = manager.save(step, state).wait()
    assert isinstance(report, SaveReport)
    return report


def test_an_awaited_save_is_coded_and_exact(tmp_path: Path) -> None:
    state = mixed_state()
    # Of a job of its own: a job does not try again what did not shrink in its last save.
    report = holdfast.save(tmp_path / "at", state, process_group=False, settings=replace(ON, lease_seconds=9))
    assert stored_tensors(store_of(tmp_path / "at")) == flat(state)
    found = codecs_of(tmp_path / "at")
    assert found["master.layers.0.weight"] == {"residual"}
    assert found["model.layers.0.weight"] == {"planes"}
    assert found["moments.layers.0.weight.exp_avg"] == {"planes"}
    assert found["other.zeros"] == {"sparse"}
    assert found["other.few"] == {"dictionary"}
    assert found["other.ids"] == {"zstd"}
    assert found["other.noise"] == {""}
    assert report.bytes == sum(map(len, flat(state).values()))
    pieces = [piece for pieces in stored_pieces(store_of(tmp_path / "at")).values() for piece in pieces]
    assert report.stored_bytes == sum(piece.stored_bytes for piece in pieces) < 0.8 * report.bytes


@pytest.mark.parametrize("how", ["copy", "lazy", "lazy in one buffer", "lazy in three buffers"])
def test_background_saves_write_the_same_chunks_as_awaited_ones(tmp_path: Path, how: str) -> None:
    trained = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    state = {**mixed_state(), "trained": trained, "optimizer": optimizer}
    with manager_at(tmp_path / "awaited", replace(ON, arena_bytes_max=0)) as manager:
        assert saved(manager, 1, state).staging == "none"
    arena = {"lazy in one buffer": 8192, "lazy in three buffers": 3 * 8192}.get(how)
    settings = replace(ON, staging="lazy" if "lazy" in how else "copy", arena_bytes_max=arena)
    with manager_at(tmp_path / "run", settings) as manager:
        report = saved(manager, 1, state)
    assert report.staging == ("copy" if how == "copy" else "lazy")
    run, folder = store_of(tmp_path / "run"), step_folder(1)
    assert stored_tensors(run, folder).items() >= flat(mixed_state()).items()
    assert codings(store_of(tmp_path / "awaited"), folder) == codings(run, folder)


def codings(store: Store, folder: str = "") -> object:
    return {
        fqn: [(piece.offset, piece.digests, piece.coding and piece.coding.starts) for piece in pieces]
        for fqn, pieces in stored_pieces(store, folder).items()
    }


def test_unchanged_pieces_stay_where_they_are_coded_and_masters_with_their_weights(tmp_path: Path) -> None:
    state = mixed_state()
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        state["master"]["layers.1.weight"][5000] += 1
        state["model"]["layers.1.weight"].copy_(state["master"]["layers.1.weight"])
        report = saved(manager, 2, state)
        saved(manager, 3, state)
    assert report.bytes < 0.2 * report.unchanged_bytes
    for step in (1, 2, 3):
        assert (
            stored_tensors(store_of(tmp_path), step_folder(step)).items()
            >= flat(state if step > 1 else mixed_state()).items()
        )
    assert len(list(tmp_path.glob("step-000000000003/**/*.coded.*.link"))) == 4
    pieces = stored_pieces(store_of(tmp_path), step_folder(3))
    assert {piece.pack[:17] for piece in pieces["master.layers.0.weight"]} == {"step-000000000001"}
    assert {piece.pack[:17] for piece in pieces["master.layers.1.weight"]} == {"step-000000000002"}
    assert {piece.pack[:17] for piece in pieces["model.layers.1.weight"]} == {"step-000000000002"}


def test_a_master_is_written_anew_with_its_weight(tmp_path: Path) -> None:
    state = mixed_state()
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        state["model"]["layers.1.weight"][5000] += 1
        saved(manager, 2, state)
    assert stored_tensors(store_of(tmp_path), step_folder(2)).items() >= flat(state).items()
    pieces = stored_pieces(store_of(tmp_path), step_folder(2))
    assert not any(piece.pack.startswith("step-") for piece in pieces["master.layers.1.weight"])
    assert codecs_of(tmp_path, step_folder(2))["master.layers.1.weight"] == {"planes", "residual"}


def test_a_master_that_changed_is_coded_against_its_weight_in_an_earlier_step(tmp_path: Path) -> None:
    """Of a small step of training the weight keeps its 16 bits."""
    state = mixed_state()
    with manager_at(tmp_path) as manager:
        saved(manager, 1, state)
        for name, weight in state["model"].items():
            # As far from the weight, on the other side.
            state["master"][name].copy_(2 * weight.float() - state["master"][name])
            state["master"][name].copy_(
                torch.where(state["master"][name].bfloat16() == weight, state["master"][name], weight)
            )
        saved(manager, 2, state)
        saved(manager, 3, state)
    for step in (2, 3):
        pieces = stored_pieces(store_of(tmp_path), step_folder(step))
        assert stored_tensors(store_of(tmp_path), step_folder(step)).items() >= flat(state).items()
        assert {piece.pack[:17] for piece in pieces["model.layers.0.weight"]} == {"step-000000000001"}
        assert codecs_of(tmp_path, step_folder(step))["master.layers.0.weight"] == {"residual"}
    assert {piece.pack[:17] for piece in pieces["master.layers.0.weight"]} == {"step-000000000002"}


@pytest.mark.parametrize("index_chunks_max", [1 << 17, 8], ids=["one index", "split index"])
def test_after_a_load_coded_pieces_are_referred_to(tmp_path: Path, index_chunks_max: int) -> None:
    settings = tuned(ON, coded_bytes_min=8192, unchanged_bytes_min=4096, index_chunks_max=index_chunks_max)
    with manager_at(tmp_path, settings) as manager:
        saved(manager, 1, mixed_state())
    state = mixed_state(7)
    with manager_at(tmp_path, settings) as manager:
        manager.load(state)
        assert saved(manager, 2, state).bytes < 100
    assert stored_tensors(store_of(tmp_path), step_folder(2)).items() >= flat(mixed_state()).items()


def test_weights_may_stay_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(ON, compression_skip=("model", "other.z*", "absent.*"))
    with manager_at(tmp_path, settings) as manager:
        saved(manager, 1, mixed_state())
        saved(manager, 2, mixed_state(1))
    assert stored_tensors(store_of(tmp_path), step_folder(1)) == flat(mixed_state())
    found = codecs_of(tmp_path, step_folder(1))
    assert found["model.layers.0.weight"] == {""} and found["other.zeros"] == {""}
    assert found["master.layers.0.weight"] == {"residual"}
    assert [record.message for record in caplog.records if "compression_skip" in record.message] == [
        "save of step 1: compression_skip='absent.*' matches no name on any rank. Correct the pattern, or leave it out"
    ]


def test_what_did_not_shrink_is_left_plain_for_some_saves(tmp_path: Path) -> None:
    with manager_at(tmp_path, replace(ON, deduplicate=False)) as manager:
        for step in (1, 2):
            saved(manager, step, mixed_state())
    packs = [stored_pieces(store_of(tmp_path), step_folder(step))["other.noise"][0].pack for step in (1, 2)]
    assert packs[0].startswith("coded/") and not packs[1].startswith("coded/")


def test_off_is_byte_for_byte_as_without_the_setting(tmp_path: Path) -> None:
    settings = replace(ON, compression="off")
    report = holdfast.save(tmp_path / "off", mixed_state(), process_group=False, settings=settings)
    assert report.stored_bytes == report.bytes
    assert not list(tmp_path.glob("off/*/coded"))


def test_a_wrong_setting_is_refused() -> None:
    for wrong in ({"compression": "yes"}, {"compression_skip": "model.*"}):
        with pytest.raises(InvalidError, match=next(iter(wrong))):
            Settings(**wrong)  # type: ignore[arg-type]


class SmallDisk(Syscalls):
    """A disk with room for fewer bytes than are reserved."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__()
        self.room_bytes = room_bytes
        self.refused: list[str] = []

    def fallocate(self, fd: int, total_bytes: int) -> None:
        if total_bytes > self.room_bytes:
            self.refused.append("fallocate")
            raise OSError(errno.ENOSPC, "no space")
        super().fallocate(fd, total_bytes)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > self.room_bytes:
            self.refused.append("pwrite")
            raise OSError(errno.ENOSPC, "no space")
        return super().pwrite(fd, data, offset)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_pack_that_fits_once_it_is_coded_is_written_and_one_that_does_not_leaves_nothing(
    tmp_path: Path, is_full: bool
) -> None:
    state = {"master": drawn(200_000, 0), "zeros": torch.zeros(200_000)}
    disk = SmallDisk(300_000 if is_full else 1_000_000)
    store = LocalStore(tmp_path, settings=ON, syscalls=disk)
    with holdfast.CheckpointManager.over(store, saving_job(False, ON, tmp_path)) as manager:
        if is_full:
            with pytest.raises(UnavailableError, match="ENOSPC"):
                manager.save(1, state).wait()
            assert disk.refused[:2] == ["fallocate", "pwrite"]
            assert [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("coded")] == []
            disk.room_bytes = 1_000_000
        assert isinstance(manager.save(2, state).wait(), SaveReport)
    assert set(disk.refused) == {"fallocate", "pwrite"} if is_full else {"fallocate"}
    assert stored_tensors(store, step_folder(2)) == {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def test_pieces_that_their_caller_has_planned_are_coded_alike(tmp_path: Path) -> None:
    master = drawn(60_000, 0).reshape(300, 200)

    def pieces(rows: slice) -> list[TensorPiece]:
        part = master[rows]
        at = (rows.start, 0)
        weight = TensorPiece("model.w", (300, 200), at, part.bfloat16())
        return [weight, TensorPiece("optimizer.w.master", (300, 200), at, part)]

    writers = [PieceWriter(tmp_path / "at", settings=ON) for _ in range(2)]
    tickets = writers[0].open(2)
    parts = [
        writer.write(ticket, pieces(rows), {})
        for writer, ticket, rows in zip(writers, tickets, (slice(0, 120), slice(120, 300)), strict=True)
    ]
    writers[0].finish(parts)
    store = store_of(tmp_path / "at")
    assert stored_tensors(store) == {
        "model.w": master.bfloat16().view(torch.uint8).numpy().tobytes(),
        "optimizer.w.master": master.numpy().tobytes(),
    }
    assert codecs_of(tmp_path / "at") == {"model.w": {"planes"}, "optimizer.w.master": {"residual"}}


def test_a_store_of_objects_over_http(objects: ObjectServer) -> None:
    settings = tuned(
        replace(ON, chunk_bytes=65536),
        window_bytes=65536,
        coded_bytes_min=65536,
        cell_elements=1 << 17,
        full_pack_bytes=1 << 19,
    )
    settings, url = replace(settings, object_store=objects.settings().object_store), objects.new_url()
    state = {"model": {"w": drawn(400_000, 0).bfloat16()}, "master": {"w": drawn(400_000, 0)}}
    with holdfast.CheckpointManager(url, process_group=False, settings=settings) as manager:
        report = saved(manager, 1, state)
    store = store_at(url, settings)
    assert stored_tensors(store, step_folder(1)) == flat(state)
    assert report.stored_bytes < 0.7 * report.bytes
    packs = {piece.pack for pieces in stored_pieces(store, step_folder(1)).values() for piece in pieces}
    assert len([pack for pack in packs if pack.startswith("coded/")]) > 3
