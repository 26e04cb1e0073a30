"""DCP above Holdfast: its verbs, planners and failures, in one process and on two ranks that this process plays."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251 - as DCP sends a save to another process
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.storage import WriteResult

import holdfast
from holdfast import Settings
from holdfast._face import wiring
from holdfast._face.pieces import staging
from holdfast.errors import ConflictError, InvalidError, UnavailableError
from holdfast.integrations import dcp
from holdfast.integrations.host import mark_of
from tests.doubles.faults import Faults, FaultyStore, raise_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning"),
]


@pytest.fixture(scope="module")
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    return net, optimizer


def state_of(trained: tuple[torch.nn.Module, torch.optim.Optimizer], **options: bool) -> dict[str, Any]:
    model, optim = get_state_dict(*trained, options=StateDictOptions(**options))  # type: ignore[arg-type]
    return {"model": model, "optimizer": optim, "step": 7, "notes": {"tags": ["a", ("b", 1)]}}


def blank(state: Any) -> Any:
    """The same state with other contents."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, 9)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None if isinstance(state, str | tuple) else 99


def require_equal(found: Any, expected: Any, at: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert sorted(found) == sorted(expected), at
        for key in expected:
            require_equal(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), at
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_equal(one, other, f"{at}.{number}")
    else:
        assert type(found) is type(expected), at
        assert found == expected, at


def files_below(path: Path) -> list[str]:
    return sorted(each.name for each in path.rglob("*") if each.is_file()) if path.exists() else []


# ------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_a_state_comes_back_by_the_verbs(tmp_path: Path, trained: Any, flatten: bool) -> None:
    state = state_of(trained, flatten_optimizer_state_dict=flatten)
    described = dcp.save(state, checkpoint_id=tmp_path / "it")
    read = dcp.HoldfastReader(tmp_path / "it").read_metadata()
    assert read.state_dict_metadata.keys() == described.state_dict_metadata.keys()
    assert read.planner_data == described.planner_data
    into = blank(state)
    dcp.load(into, checkpoint_id=tmp_path / "it")
    require_equal(into, state)


def test_ids_of_saves_and_loads_are_those_of_the_metadata(tmp_path: Path) -> None:
    writer, reader = dcp.HoldfastWriter(tmp_path / "it", overwrite=True), dcp.HoldfastReader(tmp_path / "it")
    ids = []
    for number in range(2):
        described = torch_dcp.save({"a": torch.full((2,), float(number))}, storage_writer=writer)
        torch_dcp.load({"a": torch.zeros(2)}, storage_reader=reader)
        read = reader.read_metadata().storage_meta
        assert read.save_id == writer.save_id == described.storage_meta.save_id
        assert read.load_id == reader.load_id
        ids += [writer.save_id, reader.load_id]
    assert ids[0] != ids[2] and not {ids[0], ids[2]} & {ids[1], ids[3]}
    holdfast.save(tmp_path / "plain", {"a": torch.zeros(2)}, process_group=False)
    assert dcp.HoldfastReader(tmp_path / "plain").read_metadata().storage_meta.save_id is None


@pytest.mark.parametrize("planner", ["default", "caching", "unflattened", "lowest rank"])
def test_every_default_planner(tmp_path: Path, trained: Any, planner: str) -> None:
    options: dict[str, dict[str, bool]] = {
        "default": {},
        "caching": {"enable_plan_caching": True},
        "unflattened": {"flatten_state_dict": False},
        "lowest rank": {"dedup_save_to_lowest_rank": True},
    }
    state = state_of(trained)
    for number in range(3):
        state["step"] = number
        saving = DefaultSavePlanner(**options[planner])
        torch_dcp.save(state, storage_writer=dcp.HoldfastWriter(tmp_path / f"{number}"), planner=saving)
    into = blank(state)
    loading = DefaultLoadPlanner()
    if planner == "unflattened":
        # With `flatten_sharded_tensors`, DCP fills a copy of such a state and drops it.
        loading, into = DefaultLoadPlanner(False, False), dict.fromkeys(into)
    torch_dcp.load(into, storage_reader=dcp.HoldfastReader(tmp_path / "2"), planner=loading)
    require_equal(into, state)


def test_the_checkpoint_is_one_of_holdfast(tmp_path: Path, trained: Any) -> None:
    net, optimizer = trained
    dcp.save(state_of(trained), checkpoint_id=tmp_path / "it")
    found = holdfast.open_checkpoint(tmp_path / "it")
    assert list(found.verify()) == []
    mark = mark_of(found)
    assert mark is not None
    assert (mark["name"], mark["model"]) == ("dcp", "model")
    other = copy.deepcopy(net)
    for parameter in other.parameters():
        torch.nn.init.ones_(parameter)
    stepped = torch.optim.AdamW(other.parameters(), lr=1.0)
    state = {"model": other, "optimizer": stepped, "step": 0, "notes": None}
    report = holdfast.load(tmp_path / "it", state)
    assert report.missing == report.unexpected == ()
    require_equal(other.state_dict(), net.state_dict())
    require_equal(stepped.state_dict()["state"], optimizer.state_dict()["state"])
    assert stepped.param_groups[0]["lr"] == 0.25
    assert (state["step"], state["notes"]) == (7, {"tags": ["a", ("b", 1)]})


def test_dcp_loads_what_holdfast_saved(tmp_path: Path, trained: Any) -> None:
    net, optimizer = trained
    lists = [torch.arange(3), torch.ones(2)]
    holdfast.save(
        tmp_path / "it", {"model": net, "optimizer": optimizer, "step": 7, "lists": lists, "notes": {"tags": ["a"]}}
    )
    for flatten in (False, True):
        state = state_of(trained, flatten_optimizer_state_dict=flatten) | {"lists": lists, "notes": {"tags": ["a"]}}
        into = blank(state)
        reader = dcp.HoldfastReader(tmp_path / "it", flatten_optimizer_state_dict=flatten)
        torch_dcp.load(into, storage_reader=reader)
        require_equal(into["model"], state["model"])
        require_equal(into["lists"], lists)
        assert (into["step"], into["notes"]) == (7, {"tags": ["a"]})
        tensors = {key: value for key, value in into["optimizer"].items() if isinstance(value, torch.Tensor)}
        for key, value in tensors.items() if flatten else into["optimizer"]["state"].items():
            require_equal(value, state["optimizer"][key] if flatten else state["optimizer"]["state"][key], key)


def test_what_dcp_itself_saved_is_loaded_without_its_pickle(tmp_path: Path, trained: Any) -> None:
    """Who changes the import resumes from the checkpoint of yesterday."""
    for flatten in (False, True):
        state = state_of(trained, flatten_optimizer_state_dict=flatten)
        torch_dcp.save(state, checkpoint_id=tmp_path / f"{flatten}")
        into = blank(state)
        reader = dcp.HoldfastReader(tmp_path / f"{flatten}", flatten_optimizer_state_dict=flatten)
        torch_dcp.load(into, storage_reader=reader)
        require_equal(into, state)


def test_a_step_of_a_run_is_loaded(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        for number in (1, 2):
            manager.save(number, {"w": torch.full((2,), float(number))}).wait()
    for step, expected in (("latest", 2.0), (1, 1.0)):
        into = {"w": torch.zeros(2)}
        dcp.load(into, storage_reader=dcp.HoldfastReader(tmp_path / "run", step=step))
        assert into["w"].tolist() == [expected] * 2


def test_parts_of_a_state_are_loaded(tmp_path: Path, trained: Any) -> None:
    state = state_of(trained)
    dcp.save(state, checkpoint_id=tmp_path / "it")
    into = {"model": blank(state["model"])}
    dcp.load(into, checkpoint_id=tmp_path / "it")
    require_equal(into["model"], state["model"])
    more = {"model": blank(state["model"]), "new": torch.ones(2)}
    dcp.load(more, checkpoint_id=tmp_path / "it", planner=DefaultLoadPlanner(allow_partial_load=True))
    require_equal(more["model"], state["model"])
    assert more["new"].tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(more, checkpoint_id=tmp_path / "it")


# ---------------------------------------------------------------------------------------------------- planners


class RenamingPlanner(DefaultSavePlanner):
    """The first example in DCP's documentation."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class HalvingPlanner(DefaultSavePlanner):
    """The second: tensors are converted as they are resolved."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        item = super().resolve_data(write_item)
        return item.to(torch.float16) if isinstance(item, torch.Tensor) else item


class TellingPlanner(DefaultSavePlanner):
    """The fourth: each rank contributes data of its own to the metadata."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return SavePlan(plan.items, plan.storage_data, "per-rank-data")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.flatten_state_dict = False
        plans, metadata = super().create_global_plan(all_plans)
        return plans, Metadata(metadata.state_dict_metadata, [plan.planner_data for plan in plans])


def test_planners_of_dcps_documentation(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "n": {"deep": [1, 2]}}
    dcp.save(state, checkpoint_id=tmp_path / "renamed", planner=RenamingPlanner())
    into = {"foo_w": torch.zeros(4), "foo_n": {"deep": None}}
    dcp.load(into, checkpoint_id=tmp_path / "renamed")
    require_equal(into, {"foo_w": state["w"], "foo_n": state["n"]})
    dcp.save(state, checkpoint_id=tmp_path / "halved", planner=HalvingPlanner())
    assert holdfast.open_checkpoint(tmp_path / "halved").tensors["w"].dtype == "float16"
    wide = blank(state)
    dcp.load(wide, checkpoint_id=tmp_path / "halved")
    require_equal(wide, state)
    dcp.save(state, checkpoint_id=tmp_path / "told", planner=TellingPlanner())
    assert dcp.HoldfastReader(tmp_path / "told").read_metadata().planner_data == ["per-rank-data"]


class Materializing(DefaultLoadPlanner):
    """The example of DCP's documentation that loads into tensors of its own."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn] = tensor


def test_a_planner_that_loads_into_tensors_of_its_own(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "it")
    planner = Materializing(flatten_state_dict=False, flatten_sharded_tensors=False)
    into: dict[str, Any] = {"w": torch.zeros(4)}
    dcp.load(into, checkpoint_id=tmp_path / "it", planner=planner)
    assert into["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


class Alien:
    """No value of the closed set."""


@pytest.mark.parametrize("planner", [DefaultSavePlanner, HalvingPlanner])
def test_objects_outside_the_closed_set_are_refused(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(2), "odd": Alien()}, checkpoint_id=tmp_path / "it", planner=planner())
    assert isinstance(caught.value.failures[0][0], InvalidError)
    assert "odd" in str(caught.value)
    assert "ut of the state" in str(caught.value)
    assert files_below(tmp_path / "it") == []


def test_a_load_of_another_kind_of_number_is_refused(tmp_path: Path) -> None:
    """DCP itself casts 300.7 to 44 without a word."""
    dcp.save({"w": torch.full((2,), 300.7)}, checkpoint_id=tmp_path / "it")
    into = {"w": torch.ones(2, dtype=torch.int8)}
    with pytest.raises(CheckpointException, match="w: float32 in the checkpoint and int8 here"):
        dcp.load(into, checkpoint_id=tmp_path / "it")
    assert into["w"].tolist() == [1, 1]


# ---------------------------------------------------------------------------------------------- several ranks


def on_two_ranks(
    writers: list[dcp.HoldfastWriter], states: list[Mapping[str, Any]], *, failing: int | None = None
) -> tuple[Metadata, list[list[WriteResult]]]:
    """Make the calls of DCP for two ranks, up to the parts; plans are copied as collectives do."""
    planners = [DefaultSavePlanner() for _ in writers]
    plans = []
    for rank, (writer, planner, state) in enumerate(zip(writers, planners, states, strict=True)):
        planner.set_up_planner(dict(state), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    sent = [copy.deepcopy(plan) for plan in writers[0].prepare_global_plan(plans)]
    results = []
    for rank, (writer, planner, plan) in enumerate(zip(writers, planners, sent, strict=True)):
        if rank != failing:
            results.append(copy.deepcopy(writer.write_data(planner.finish_plan(plan), planner).value()))
    return metadata, results


def test_two_ranks_share_what_dcp_gives_each(tmp_path: Path) -> None:
    writers = [dcp.HoldfastWriter(tmp_path / "it") for _ in range(2)]
    state = {"a": torch.arange(4.0), "b": torch.ones(3), "n": 1, "text": "x"}
    metadata, results = on_two_ranks(writers, [state, state])
    writers[0].finish(metadata, results)
    found = holdfast.open_checkpoint(tmp_path / "it")
    assert {rank for fqn in ("a", "b") for rank in found.written_by(fqn)} == {0, 1}
    into = blank(state)
    dcp.load(into, checkpoint_id=tmp_path / "it")
    require_equal(into, state)


def test_a_rank_without_a_part_fails_the_save(tmp_path: Path) -> None:
    writers = [dcp.HoldfastWriter(tmp_path / "it") for _ in range(2)]
    state = {"a": torch.arange(4.0), "b": torch.ones(3)}
    metadata, results = on_two_ranks(writers, [state, state], failing=1)
    with pytest.raises(InvalidError, match="ranks 1 have no part of this attempt"):
        writers[0].finish(metadata, results)
    assert files_below(tmp_path / "it") == []


def test_a_coordinator_that_dies_before_the_manifest_leaves_nothing_visible(tmp_path: Path) -> None:
    writers = [dcp.HoldfastWriter(tmp_path / "it") for _ in range(2)]
    state = {"a": torch.arange(4.0), "b": torch.ones(3)}
    on_two_ranks(writers, [state, state])
    with pytest.raises(holdfast.MissingError):
        holdfast.open_checkpoint(tmp_path / "it")
    left = files_below(tmp_path / "it")
    assert left
    again = [dcp.HoldfastWriter(tmp_path / "it") for _ in range(2)]
    metadata, results = on_two_ranks(again, [state, state])
    again[0].finish(metadata, results)
    assert len([path for path in (tmp_path / "it").iterdir() if len(path.name) == 16]) == 1, "it was swept"


def test_a_full_store_fails_the_save_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = wiring.store_at
    full = Faults(raise_error(UnavailableError), names=("upload.write",), lasting=True)
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), full))
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "it")
    assert full.met
    assert isinstance(caught.value.failures[0][0], UnavailableError)
    monkeypatch.undo()
    assert files_below(tmp_path / "it") == []


