"""Damage that one rank alone meets: all ranks fall back together, to the same step, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.distributed.loads.resume_cases:newest_damaged"
PACKS = ("r00000.safetensors", "r00001.safetensors")
PART = "parts/r00001.msgpack"
WORLDS: dict[str, tuple[str, str, dict[str, str]]] = {
    **{f"rank-{rank}": ("rows", "never", {"3": PACKS[rank]}) for rank in (0, 1)},
    "newest-two": ("rows", "never", {"3": PACKS[1], "2": PACKS[0]}),
    "exchanged": ("copies", "always", {"3": PACKS[1]}),
    "exchanged-two": ("copies", "always", {"3": PACKS[0], "2": PACKS[1]}),
    "own-values": ("rows", "auto", {"3": PART}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("resume")
    cases = [
        Case(CASES, {"root": str(root / name), "layout": layout, "exchange": exchange, "damages": damages}, name)
        for name, (layout, exchange, damages) in WORLDS.items()
    ]
    cases.append(Case("tests.distributed.loads.resume_cases:gone_back", {"root": str(root / "back"), "layout": "rows"}))
    return run_world(2, cases, root / "world", deadline_seconds=150)


@pytest.mark.parametrize("name", list(WORLDS))
def test_all_ranks_resume_from_the_same_older_step(world: Results, name: str) -> None:
    damages = WORLDS[name][2]
    whole = max({1, 2, 3} - set(map(int, damages)))
    values = world.values(name)
    for value in values:
        assert isinstance(value, dict)
        for outcome in value["outcomes"]:
            assert (outcome["step"], outcome["exact"]) == (whole, True)
            assert [step for step, _ in outcome["passed_over"]] == sorted(map(int, damages), reverse=True)
        assert "hash" in value["explicit"]
        assert (value["after"], value["exact"]) == (7, True)
    assert len({str(value["outcomes"]) for value in values}) == 1, "every rank reports the same"  # type: ignore[index,call-overload]


def test_every_rank_goes_back_and_a_restart_resumes_the_new_timeline(world: Results) -> None:
    values = world.values("gone_back")
    assert all(value == values[0] for value in values)
    (value,) = values[:1]
    assert isinstance(value, dict)
    assert (value["exact"], value["resumed"], value["steps"]) == (True, 5, [1, 2, 5])
    assert [name.split("@")[0] for name in value["superseded"]] == ["2", "3"]
