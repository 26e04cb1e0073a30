"""The state of two ranks: optimizers in a list, values that one rank cannot save, and state that some ranks lack."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.distributed.layouts.state_cases import Trained
from tests.support.gloo_worlds import Case, Results, run_worlds

CASES = (
    "optimizers_in_a_list",
    "refused_on_one_rank",
    "moments_on_one_rank",
    "cast_to_fresh_shards",
    "replicas_into_shards",
    "names_of_each_rank",
    "ascending_names_of_rank_0",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    cases = [Case(f"tests.distributed.layouts.state_cases:{name}", {"path": str(root / name)}, name) for name in CASES]
    return run_worlds(2, [cases], root / "world", deadline_seconds=150)["optimizers_in_a_list"]


def test_sharded_optimizers_in_a_list_go_on_in_one_process(results: Results, root: Path) -> None:
    first, second = results.values("optimizers_in_a_list")
    assert first == second
    alone = Trained(2)
    holdfast.load(root / "optimizers_in_a_list", alone.state(), process_group=False)
    assert alone.steps(3) == pytest.approx(first, rel=1e-5)


def test_what_one_rank_cannot_save_every_rank_names(results: Results, root: Path) -> None:
    texts = results.values("refused_on_one_rank")
    assert len(texts) == 2
    assert "rank 1 refused: " in str(texts[0])
    for text in texts:
        assert isinstance(text, str)
        assert "3 values of the state cannot be saved: (1) mask: torch.sparse_coo Tensor" in text
        assert "(2) args: " in text and "Pass vars(value)" in text and "(3) cfg[0].device: " in text
    assert not (root / "refused_on_one_rank").exists()


def test_state_that_one_rank_lacks_is_refused_by_its_cause(results: Results) -> None:
    for refused, then in results.values("moments_on_one_rank"):
        assert "optimizer.state.experts.momentum_buffer (ranks [0] hold it" in refused
        assert "optimizers of some ranks of a mesh have no state" in refused and "a gradient of zeros" in refused
        assert then == "saved"


def test_new_shards_of_moments_are_cast_as_those_that_exist(results: Results) -> None:
    assert results.values("cast_to_fresh_shards") == [[], []]


def test_state_of_replicas_does_not_take_the_place_of_shards(results: Results) -> None:
    for text, after in results.values("replicas_into_shards"):
        assert "optimizer.state.w.scales: (4,) here and (8,) in the checkpoint" in text
        assert after == "unchanged"


def test_names_of_a_lower_rank_come_first_each_in_its_own_order(results: Results, root: Path) -> None:
    assert results.values("names_of_each_rank") == [None, None]
    found = holdfast.read(root / "names_of_each_rank")
    assert list(found) == ["shared", "stages", "step"]
    assert list(found["stages"]) == ["norm", "0.z", "0.a", "0.m", "1.z", "1.a", "1.m"]
    assert results.values("ascending_names_of_rank_0") == [None, None]
    assert list(holdfast.read(root / "ascending_names_of_rank_0")) == ["x", "y", "b", "a"]