def test_what_is_there_is_replaced_as_dcp_replaces_it(tmp_path: Path) -> None:
    for number in (1, 2):
        dcp.save({"n": number}, checkpoint_id=tmp_path / "it")
        assert holdfast.open_checkpoint(tmp_path / "it").objects["n"] == number
    with pytest.raises(CheckpointException) as caught:
        torch_dcp.save({"n": 3}, storage_writer=dcp.HoldfastWriter(tmp_path / "it"))
    assert isinstance(caught.value.failures[0][0], ConflictError)
    assert holdfast.open_checkpoint(tmp_path / "it").objects["n"] == 2


def test_a_checkpoint_that_dcp_did_not_save_is_not_replaced(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "it", {"n": 1})
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"n": 2}, checkpoint_id=tmp_path / "it")
    assert isinstance(caught.value.failures[0][0], ConflictError)
    assert "a job without an integration saved here" in str(caught.value)
    torch_dcp.save({"n": 1}, checkpoint_id=tmp_path / "own")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"n": 2}, checkpoint_id=tmp_path / "own")
    assert isinstance(caught.value.failures[0][0], InvalidError)
    assert holdfast.open_checkpoint(tmp_path / "it").objects["n"] == 1


def test_urls_and_stagers_of_ones_own(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "n": 4}
    stager = DefaultStager(StagingOptions(False, False, False, False))
    result_of(dcp.async_save(state, checkpoint_id="memory://of-dcp/it", async_stager=stager))
    dcp.load(into := blank(state), checkpoint_id="memory://of-dcp/it")
    require_equal(into, state)


