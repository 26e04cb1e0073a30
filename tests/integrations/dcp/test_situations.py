"""PyTorch's tests of DCP's storage, tried with our writer and reader: `docs/integrations.md` has the list."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import holdfast
from tests.integrations.dcp.situations import LAYOUTS
from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.integrations.dcp.situations"
SITUATIONS = [
    "layouts",
    "sharded_tensors",
    "fsdp1",
    "hybrid",
    "tensor_parallel",
    "fine_tuning",
    "renamed",
    "own_keys",
    "submesh",
    "groups",
    "without_state",
    "failures",
    "refused",
    "lowest_rank",
    "in_a_process",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("situations")


@pytest.fixture(scope="module")
def four(root: Path) -> Results:
    cases = [Case(f"{CASES}:{name}", {"path": str(root / name)}) for name in SITUATIONS]
    return run_world(4, cases, root / "world", deadline_seconds=400)


@pytest.mark.parametrize("name", SITUATIONS)
def test_it_works_as_with_dcps_own_storage(four: Results, name: str) -> None:
    four.values(name)


def test_every_layout_is_loaded_in_every_other(four: Results) -> None:
    assert four.values("layouts") == [len(LAYOUTS) ** 2] * 4


def test_a_failure_in_any_call_fails_the_save_on_every_rank(root: Path, four: Results) -> None:
    first, *others = four.values("failures")
    assert all(each == first for each in others)
    assert isinstance(first, dict)
    assert len(first) == 8
    for place, met in first.items():
        call, _, rank = place.partition(" on ")
        assert met == [f"{rank}: {call} was told to fail"]
    assert not (root / "failures" / "manifest.json").exists()


def test_what_is_refused_is_named(four: Results) -> None:
    for errors in four.values("refused"):
        assert isinstance(errors, dict)
        assert "b: a value of type _io.BytesIO cannot be saved" in errors["bytes"]
        assert "s: torch.sparse_coo Tensor cannot be saved" in errors["sparse"]
        assert "use_collectives=False" in errors["no collectives"]


def test_the_lowest_rank_writes_what_is_replicated(root: Path, four: Results) -> None:
    found = holdfast.open_checkpoint(root / "lowest_rank")
    assert [found.written_by(fqn) for fqn in ("a", "b")] == [{0: 1}] * 2
