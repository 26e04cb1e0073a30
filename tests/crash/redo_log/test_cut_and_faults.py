"""The power goes, or the storage fails, at calls of a seal: sealed records stay, and training goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.core.engine.writing.write import PackWriter
from holdfast.stored.repository.logs import read_records
from holdfast.training.redo_log.segments import write_segment
from tests.doubles.faults import Faults, FaultySyscalls
from tests.support.crashed_run import SETTINGS
from tests.support.mounted_file_systems import (
    FILE_SYSTEMS,
    acted_until_power_cut,
    copy_image,
    mounted,
    new_image,
    workplace,
)
from tests.support.redo_log.segments import LOG, queued

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]

STEPS = range(11, 15)
CUTS = int(os.environ.get("REDO_CUTS", "12"))


@pytest.fixture
def location() -> Iterator[Path]:
    with workplace() as folder:
        yield folder


def seal(root: Path, sealed: Path, faults: Faults) -> None:
    """Seal four records, and note each once its seal has returned."""
    store = LocalStore(root, settings=SETTINGS, syscalls=cast(Syscalls, FaultySyscalls(Syscalls(), faults)))
    writer = PackWriter(store, SETTINGS)
    for step in STEPS:
        values = np.full((6, 5), step, np.float32)
        write_segment(store, writer, 0, [queued(step, step - 1, values, [(0, 6)])], lambda _: None)
        with sealed.open("a") as file:
            file.write(f"{step}\n")


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_sealed_records_survive_a_power_cut(location: Path, kind: str) -> None:
    template, image, sealed = location / "template", location / "image", location / "sealed"
    new_image(template, 16, kind)
    counted = Faults()
    seal(location / "counted", sealed, counted)
    kept = 0
    for number in range(CUTS):
        at = 1 + round(number * counted.counted / (CUTS - 1))
        sealed.write_text("")
        copy_image(template, image)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            acted_until_power_cut(mount, at, partial(seal, mount / "root", sealed))
        noted = [int(line) for line in sealed.read_text().split()]
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            found = list(read_records(LocalStore(mount / "root", settings=SETTINGS), LOG, 0, 10))
        assert found[: len(noted)] == noted, f"power cut at operation {at} of {counted.counted}"
        assert found == list(STEPS)[: len(found)]
        kept += len(noted)
    assert 0 < kept < CUTS * len(STEPS)