def test_a_path_comes_with_the_writer_or_with_the_save(tmp_path: Path) -> None:
    writer = dcp.HoldfastWriter()
    torch_dcp.save({"n": 1}, storage_writer=writer, checkpoint_id=tmp_path / "1")
    torch_dcp.save({"n": 2}, storage_writer=writer, checkpoint_id=tmp_path / "2")
    assert holdfast.open_checkpoint(tmp_path / "2").objects["n"] == 2
    assert holdfast.open_checkpoint(tmp_path / "1").objects["n"] == 1
    with pytest.raises(CheckpointException, match="no path; pass one to HoldfastWriter"):
        dcp.save({"n": 1})
    assert dcp.HoldfastWriter.validate_checkpoint_id(tmp_path)
    assert not dcp.HoldfastWriter.validate_checkpoint_id("nowhere://x")


def test_saves_without_collectives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    writer = dcp.HoldfastWriter(tmp_path / "it")
    with pytest.raises(InvalidError, match="use_collectives=False: each rank would commit"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(InvalidError, match="rank 1 coordinates; expected rank 0"):
        writer.set_up_storage_writer(True, rank=1)


# ------------------------------------------------------------------------------------------------------ staging


@pytest.fixture
def fresh_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    memory = staging._StagingMemory()
    monkeypatch.setattr(staging, "_MEMORY", memory)
    yield memory


def result_of(saving: Any) -> Any:
    return saving.result(timeout=60)


def test_an_async_save_has_the_state_of_the_call(tmp_path: Path, trained: Any, fresh_memory: Any) -> None:
    state = copy.deepcopy(state_of(trained))
    expected = copy.deepcopy(state)
    assert isinstance(dcp.HoldfastWriter(tmp_path), AsyncStager)
    saving = torch_dcp.async_save(state, storage_writer=dcp.HoldfastWriter(tmp_path / "it"))
    for tensor in state["model"].values():
        tensor.fill_(3)
    state["notes"]["tags"].append("later")
    result_of(saving)
    into = blank(expected)
    dcp.load(into, checkpoint_id=tmp_path / "it")
    require_equal(into, expected)


def test_the_memory_of_a_staged_state_serves_the_next_save(tmp_path: Path, fresh_memory: Any) -> None:
    state = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    blocks = set()
    for _ in range(3):
        staged = staging.stage(state, Settings())
        blocks.add(torch.as_tensor(staged["w"]).data_ptr())
        del staged
    assert len(blocks) == 1
    for number in range(3):
        state["w"].add_(1)
        result_of(dcp.async_save(state, checkpoint_id=tmp_path / f"{number}"))
    for number in range(3):
        into = {"w": torch.zeros(1 << 20)}
        dcp.load(into, checkpoint_id=tmp_path / f"{number}")
        assert into["w"][0] == number + 1


def test_two_saves_in_flight_have_memory_of_their_own(tmp_path: Path, fresh_memory: Any) -> None:
    first = staging.stage({"w": torch.ones(4)}, Settings())
    second = staging.stage({"w": torch.full((4,), 2.0)}, Settings())
    assert torch.as_tensor(first["w"]).tolist() == [1.0] * 4
    assert torch.as_tensor(second["w"]).tolist() == [2.0] * 4


def test_a_copy_that_does_not_fit_fails_the_save_where_dcp_gathers(tmp_path: Path, fresh_memory: Any) -> None:
    settings = Settings(arena_bytes_max=1 << 20)
    writer = dcp.HoldfastWriter(tmp_path / "it", settings=settings)
    saving = dcp.async_save({"w": torch.ones(4)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="a staged copy needs 2097152 bytes"):
        result_of(saving)
    assert files_below(tmp_path / "it") == []
    torch_dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    assert holdfast.open_checkpoint(tmp_path / "it").tensors["w"].shape == (4,)


class WaitingPlanner(DefaultSavePlanner):
    """Waits within its plan."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def create_local_plan(self) -> SavePlan:
        self.began.set()
        assert self.may_go_on.wait(60)
        return super().create_local_plan()


def test_a_save_beside_one_that_is_planned_is_refused_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp.writer, "_WAIT_SECONDS", 0.1)
    writer, planner = dcp.HoldfastWriter(tmp_path / "it"), WaitingPlanner()
    first = torch_dcp.async_save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)
    assert planner.began.wait(60)
    for save in (torch_dcp.async_save, dcp.async_save):
        with pytest.raises(CheckpointException, match=r"this HoldfastWriter is still under way.*result\(\)"):
            result_of(save({"w": torch.zeros(2)}, storage_writer=writer))
    for save in (torch_dcp.save, dcp.save):
        with pytest.raises(CheckpointException, match=r"this HoldfastWriter is still under way.*result\(\)"):
            save({"w": torch.zeros(2)}, storage_writer=writer)
    planner.may_go_on.set()
    result_of(first)
    assert np.array_equal(holdfast.open_checkpoint(tmp_path / "it").read("w"), [1, 1])
    torch_dcp.save({"w": torch.zeros(2)}, storage_writer=writer, checkpoint_id=tmp_path / "next")


def test_a_save_beside_one_that_writes_is_refused_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_go_on = threading.Event(), threading.Event()

    def wait(operation: object) -> None:
        began.set()
        assert may_go_on.wait(60)

    at = wiring.store_at
    slow = Faults(wait, names=("upload.complete",))
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), slow))
    writer = dcp.HoldfastWriter(tmp_path / "it")
    first = torch_dcp.async_save({"w": torch.ones(2)}, storage_writer=writer)
    assert began.wait(60)
    with pytest.raises(CheckpointException, match=r"this HoldfastWriter is still writing.*result\(\)"):
        result_of(dcp.async_save({"w": torch.zeros(2)}, storage_writer=writer))
    may_go_on.set()
    result_of(first)
    assert np.array_equal(holdfast.open_checkpoint(tmp_path / "it").read("w"), [1, 1])


def test_a_process_that_saves_never_commits_a_state_that_was_not_copied(tmp_path: Path) -> None:
    writer = dcp.HoldfastWriter(tmp_path / "it", settings=Settings(arena_bytes_max=1 << 20))
    sent = pickle.dumps((writer, writer.stage({"w": torch.ones(2)})))
    there, state = pickle.loads(sent)
    with pytest.raises(CheckpointException, match="a staged copy needs 2097152 bytes"):
        torch_dcp.save(state, storage_writer=there)
    assert files_below(tmp_path / "it") == []


def test_a_failed_async_save_fails_its_future_and_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = wiring.store_at
    full = Faults(raise_error(UnavailableError), names=("put_if_absent",), lasting=True)
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), full))
    saving = dcp.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "it")
    with pytest.raises(CheckpointException, match="a fault was injected"):
        result_of(saving)
    monkeypatch.undo()
    assert not [name for name in files_below(tmp_path / "it") if name.endswith(".safetensors")]
    result_of(dcp.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "it"))
    assert holdfast.open_checkpoint(tmp_path / "it").tensors["w"].shape == (4,)


def test_a_failed_async_save_has_given_up_before_its_future_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that saves anew by the same writer must not have that save given up."""
    begun, steps = threading.Event(), []
    abort = dcp.HoldfastWriter.abort

    def slow(writer: dcp.HoldfastWriter) -> None:
        if threading.current_thread() is not threading.main_thread():
            steps.append("given up" if not begun.wait(0.2) else "given up after the next save began")
        abort(writer)

    writer = dcp.HoldfastWriter(tmp_path / "it")
    saving = dcp.async_save({"odd": Alien(), "w": torch.ones(4)}, storage_writer=writer)
    monkeypatch.setattr(dcp.HoldfastWriter, "abort", slow)
    with pytest.raises(CheckpointException, match="odd"):
        result_of(saving)
    begun.set()
    torch_dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    assert "given up after the next save began" not in steps
    assert holdfast.open_checkpoint(tmp_path / "it").tensors["w"].shape == (4,)


def test_an_item_that_a_planner_adds_is_saved_under_its_name(tmp_path: Path) -> None:
    """DCP's planner data have no path of it."""

    class Adding(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            self.state_dict["extra"] = 5
            return replace(plan, items=[*plan.items, *create_default_local_save_plan({"extra": 5}, True).items])

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "it", planner=Adding())
    into = {"w": torch.zeros(2), "extra": 0}
    dcp.load(into, checkpoint_id=tmp_path / "it")
    require_equal(into, {"w": torch.ones(2), "extra": 5})


def test_ranks_that_load_different_checkpoints_are_told(tmp_path: Path) -> None:
    """While another job saves, `latest` may be one step on one rank, and the next on another."""
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        readers, plans = [], []
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(2)}).wait()
            reader = dcp.HoldfastReader(tmp_path / "run", step="latest")
            planner = DefaultLoadPlanner()
            planner.set_up_planner({"w": torch.zeros(2)}, reader.read_metadata(), step == 1)
            plans.append(reader.prepare_local_plan(planner.create_local_plan()))
            readers.append(reader)
    with pytest.raises(ConflictError, match=r"rank 1 loads .*, and rank 0 .*; expected one checkpoint"):
        readers[0].prepare_global_plan(plans)
    assert [len(plan.items) for plan in readers[0].prepare_global_plan([plans[0], plans[0]])] == [1, 1]


def test_a_value_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    saving = dcp.async_save({"odd": io.TextIOWrapper(io.BytesIO())}, checkpoint_id=tmp_path / "it")
    with pytest.raises(CheckpointException, match="the state cannot be copied: TypeError"):
        result_of(saving)
