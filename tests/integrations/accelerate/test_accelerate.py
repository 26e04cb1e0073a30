"""What `tests/unit/integrations/test_accelerate.py` cannot show: kills under DDP, FSDP2, and torchdata's loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchdata", reason="`make integrations FRAMEWORK=accelerate` installs it")

import accelerate
from accelerate.state import AcceleratorState, GradientState

from holdfast.integrations.accelerate import Accelerator
from tests.integrations.table import RANKS_AFTER, Table, is_well
from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.integrations.accelerate.cases"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Have Accelerate begin anew: its state is one for the whole process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_replicas_that_are_killed_resume_bit_for_bit(tmp_path: Path) -> None:
    rows = list(Table("accelerate.replicas", tmp_path).rows("holdfast", ("writing", "publishing")))
    assert len(rows) == 4 and all(map(is_well, rows)), rows


def test_replicas_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    found = Table("accelerate.replicas", tmp_path).on_other_ranks()
    assert all(found[f"equal_on_{ranks}"] is True for ranks in RANKS_AFTER), found


# ------------------------------------------------------------------------------------------------------- FSDP2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    scratch = tmp_path_factory.mktemp("accelerate")
    names = ("sharded_hooks", "compiled_shards", "flat_shards")
    cases = [Case(f"{CASES}:{name}", {"folder": str(scratch / "saved" / name)}) for name in names]
    return run_world(2, cases, scratch)


def test_whole_weights_are_gathered_only_for_a_hook(world: Results) -> None:
    main, other = world.values("sharded_hooks")
    assert main["before"] == other["before"] == 0 and main["after"] == other["after"] == 1
    assert main["seen"] == {
        "shapes": {"0.weight": [6, 4], "0.bias": [6], "2.weight": [2, 6], "2.bias": [2]},
        "whole": True,
    }
    for value in (main, other):
        models = {
            folder: [name for name in names if name.startswith("model.")] for folder, names in value["names"].items()
        }
        assert models == {"without": ["model.0.bias", "model.0.weight", "model.2.bias", "model.2.weight"], "with": []}
        assert "optimizer.state.0.weight.exp_avg" in value["names"]["with"]


NAMES = ["model.0.bias", "model.0.weight", "model.2.bias", "model.2.weight"]


def test_names_of_a_compiled_and_sharded_model_are_plain(world: Results) -> None:
    for value in world.values("compiled_shards"):
        assert value == {"equal": True, "names": NAMES}


def test_fsdp1_resumes_as_if_uninterrupted(world: Results) -> None:
    for value in world.values("flat_shards"):
        assert value == {"alike": True, "names": NAMES}


# --------------------------------------------------------------------------------------------------- torchdata


def stateful(workers: int) -> tuple[Accelerator, torch.utils.data.DataLoader]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    examples = torch.arange(12.0).reshape(12, 1)
    return accelerator, accelerator.prepare(
        torch.utils.data.DataLoader(examples, batch_size=2, shuffle=True, num_workers=workers)
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_data_loader_goes_on_within_an_epoch(tmp_path: Path, workers: int) -> None:
    accelerator, loader = stateful(workers)
    list(loader)
    expected = []
    for number, batch in enumerate(loader):
        if number >= 2:
            expected.append(batch.tolist())
        if number == 1:
            accelerator.save_state(tmp_path / "c")
    after = [batch.tolist() for batch in loader]

    other, fresh = stateful(workers)
    other.load_state(tmp_path / "c")
    other.save_state(tmp_path / "again")  # A save before the first batch keeps the position.
    assert [batch.tolist() for batch in fresh] == expected
    assert [batch.tolist() for batch in fresh] == after
    third, newest = stateful(workers)
    third.load_state(tmp_path / "again")
    assert [batch.tolist() for batch in newest] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_says_whether_it_is_between_epochs(workers: int) -> None:
    """The unit tests know these entries by name."""
    from holdfast.integrations.accelerate.data import LoaderPosition, _is_between_epochs

    _, loader = stateful(workers)
    positions = [LoaderPosition(loader).state_dict()["position"]]
    for _ in loader:
        positions.append(LoaderPosition(loader).state_dict()["position"])
    assert list(map(_is_between_epochs, positions)) == [True, *[False] * 5, True]
