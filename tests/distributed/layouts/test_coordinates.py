"""Plain tensors with coordinates over real gloo processes: uneven parts, replicas, other layouts, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from tests.distributed.layouts.coordinate_cases import UNEVEN, WHOLE, WRONG, training
from tests.support.gloo_worlds import Case, run_world


def case(function: str, name: str, **arguments: object) -> Case:
    return Case(f"tests.distributed.layouts.coordinate_cases:{function}", arguments, name)


def expected(key: str) -> torch.Tensor:
    """Return a whole tensor of the training, put together from the parts of all ranks."""
    whole = torch.full((10, 7), float("nan"))
    for rank, (_, pieces) in UNEVEN.items():
        state = training(rank, 2)
        (entries,) = state["optimizer"].state.values()
        local = state["weight"].detach() if key == "weight" else entries[key]
        for (row, column), (inner, at), (rows, columns) in pieces:
            whole[row : row + rows, column : column + columns] = local[inner : inner + rows, at : at + columns]
    assert not whole.isnan().any()
    return whole


REFUSALS = {
    "overlap": "w [10, 7] ([2, 0]–[3, 7]: ranks 0 and 1 hold it)",
    "hole": "w [10, 7] (no rank holds 7 of 70 elements)",
    "overlap as large as a hole": "w [10, 7] ([6, 0]–[7, 7]: ranks 1 and 2 hold it)",
    "nothing": "w [10, 7] (no rank holds 21 of 70 elements)",
    "twice": "w [10, 7] ([5, 0]–[6, 7]: rank 1 holds it twice)",
    "another shape": "w (float32 [10, 7] with coordinates of its own on rank 0 ≠ float32 [11, 7] with coordinates of "
    "its own on rank 1)",
    "outside": "w: on rank 1: global_offsets[0]=(8, 0) with local_sizes[0]=(3, 7); expected a box inside global_shape "
    "(10, 7)",
}


def test_coordinates(tmp_path: Path) -> None:
    def at(name: str) -> str:
        return str(tmp_path / name)

    ranks = run_world(
        3,
        [
            case("save", "saved", path=at("saved")),
            case("save", "async", path=at("async"), how="async"),
            case("save", "lazy", path=at("lazy"), how="lazy"),
            case("load", "loaded", path=at("saved")),
            case("load_meshed", "meshed", path=at("saved"), again=at("again")),
            case("load", "back", path=at("again")),
            case("replicated", "halves", path=at("halves"), everywhere=False),
            case("replicated", "mixed", path=at("mixed"), everywhere=True, twice=True),
            case("replicated", "differing", path=at("none"), everywhere=False, differs="halves"),
            case("replicated", "differing_all", path=at("none"), everywhere=True, differs="all"),
            case("replicated", "cut", path=at("none"), everywhere=False, differs="cut"),
            case("beside_declared", "declared", path=at("none")),
            *(case("refused", name, path=at("none"), wrong=name) for name in WRONG),
        ],
        tmp_path / "world",
    )
    for each in (*ranks.values("loaded"), *ranks.values("back")):
        assert isinstance(each, list) and len(each) > 4 and all(each)
    for name in ("saved", "async", "lazy/step-000000000001", "again"):
        whole = {"weight": torch.zeros(10, 7), "owned": torch.zeros(4)}
        holdfast.load(tmp_path / name, whole, process_group=False, strict=False)
        assert torch.equal(whole["weight"], expected("weight")), name
        assert whole["owned"].tolist() == [0, 1, 2, 3]
        stored = holdfast.open_checkpoint(tmp_path / name)
        for key in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(stored.read(f"optimizer.state.weight.{key}"), expected(key).numpy()), (name, key)
        assert list(stored.verify()) == []
    for each in ranks.values("meshed")[:2]:
        assert isinstance(each, dict)
        assert {name: each[name] for name in ("weight", "exp_avg", "exp_avg_sq")} == {
            name: expected(name).flatten().tolist() for name in ("weight", "exp_avg", "exp_avg_sq")
        }
    assert set(map(repr, ranks.values("halves"))) == {repr([True, True, WHOLE.nbytes])}
    assert set(map(repr, ranks.values("mixed"))) == {repr([True, True, WHOLE.nbytes + 48])}
    for name, differing in (("differing", "halves"), ("differing_all", "all"), ("cut", "halves")):
        for text in ranks.values(name):
            assert f"{differing} (rank 0 ≠ rank 2 with equal coordinates)" in str(text), (name, text)
    for text in ranks.values("declared"):
        assert "w (float32 [6] on rank 0 ≠ float32 [6] with coordinates of its own on rank 1)" in str(text)
    for name, problem in REFUSALS.items():
        for text in ranks.values(name):
            assert problem in str(text), (name, text)
            assert "fine" not in str(text)
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="this torch has no CheckpointableTensor")
def test_the_protocol_of_dcp(tmp_path: Path) -> None:
    """Uneven and several boxes on 3 ranks, by PyTorch's planners: both storages, both ways, and whole on one rank."""
    ranks = run_world(3, [case("through_dcp", "dcp", path=str(tmp_path))], tmp_path / "world")
    for each in ranks.values("dcp"):
        assert isinstance(each, list) and each == [True] * 7
    for name in ("torch", "written", "dropped"):
        whole = {"weight": torch.zeros(10, 7), "owned": torch.zeros(4)}
        holdfast.load(tmp_path / name, whole, process_group=False)
        assert torch.equal(whole["weight"], expected("weight")), name
        assert whole["owned"].tolist() == [0, 1, 2, 3]
