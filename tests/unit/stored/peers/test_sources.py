"""The report of a load from the folders of several nodes, with or without a root: from where its bytes came."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from holdfast._face.wiring import codecs
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.framework import Selection
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import LoadReport
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.peers.parity_files import attempt_of, packs_at, protect
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import load_checkpoint
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.step_choice import StepChoice
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, World, plain, saved
from tests.unit.stored.peers.test_union import Nodes

SETTINGS = tuned(PATIENT, unchanged_bytes_min=1024)
COUNT = 30_000


def state_of(step: int) -> dict[str, GlobalTensor]:
    changing = np.random.default_rng(step).standard_normal(COUNT).astype(np.float32)
    return {"changing": GlobalTensor("float32", changing), "frozen": plain(0.5, count=COUNT)}


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    """Two steps on node 0, of which the second refers to the first, with parity on the other nodes."""
    nodes = Nodes(tmp_path / "nodes", 3)
    world = World(1, SETTINGS, stores={0: nodes.at(0)})
    world.play(lambda rank, run: [saved(run, step, state_of(step)) for step in (1, 2)])
    for attempt in {attempt_of(entry.key) or "" for entry in nodes.at(0).list() if entry.key.endswith(".safetensors")}:
        packs = {name: packs_at(store, attempt) for name, store in nodes.stores.items()}
        for name in nodes.names:
            protect(nodes.stores, name, attempt, packs)
    return nodes


def loaded(store: Store) -> LoadReport:
    def work(comm: ThreadComm) -> LoadReport:
        job = Job(comm, SystemClock(), SETTINGS, NumpyFramework(0), codecs=codecs(), saves=False)
        state = {name: plain(-1.0, count=COUNT) for name in state_of(2)}
        home = StepChoice(CheckpointLocation(store, "", None, root=store))
        report = load_checkpoint(job, home, LoadRequest(state, Selection(), strict=True))
        assert report.step == 2
        for name, tensor in state_of(2).items():
            assert np.array_equal(state[name].array, tensor.array), name
        return report

    (report,) = outcomes_of_ranks(1, work)
    if isinstance(report, BaseException):
        raise report
    return report


def sources(store: Store) -> Mapping[str, int]:
    report = loaded(store)
    assert sum(report.sources.values()) == report.bytes == 2 * 4 * COUNT
    return report.sources


def test_a_load_names_the_nodes_that_it_read(nodes: Nodes) -> None:
    own, other = nodes.at(0), nodes.at(1)
    assert list(sources(own)) == ["own node"]
    assert list(sources(other)) == ["node node-0"]
    nodes.lose(0)
    nodes.keepers = nodes.names[1:]
    assert list(sources(nodes.at(1))) == ["parity of node node-0"]


@pytest.mark.parametrize("absent", ["step-000000000001/", "step-000000000002/"])
def test_a_load_names_nodes_and_root(nodes: Nodes, tmp_path: Path, absent: str) -> None:
    shutil.copytree(tmp_path / "nodes" / "node-0", tmp_path / "far")
    far = LocalStore(tmp_path / "far", settings=SETTINGS)
    near = nodes.at(1)
    assert list(sources(TwoRoots(near, far))) == ["node node-0"], "the pack of step 1 too"
    assert list(sources(TwoRoots(near, far))) == ["node node-0"], "bytes of an earlier load do not count"
    (pack,) = (entry.key for entry in near.list(absent) if entry.key.endswith(".safetensors"))
    near.delete([pack])
    assert sources(TwoRoots(near, far)) == {"node node-0": 4 * COUNT, far.url: 4 * COUNT}
