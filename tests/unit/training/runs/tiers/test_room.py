"""Room for a step in the folders of several nodes."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import step_folder
from holdfast.core.plan.placement import RosterNode, grouping
from holdfast.errors import UnavailableError, shown_bytes
from holdfast.settings import MIB
from holdfast.stored.peers.parity_files import attempt_of, packs_at, protect
from holdfast.stored.repository.catalog import read_manifest
from holdfast.training.runs.tiers.room import NearRoom
from tests.unit.stored.peers.test_union import Nodes


def test_a_step_takes_its_share_of_a_node_and_the_parity_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, 4)
    manager = holdfast.CheckpointManager(nodes.at(0), process_group=False, preemption=False)
    with manager:
        manager.save(1, {"weights": torch.arange(3 * MIB // 4)}).wait()
    manifest, store, folder = read_manifest(nodes.at(3), step_folder(1)), nodes.at(3), nodes.stores["node-3"]
    step_bytes = sum(file.bytes for file in manifest.files)
    (attempt,) = {attempt_of(entry.key) for entry in nodes.at(0).list() if entry.key.endswith(".safetensors")}
    packs = {name: packs_at(node, attempt or "") for name, node in nodes.stores.items()}
    protect(nodes.stores, "node-3", attempt or "", packs)
    held_bytes = sum(path.stat().st_size for path in (tmp_path / "node-3").rglob("*") if path.is_file())
    assert held_bytes > MIB, "no pack, and the parity"
    share = grouping([RosterNode(name, name) for name in nodes.names], group=4).node_share
    share_bytes = -(-step_bytes // 3)

    def why_not(bytes_max: int | None, free_bytes: int) -> str:
        monkeypatch.setattr(folder, "free_bytes", lambda: free_bytes)
        room = NearRoom(store, bytes_max, None, folder, share)
        room.note_saved(manifest)
        return room.why_not(0)

    assert why_not(held_bytes + share_bytes, share_bytes) == ""
    needed = f"a step needs {shown_bytes(share_bytes)} on each node"
    assert f"has {shown_bytes(held_bytes)} of Tier" in (why := why_not(held_bytes + share_bytes - 1, share_bytes))
    assert needed in why
    assert f"has {shown_bytes(share_bytes - 1)} free" in (why := why_not(None, share_bytes - 1)) and needed in why


def test_steps_that_fail_for_an_earlier_failure_do_not_make_its_message_longer(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    room, why = NearRoom(nodes.at(0), None, None, nodes.stores["node-0"]), "node-3 does not answer"
    others = [nodes.stores[name] for name in ("node-1", "node-2", "node-3")]
    for each in others:
        each.is_silent = True
    for _ in range(3):
        ended = Future[SaveReport]()
        ended.set_exception(UnavailableError(why))
        room.note_end(ended)
        why = f"step 18 is for the near tier alone, and {room.why_not(0)}"
    assert room.why_not(0) == "the near tier fails: node-3 does not answer"
    for each in others:
        each.is_silent = False
    assert room.why_not(0) == ""
