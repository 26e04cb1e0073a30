"""The bench of near tiers: what its rounds say, what a file of results keeps, and a drain of two ranks to a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import job, report, store_drain, tiers
from bench.goals import GOALS
from bench.parts import TIER_PARTS
from bench.store_place import VARIABLE, Place
from tests.support.object_server import ObjectServer

DRAINED = {"drain": 4.0, "drain_cpu": 1.0, "save": 5.0, "save_cpu": 2.0}
DRAINED |= {"limit_4": 3.0, "limit_4_cpu": 9.0, "limit_8": 2.0, "limit_8_cpu": 9.0}


def test_what_is_measured_becomes_every_key() -> None:
    found = store_drain.keys([DRAINED], {})
    assert {name: spread.median for name, spread in found.items()} == {"drain_vs_limit": 0.5, "drain_cpu_vs_save": 0.5}


def test_the_parts_at_the_disk_and_at_the_store_keep_the_results_of_each_other() -> None:
    busy = {"drained": 3.0, "alone": 2.0}
    disk = tiers.results_with({}, {"slowdown": [busy]}, "")
    both = tiers.results_with(disk, {"store_drain": [DRAINED], "slowdown_store": [{**busy, "alone": 3.0}]}, "a server")
    assert (both["drain_slowdown"], both["drain_slowdown_store"], both["drain_vs_limit_max"]) == (1.5, 1.0, 0.5)
    assert set(both["rounds"]) == {"slowdown", "store_drain", "slowdown_store"}  # type: ignore[call-overload]
    anew = tiers.results_with(both, {"slowdown": [{**busy, "drained": 2.0}]}, "")
    assert (anew["drain_slowdown"], anew["drain_slowdown_store"], anew["server"]) == (1.0, 1.0, "a server")


def test_every_key_of_a_drain_has_a_goal() -> None:
    keys = tiers.keys_of({"slowdown": [{"drained": 1.0, "alone": 1.0}], "store_drain": [DRAINED]})
    assert set(keys) == {"drain_slowdown", "drain_vs_limit", "drain_cpu_vs_save"} <= {goal.key for goal in GOALS}


@pytest.mark.long
def test_two_ranks_drain_to_a_server_and_leave_nothing(
    objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (objects.environment | {VARIABLE: objects.new_url()}).items():
        monkeypatch.setenv(name, value)
    part = TIER_PARTS["store_drain"]
    (found,) = job.run(part, {"mib": 64, "number": 0}, tmp_path / "job", progress=False).rounds
    assert set(found) == set(DRAINED) and min(found.values()) > 0
    assert report.names_of("drain_vs_limit")[0] in part.keys([found], {})
    place = Place.here()
    assert not list(place.client().list(place.key("")).collect())
    assert not list(Path(store_drain.MEMORY).glob(f"{store_drain.PREFIX}*"))
