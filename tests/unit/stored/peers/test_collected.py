"""Collection of steps in the folders of several nodes: what is left is protected as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.core.format.names import step_folder
from holdfast.policies import LatestN
from holdfast.settings import MIB, Settings
from holdfast.stored.peers.parity_files import attempt_of, packs_at, parity_keys, protect
from holdfast.stored.repository.near_tier import empty_near
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.removal.garbage_collection import collected
from tests.support.tuning import tuned
from tests.unit.stored.peers.test_union import Nodes, read

SETTINGS = tuned(Settings(collect_grace_seconds=0.0), unchanged_bytes_min=4096)


def state_at(step: int) -> dict[str, object]:
    return {"frozen": torch.arange(6000.0), "moving": torch.full((MIB // 4,), float(step))}


def kept_files(nodes: Nodes) -> list[str]:
    return [entry.key for entry in nodes.at(0).list() if entry.key.startswith("step-")]


def test_a_pack_that_later_steps_need_is_still_read_without_its_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    for store in nodes.stores.values():
        store.traits = replace(store.traits, object_bytes_max=5 * MIB // 4)
    manager = holdfast.CheckpointManager(
        nodes.at(0), keep_last=1, process_group=False, preemption=False, settings=SETTINGS
    )
    with manager:
        manager.save(1, state_at(1)).wait()
        first = {key for entry in nodes.at(0).list() if (key := entry.key).endswith(".safetensors")}
        (attempt,) = {attempt_of(key) or "" for key in first}
        packs = {name: packs_at(store, attempt) for name, store in nodes.stores.items()}
        for name in nodes.names:
            protect(nodes.stores, name, attempt, packs)
        whole = {key: read(nodes.at(0), key) for key in first}
        for step in (2, 3):
            manager.save(step, state_at(step)).wait()
    assert manager.steps() == [3] and len(first) > 1
    nodes.lose(0)
    assert {key: read(nodes.at(1), key) for key in first} == whole


def test_an_emptied_tier_has_no_parity_of_lost_packs(tmp_path: Path) -> None:
    nodes, lost = Nodes(tmp_path / "near", 3), f"{step_folder(1)}{'0' * 16}/"
    for key in parity_keys(lost):
        nodes.stores["node-1"].put(key, b"x")
    empty_near(TwoRoots(nodes.at(0), LocalStore(tmp_path / "root", settings=SETTINGS)))
    assert not [*nodes.stores["node-1"].list("")]


def test_a_silent_node_holds_up_no_removal_of_other_files(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    with holdfast.CheckpointManager(nodes.at(1), process_group=False, preemption=False, settings=SETTINGS) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).wait()
    steps = kept_files(nodes)
    nodes.put_packs([1000])  # Of a save that failed.
    nodes.stores["node-1"].is_silent = True
    report = collected(nodes.at(0), SystemClock(), LatestN(1), 0.0, 5.0)
    assert [*report.reasons] == [2] and "cannot be looked at now" in report.reasons[2][0]
    assert report.steps == (1,), "of the steps that cannot be looked at the newest one stays"
    nodes.stores["node-1"].is_silent = False
    assert {each for each in steps if each.startswith(step_folder(2))} <= {*kept_files(nodes)}
    assert collected(nodes.at(0), SystemClock(), LatestN(1), 0.0, 5.0).steps == (1,), "the part that the node still has"
    target = state_at(0)
    with holdfast.CheckpointManager(nodes.at(1), process_group=False, preemption=False, settings=SETTINGS) as manager:
        assert manager.load(target) == 2
    assert all(torch.equal(target[name], value) for name, value in state_at(2).items())  # type: ignore[arg-type]
