"""DCP's verbs above Holdfast on two real ranks: layouts, cached plans, a rank that fails, a coordinator that dies."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.errors import MissingError
from tests.distributed.foreign import dcp_writer_cases
from tests.support.gloo_worlds import Case, Results, run_worlds

CASES = "tests.distributed.foreign.dcp_writer_cases"
KINDS: dict[str, dict[str, object]] = {
    "fsdp2": {"kind": "fsdp2", "asynchronous": True},
    "flattened": {"kind": "fsdp2", "flatten": True},
    "hsdp": {"kind": "hsdp"},
    "tensor-parallel": {"kind": "tensor-parallel"},
    "replicas": {"kind": "replicas", "asynchronous": True},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcp-writer")


@pytest.fixture(scope="module")
def worlds(root: Path) -> dict[str, Results]:
    saving = [Case(f"{CASES}:save", {"path": str(root / name), **kind}, name) for name, kind in KINDS.items()]
    failing = [
        Case(f"{CASES}:one_rank_fails", {"path": str(root / name), "by_verb": by_verb}, name)
        for name, by_verb in (("fails-by-verb", True), ("fails", False))
    ]
    caching = Case(f"{CASES}:cached_plans", {"path": str(root / "cached")})
    dying = Case(f"{CASES}:coordinator_dies", {"path": str(root / "dies")})
    return run_worlds(2, [[*saving, caching, *failing], [dying]], root / "worlds")


@pytest.mark.parametrize("name", KINDS)
def test_each_layout_comes_back(root: Path, worlds: dict[str, Results], name: str) -> None:
    saved = worlds[name].values(name)
    assert saved[0] == saved[1]
    assert list(holdfast.open_checkpoint(root / name).verify()) == []
    if name != "tensor-parallel":
        assert dcp_writer_cases.load_plain(root / name) == saved[0]


def test_each_rank_writes_its_share(root: Path, worlds: dict[str, Results]) -> None:
    worlds["fsdp2"].values("fsdp2")
    assert holdfast.open_checkpoint(root / "fsdp2").written_by("model.embed.weight") == {0: 1, 1: 1}


def test_a_planner_that_sends_no_plan_twice(worlds: dict[str, Results]) -> None:
    assert worlds["cached_plans"].values("cached_plans") == [[0.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize("name", ["fails-by-verb", "fails"])
def test_a_rank_that_fails_fails_all(worlds: dict[str, Results], name: str) -> None:
    """https://github.com/pytorch/pytorch/issues/191391: DCP's own save can succeed there."""
    for met in worlds[name].values(name):
        assert isinstance(met, dict)
        assert met["error"] == "this rank's disk is gone"
        assert not met["visible"]
        assert met["folders"] == 1, "the next save removes what the failed one has left"
        if name == "fails-by-verb":
            assert met["left"] == []


def test_a_coordinator_that_dies_leaves_nothing_visible(root: Path, worlds: dict[str, Results]) -> None:
    results = worlds["coordinator_dies"]
    assert results.exits[0] == -9
    with pytest.raises(MissingError):
        holdfast.open_checkpoint(root / "dies")
    assert list((root / "dies").rglob("*.safetensors")), "both ranks had written"
