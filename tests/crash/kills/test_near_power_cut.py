"""The power of a host goes while its job saves into a near tier on a real file system; the root is elsewhere.

Whatever the file system lost, a restart takes the newest step that was acknowledged near, or a newer one, bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import pytest

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.policies import EveryNSteps
from holdfast.training.runs.tiers.near import NearPlace
from tests.crash.kills.test_power_cut import IMAGE_MIB, Buffered, kind, location
from tests.doubles.faults import Faults, FaultySyscalls
from tests.support.crashed_run import (
    SETTINGS,
    copy_with_links,
    expected_fingerprint,
    fingerprint,
    paths_under,
    run_at,
    training_state,
)
from tests.support.mounted_file_systems import acted_until_power_cut, copy_image, mounted, new_image

__all__ = ["kind", "location"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

POINTS = int(os.environ.get("NEAR_POWER_CUTS", "20"))
"""How often the power goes."""

DUE, NEAR_ONLY = (10, 30, 50), (20, 40)
NEXT = 60


class Host:
    """A host with a near tier on an image of a file system, and the root on another machine."""

    def __init__(self, location: Path, kind: str, syscalls: Syscalls) -> None:
        self.root, self.acknowledged = location / "root", location / "acknowledged"
        self._location, self._kind, self._syscalls = location, kind, syscalls

    def mounted(self, image: str) -> AbstractContextManager[Path]:
        return mounted(self._location / image, self._location / "m", options="loop", kind=self._kind)

    def manager(self, mount: Path, faults: Faults | None = None) -> CheckpointManager:
        settings = replace(SETTINGS, collect_grace_seconds=0.0)
        syscalls = self._syscalls if faults is None else cast(Syscalls, FaultySyscalls(self._syscalls, faults))
        near, root = (LocalStore(path, settings=settings, syscalls=syscalls) for path in (mount / "near", self.root))
        return run_at(root, settings=settings, near=NearPlace(near, EveryNSteps(1), keep_last=2))

    def train(self, mount: Path, faults: Faults, *, until: int = 50) -> None:
        """Save the steps that are missing; note what is acknowledged where the power stays."""
        with self.acknowledged.open("a", buffering=1) as said:
            try:
                self._train(mount, faults, until, said)
            except BaseException as error:
                said.write(f"failed: {error!r}\n")
                raise

    def _train(self, mount: Path, faults: Faults, until: int, said: TextIO) -> None:
        with self.manager(mount, faults) as manager:
            resumed = manager.load(training_state(0)) or 0
            for step in range(resumed + 10, until + 1, 10):
                handle = manager.save(step, training_state(step), near_only=step in NEAR_ONLY)
                handle.wait("near")
                said.write(f"near {step}\n")
                if step in DUE:
                    handle.wait("committed")
                    said.write(f"root {step}\n")

    def told(self, place: str) -> list[int]:
        return [int(line.split()[1]) for line in self.acknowledged.read_text().splitlines() if line.startswith(place)]

    def judge(self, mount: Path) -> int:
        """Require what was acknowledged, bit for bit, and that training goes on; return the step of the restart."""
        assert "failed" not in self.acknowledged.read_text()
        near, root = self.told("near"), self.told("root")
        for step in root:
            _require(step, holdfast.load(self.root, state := training_state(0), step=step).step, state)
        with self.manager(mount) as manager:
            resumed = manager.load(state := training_state(0))
            assert resumed is not None and resumed >= max(near), f"step {max(near)} was acknowledged near"
            _require(resumed, resumed, state)
            for step in manager.steps():
                _require(step, manager.load(state := training_state(0), step), state)
            assert manager.load(training_state(0)) == resumed
            manager.save(NEXT, training_state(NEXT)).wait()
        for place in (mount / "near", self.root):
            _require(NEXT, holdfast.load(place, state := training_state(0), step="latest").step, state)
            for manifest in place.glob("step-*/manifest.json"):
                assert list(holdfast.open_checkpoint(manifest.parent).verify()) == []
        return resumed


def _require(step: int, loaded: int | None, state: dict[str, object]) -> None:
    assert loaded == step and fingerprint(state) == expected_fingerprint(step)


@pytest.fixture(params=[Syscalls(), Buffered()], ids=["direct", "buffered"])
def host(request: pytest.FixtureRequest, location: Path, kind: str) -> Host:
    """A host whose run has one step in both places."""
    host = Host(location, kind, request.param)
    new_image(location / "template", IMAGE_MIB, kind)
    with host.mounted("template") as mount:
        host.train(mount, Faults(), until=10)
    host.root.rename(location / "root-template")
    host.acknowledged.rename(location / "acknowledged-template")
    return host


@pytest.mark.timeout(120 + 10 * POINTS)
def test_an_acknowledged_step_survives_a_power_cut_of_the_near_tier(host: Host, location: Path) -> None:
    def begin() -> None:
        shutil.rmtree(host.root, ignore_errors=True)
        copy_with_links(location / "root-template", host.root)
        shutil.copy(location / "acknowledged-template", host.acknowledged)
        copy_image(location / "template", location / "image")

    begin()
    counted = Faults()
    with host.mounted("image") as mount:
        host.train(mount, counted)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    # The last ones lie behind the training: it ended, and at once the power went.
    points = [1 + int((number + chance.random()) * counted.counted * 1.05 / POINTS) for number in range(POINTS)]
    resumed = list[int]()
    for at in points:
        begin()
        with host.mounted("image") as mount:
            acted_until_power_cut(mount, at, partial(host.train, mount))
        with host.mounted("image") as mount:
            try:
                resumed.append(host.judge(mount))
            except BaseException as error:
                error.add_note(
                    f"power cut at operation {at} of {counted.counted}; {host.acknowledged.read_text().split()}; "
                    f"near: {sorted(paths_under(mount))}; root: {sorted(paths_under(host.root))}"
                )
                raise
    print(f"{len(points)} power cuts: resumed at {[(step, resumed.count(step)) for step in sorted({*resumed})]}")
    assert {DUE[0], DUE[-1]} <= {*resumed} <= {*DUE, *NEAR_ONLY}
