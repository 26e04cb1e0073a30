"""The model of a run: what it holds follows what storage can still give back."""

from __future__ import annotations

import uuid

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.core.format.names import manifest_key
from holdfast.errors import MissingError
from holdfast.offline.repair.repair import Repair
from holdfast.stored.checkpoint.location import none_allowed
from holdfast.training.runs.removal.garbage_collection import collected
from tests.property.life import CLOCK, SETTINGS, SIZES, run_on, state_of
from tests.property.run_model import RunModel


def test_a_step_without_manifest_is_held_until_its_remains_are_collected() -> None:
    store, content = MemoryStore(uuid.uuid4().hex), (1,) * (len(SIZES) + 1)
    model = RunModel(store)
    model.unsure[1] = [(content, 0.0)]
    run = run_on(store)
    run.save(1, state_of(content)).wait()
    run.close()
    model.settle()
    store.delete([manifest_key(1)])
    model.damaged(manifest_key(1))
    model.settle()
    assert [held.step for held in model.held] == [1], "a repair may rebuild its manifest"
    collected(store, CLOCK, None, 0.0, SETTINGS.lease_seconds)
    model.settle()
    assert not model.held
    with pytest.raises(MissingError, match="no steps"):
        Repair(store, none_allowed, CLOCK, SETTINGS).run(None)
    model.reader.close()
