"""The life of a run in an object store: the same verbs, model and faults as elsewhere, against a real server."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.store import Store
from holdfast.errors import UnavailableError
from tests.doubles.faults import FaultyStore, raise_error
from tests.property.life import SETTINGS
from tests.property.test_life_of_a_run import LifeOfARun
from tests.support.object_server import ObjectServer

EXAMPLES = int(os.environ.get("LIFE_EXAMPLES", "1"))
STEPS = int(os.environ.get("LIFE_STEPS", "30"))


class OnObjects(LifeOfARun):
    """On an object store that fails by the operation."""

    failure, scale = staticmethod(raise_error(UnavailableError)), 1
    server: ClassVar[ObjectServer]

    def opened_stores(self) -> tuple[Store, Store]:
        chosen = replace(SETTINGS, object_store=self.server.settings().object_store)
        store = RetryingStore(ObjectStore(self.server.new_url(), settings=chosen), chosen)
        return store, FaultyStore(store, self.switch)


def test_a_life_on_objects(objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnObjects, "server", objects, raising=False)
    chosen = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        phases=[Phase.generate],
        derandomize="LIFE_EXAMPLES" not in os.environ,
        suppress_health_check=list(settings().suppress_health_check),
    )
    run_state_machine_as_test(OnObjects, settings=chosen)
