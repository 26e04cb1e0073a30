"""Training loops on real ranks: all save the same steps, whoever knows the time, and whoever asks."""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Results, run_worlds

CASES = "tests.distributed.jobs.loop_cases"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    root = tmp_path_factory.mktemp("loops")

    def case(function: str, name: str, **arguments: object) -> Case:
        return Case(f"{CASES}:{function}", {"root": str(root / name), **arguments}, name)

    cases = [
        case("by_time", "time"),
        case("by_time_far_apart", "apart"),
        *(case("on_request", f"request-{rank}", asking=rank) for rank in (0, 1)),
        case("metrics_of_rank_0", "metrics"),
    ]
    return run_worlds(2, [[each] for each in cases], root, deadline_seconds=150)


def dicts(worlds: dict[str, Results], name: str) -> list[dict]:  # type: ignore[type-arg]
    values = worlds[name].values(name)
    assert all(isinstance(value, dict) for value in values)
    return values  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["time", "apart", "request-0", "request-1"])
def test_every_rank_saves_the_same_steps_and_they_load(worlds: dict[str, Results], name: str) -> None:
    first, second = dicts(worlds, name)
    assert first == second
    assert first["saved"] == first["steps"], "none that began was refused by ranks that save another"
    assert first["newest"] == first["steps"][-1] and first["whole"]


def test_a_time_rule_saves_now_and_then(worlds: dict[str, Results]) -> None:
    saved = dicts(worlds, "time")[0]["saved"]
    assert 2 <= len(saved) <= 20
    assert {25, 50} <= set(dicts(worlds, "apart")[0]["saved"])


@pytest.mark.parametrize("asking", [0, 1])
def test_a_request_of_one_rank_is_one_save_of_all(worlds: dict[str, Results], asking: int) -> None:
    (step,) = dicts(worlds, f"request-{asking}")[0]["saved"]
    assert 20 <= step <= 55


def test_metrics_are_those_of_rank_0_and_what_is_wrong_is_refused_everywhere(worlds: dict[str, Results]) -> None:
    for said in dicts(worlds, "metrics"):
        assert "'loss'" in said["refused"] and "['los']" in said["refused"]
        assert "expected one number" in said["bad"]
        assert said["metrics"] == {"2": {"loss": 0.5}, "4": {}}
