"""What a near tier and a root do that do not agree: one was away, is damaged, or was written by a job without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import CorruptError
from tests.unit.training.runs.tiers.test_near_tier import Place, flip, loaded, packs_of, steps_in, train


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "root", tmp_path / "near")


@contextmanager
def away(place: Place) -> Iterator[None]:
    """Have the near tier be away for a while."""
    elsewhere = place.near.rename(place.near.with_name("away"))
    yield
    shutil.rmtree(place.near, ignore_errors=True)
    elsewhere.rename(place.near)


def trained(place: Place, *steps: int) -> None:
    with place.manager() as manager:
        loaded(manager)
        train(manager, *steps)
        manager.close(wait=False)


def tags_in(root: Path) -> list[str]:
    return sorted(path.stem for path in root.glob("tags/*.json"))


def test_a_tag_that_was_removed_while_the_near_tier_was_away_stays_removed(place: Place) -> None:
    trained(place, 10, 20)
    holdfast.api.tag(place.root, 20, "best")
    with away(place):
        holdfast.api.untag(place.root, "best")
    assert not holdfast.api.list_steps(place.root).tags
    holdfast.api.tag(place.root, 10, "best")
    holdfast.api.untag(place.root, "best")
    holdfast.api.tag(place.root, 20, "other")
    with away(place):
        holdfast.api.untag(place.root, "other")
    trained(place, 30)
    assert tags_in(place.near) == []


def test_a_root_that_is_given_back_has_the_tags_again(place: Place) -> None:
    trained(place, 10, 20)
    holdfast.api.tag(place.root, 10, "best")
    shutil.rmtree(place.root)
    assert holdfast.api.drain(str(place.near)).steps == (10, 20)
    assert tags_in(place.root) == ["best"]


@pytest.mark.parametrize("damaged", ["manifest", "pack"])
def test_a_step_that_is_damaged_near_does_not_keep_others_from_the_drain(place: Place, damaged: str) -> None:
    trained(place, 20, 40)
    shutil.rmtree(place.root)
    flip(place.near / "step-000000000020/manifest.json" if damaged == "manifest" else packs_of(place.near, 20)[0], -10)
    with pytest.raises(CorruptError):
        holdfast.api.drain(str(place.near), remove=True)
    assert steps_in(place.root) == [40]
    assert steps_in(place.near) == [20, 40], "nothing is removed"


def test_a_step_that_was_removed_while_the_near_tier_was_away_stays_removed(place: Place) -> None:
    trained(place, 20, 40)
    with away(place):
        holdfast.api.remove_steps(place.root, [40], grace_seconds=0)
    with place.manager() as manager:
        assert manager.steps() == [20]
        assert loaded(manager) == 20
        train(manager, 30)
        assert manager.steps() == [20, 30]
