"""Losing a race also means that the winner's object is durable: who sees "exists" may act on it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from holdfast.errors import ConflictError
from holdfast.settings import Settings
from holdfast.stores.local import LocalStore
from holdfast.stores.syscalls import Syscalls
from holdfast.testing.faults import Faults, FaultySyscalls, fail_with


def test_conflict_makes_the_winners_object_durable(tmp_path: Path) -> None:
    LocalStore(tmp_path / "root", settings=Settings()).put_if_absent("step/manifest.json", b"winner")
    faults = Faults(fail_with(5), at=1_000_000)
    store = LocalStore(
        tmp_path / "root", settings=Settings(), syscalls=cast(Syscalls, FaultySyscalls(Syscalls(), faults))
    )
    with pytest.raises(ConflictError):
        store.put_if_absent("step/manifest.json", b"loser")
    names = [each.name for each in faults.seen]
    after_link = names[names.index("link") :]
    assert after_link.count("fsync") >= 3, "the object, its folder and the root"
    assert store.get("step/manifest.json", 100) == b"winner"
