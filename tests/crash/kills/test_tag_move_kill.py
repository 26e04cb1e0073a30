"""SIGKILL, errors and power cuts at every operation of a tag that moves: it is at the old or at the new step, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.stored.repository.tags import read_tags
from holdfast.training.runs.tags import tag_step
from tests.crash.kills.sweeping import fates_of_kills
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.support.crashed_run import NEW, OLD, committed_at, local_store, run_at, training_state
from tests.support.mounted_file_systems import FILE_SYSTEMS, acted_until_power_cut, copy_image, mounted, new_image

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STRIDE = int(os.environ.get("TAG_STRIDE", "7"))
"""Every so many-th call to the operating system is met; `make campaign` meets all."""
CUTS = 6
IMAGE_MIB = 16


def move(store: Store) -> None:
    tag_step(store, SystemClock(), NEW, "best", move=True)


def over_syscalls(root: Path, faults: Faults) -> None:
    move(local_store(root, faults))


def over_store(root: Path, faults: Faults) -> None:
    move(FaultyStore(local_store(root), faults))


def holder_of(root: Path) -> int:
    """Return the step that has the tag; require that it loads by the tag, and that the tag moves on."""
    store = local_store(root)
    tags = read_tags(store)
    assert not tags.damaged and list(tags.whole) == ["best"]
    run = run_at(store)
    step = run.load(training_state(OLD), "best")
    run.close()
    assert step == tags.whole["best"].step
    move(store)
    assert read_tags(store).whole["best"].step == NEW
    return step


@pytest.fixture
def template(in_memory: Path) -> Path:
    committed_at(in_memory / "template", OLD, NEW)
    tag_step(local_store(in_memory / "template"), SystemClock(), OLD, "best")
    return in_memory / "template"


@pytest.mark.parametrize("way", [over_syscalls, over_store])
def test_killed_anywhere(in_memory: Path, template: Path, way: Callable[[Path, Faults], None]) -> None:
    points = range(1, 2000, STRIDE if way is over_syscalls else 1)
    steps, _ = fates_of_kills(template, in_memory / "root", way, lambda root, _: holder_of(root), points)
    assert len(steps) > 5
    assert set(steps) == {OLD, NEW} and steps == sorted(steps), "what moved does not move back"


def test_an_error_at_any_operation_loses_nothing(in_memory: Path, template: Path) -> None:
    root = in_memory / "root"
    steps = []
    for at in range(1, 2000):
        shutil.copytree(template, root)
        faults = Faults(raise_error(UnavailableError), at=at)
        try:
            over_store(root, faults)
        except CheckpointError as error:
            assert faults.met, error
        steps.append(read_tags(local_store(root)).whole["best"].step)
        shutil.rmtree(root)
        if not faults.met:
            break
    assert set(steps) == {OLD, NEW} and steps[-1] == NEW


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_power_cut(in_memory: Path, template: Path, kind: str) -> None:
    image, blank, mount = in_memory / "image", in_memory / "blank", in_memory / "m"
    total = Faults()
    shutil.copytree(template, in_memory / "counted")
    over_syscalls(in_memory / "counted", total)
    new_image(blank, IMAGE_MIB, kind)
    with mounted(blank, mount, options="loop", kind=kind):
        shutil.copytree(template, mount / "root")
    for at in sorted({1 + round(number * total.counted / (CUTS - 1)) for number in range(CUTS)}):
        copy_image(blank, image)
        with mounted(image, mount, options="loop", kind=kind):
            returned = acted_until_power_cut(mount, at, partial(over_syscalls, mount / "root"))
        with mounted(image, mount, options="loop", kind=kind):
            step = holder_of(mount / "root")
        assert step == NEW if returned else step in (OLD, NEW)
