"""Bit for bit, any layout to any other: real gloo processes save and load, digests of whole tensors are compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast
from tests.distributed.layouts import layout_cases
from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.distributed.layouts.layout_cases"


def case(function: str, **arguments: object) -> Case:
    name = arguments.pop("name", "")
    assert isinstance(name, str)
    return Case(f"{CASES}:{function}", arguments, name)


@dataclass(frozen=True)
class Worlds:
    root: Path
    plain: dict[str, str]
    """Digests of what one plain process saved."""
    four: Results
    two: Results
    three: Results

    def same_on_all(self, results: Results, name: str) -> object:
        values = results.values(name)
        assert all(value == values[0] for value in values), f"{name}: ranks disagree about whole tensors"
        return values[0]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    root = tmp_path_factory.mktemp("layouts")

    def at(name: str) -> str:
        return str(root / name)

    saved_plain = layout_cases.save_plain(at("from-1"))
    four = run_world(
        4,
        [
            case("save_fsdp", path=at("from-4")),
            case("save_fsdp", path=at("hsdp"), mesh=[2, 2], name="save_hsdp"),
            case("load_fsdp", path=at("hsdp"), mesh=[2, 2], name="load_hsdp"),
            case("load_fsdp", path=at("from-4"), mesh=[2, 2], name="load_4_as_hsdp"),
            case("load_fsdp", path=at("hsdp"), name="load_hsdp_as_4"),
            case("save_fsdp", path=at("split"), index_chunks_max=8, name="save_split"),
            case("load_fsdp", path=at("split"), mesh=[2, 2], name="load_split_as_hsdp"),
            case("save_container", path=at("container")),
            case("save_meshes", path=at("meshes")),
            *(case("load_meshes", path=at("meshes"), shift=shift, name=f"load_meshes_{shift}") for shift in (0, 1, 4)),
            case("strided", path=at("strided")),
            case("in_a_subgroup", path=at("subgroup"), ranks=[1, 3]),
            case("mesh_in_a_subgroup", path=at("submesh"), ranks=[1, 3]),
        ],
        root / "world-4",
    )
    two = run_world(
        2,
        [
            case("save_fsdp", path=at("from-2")),
            case("load_fsdp", path=at("from-2"), name="load_2"),
            case("load_fsdp", path=at("from-2"), stepped=True, name="load_2_stepped"),
            case("load_fsdp", path=at("from-4"), name="load_4"),
            case("load_fsdp", path=at("container"), name="load_container_as_one"),
            case("load_container", path=at("container")),
            case("load_container", path=at("from-1"), name="load_one_as_container"),
            case("alone_beside_others", path=at("from-2")),
            case("save_ddp", path=at("ddp"), same_batches=False),
            case("save_ddp", path=at("ddp-same"), same_batches=True, name="save_ddp_same"),
            case("load_ddp", path=at("ddp")),
            case("refuse_partial", path=at("partial")),
            case("refuse_partial_target", path=at("partial-target")),
            case("hand_written_halves", path=at("halves")),
            case("differing_shapes", path=at("shapes")),
        ],
        root / "world-2",
    )
    three = run_world(
        3,
        [
            case("load_fsdp", path=at("from-2"), name="load_2"),
            case("load_fsdp", path=at("from-1"), name="load_1"),
            case("load_fsdp", path=at("from-4"), stepped=True, name="load_4"),
            case("load_fsdp", path=at("split"), stepped=True, name="load_split"),
        ],
        root / "world-3",
    )
    return Worlds(root, saved_plain, four, two, three)


@pytest.mark.parametrize("name", ["load_2", "load_2_stepped"])
def test_fsdp_2_to_2(worlds: Worlds, name: str) -> None:
    assert worlds.same_on_all(worlds.two, name) == worlds.same_on_all(worlds.two, "save_fsdp")


def test_fsdp_2_to_3(worlds: Worlds) -> None:
    assert worlds.same_on_all(worlds.three, "load_2") == worlds.same_on_all(worlds.two, "save_fsdp")


def test_fsdp_4_to_2(worlds: Worlds) -> None:
    assert worlds.same_on_all(worlds.two, "load_4") == worlds.same_on_all(worlds.four, "save_fsdp")


def test_fsdp_4_to_3_over_an_optimizer_that_has_stepped(worlds: Worlds) -> None:
    assert worlds.same_on_all(worlds.three, "load_4") == worlds.same_on_all(worlds.four, "save_fsdp")


def test_an_optimizer_that_holds_others_and_one_that_holds_none_load_each_other(worlds: Worlds) -> None:
    saved = worlds.same_on_all(worlds.four, "save_container")
    assert isinstance(saved, dict) and any(name.endswith("/exp_avg") for name in saved)
    assert worlds.same_on_all(worlds.two, "load_container_as_one") == saved
    assert worlds.same_on_all(worlds.two, "load_container") == saved
    assert layout_cases.load_plain(str(worlds.root / "container")) == saved
    assert worlds.same_on_all(worlds.two, "load_one_as_container") == worlds.plain


def test_an_index_of_many_files_loads_on_any_layout(worlds: Worlds) -> None:
    checkpoint = holdfast.open_checkpoint(worlds.root / "split")
    assert checkpoint.manifest.overview is not None
    assert len(checkpoint.manifest.indexes) > 8
    assert list(checkpoint.verify()) == []
    saved = worlds.same_on_all(worlds.four, "save_split")
    assert worlds.same_on_all(worlds.four, "load_split_as_hsdp") == saved
    assert worlds.same_on_all(worlds.three, "load_split") == saved
    assert layout_cases.load_plain(str(worlds.root / "split")) == saved


def test_fsdp_4_to_one_plain_process(worlds: Worlds) -> None:
    saved = worlds.same_on_all(worlds.four, "save_fsdp")
    assert layout_cases.load_plain(str(worlds.root / "from-4")) == saved


def test_one_plain_process_to_fsdp_3(worlds: Worlds) -> None:
    assert worlds.same_on_all(worlds.three, "load_1") == worlds.plain


def test_the_optimizer_has_state_that_is_compared(worlds: Worlds) -> None:
    saved = worlds.same_on_all(worlds.two, "save_fsdp")
    assert isinstance(saved, dict)
    assert {"embed.weight/exp_avg", "blocks.1.gain/exp_avg_sq", "head.bias/step"} <= saved.keys()


def test_rank_0_alone_loads_a_sharded_checkpoint_into_an_unsharded_model(worlds: Worlds) -> None:
    alone, other = worlds.two.values("alone_beside_others")
    assert alone == worlds.same_on_all(worlds.two, "save_fsdp")
    assert other is None


def test_hsdp_replicas_share_the_writing_and_load_anywhere(worlds: Worlds) -> None:
    saved = worlds.same_on_all(worlds.four, "save_hsdp")
    assert worlds.same_on_all(worlds.four, "load_hsdp") == saved
    assert worlds.same_on_all(worlds.four, "load_hsdp_as_4") == saved
    assert worlds.same_on_all(worlds.four, "load_4_as_hsdp") == worlds.same_on_all(worlds.four, "save_fsdp")


def test_dtensors_on_any_mesh(worlds: Worlds) -> None:
    values = worlds.four.values("save_meshes")
    saved = [value["digests"] for value in values if isinstance(value, dict)]
    for shift in (0, 1, 4):
        for rank, loaded in enumerate(worlds.four.values(f"load_meshes_{shift}")):
            assert loaded == saved[rank], f"shift {shift}, rank {rank}"


def test_every_byte_of_every_mesh_is_stored_once(worlds: Worlds) -> None:
    reports = [value["report"] for value in worlds.four.values("save_meshes") if isinstance(value, dict)]
    shapes = [shape for _, _, shape in layout_cases.LAYOUTS]
    elements = 0
    for shape in shapes:
        count = 1
        for length in shape:
            count *= length
        elements += count
    assert sum(report["bytes"] for report in reports) == elements * 4


def test_a_subgroup_saves_and_loads_among_itself(worlds: Worlds) -> None:
    values = worlds.four.values("in_a_subgroup")
    for rank in (1, 3):
        value = values[rank]
        assert isinstance(value, dict)
        assert value["saved"] == value["loaded"]
    for rank in (0, 2):
        value = values[rank]
        assert isinstance(value, dict)
        assert "process_group" in value["refused"]


def test_a_mesh_of_a_subgroup_is_known_by_the_groups_ranks(worlds: Worlds) -> None:
    values = worlds.four.values("mesh_in_a_subgroup")
    for value in (values[1], values[3]):
        assert isinstance(value, dict)
        assert value["saved"] == value["loaded"]


def test_ddp_with_batch_norm_2_to_2_saves_the_lowest_ranks_buffers(worlds: Worlds) -> None:
    lowest, other = worlds.two.values("save_ddp")
    assert isinstance(lowest, dict)
    assert isinstance(other, dict)
    differing = {name for name in lowest["digests"] if lowest["digests"][name] != other["digests"][name]}
    assert differing == {"norm.running_mean", "norm.running_var"}, "the test must have ranks differ, in buffers only"
    assert worlds.same_on_all(worlds.two, "load_ddp") == lowest["digests"]


def test_ddp_with_batch_norm_2_to_one_plain_process(worlds: Worlds) -> None:
    lowest = worlds.two.values("save_ddp")[0]
    assert isinstance(lowest, dict)
    assert layout_cases.load_norm_plain(str(worlds.root / "ddp")) == lowest["digests"]


def test_buffers_that_differ_are_in_the_report_of_every_rank(worlds: Worlds) -> None:
    for value in worlds.two.values("save_ddp"):
        assert isinstance(value, dict)
        assert value["divergent"] == ["model.norm.running_mean", "model.norm.running_var"]
    for value in worlds.two.values("save_ddp_same"):
        assert isinstance(value, dict)
        assert value["divergent"] == []


def test_partial_is_refused_by_name_on_every_rank(worlds: Worlds) -> None:
    for said in worlds.two.values("refuse_partial"):
        assert isinstance(said, str)
        assert "grads.sums" in said and "Partial" in said
    assert not (worlds.root / "partial").exists()
    for said in worlds.two.values("refuse_partial_target"):
        assert isinstance(said, str)
        assert "sums" in said and "Partial" in said


def test_strided_shards_are_stored_where_they_belong(worlds: Worlds) -> None:
    assert worlds.four.values("strided") == [True] * 4


def test_hand_written_tensor_parallel_halves_are_refused_never_mixed(worlds: Worlds) -> None:
    for said in worlds.two.values("hand_written_halves"):
        assert isinstance(said, dict)
        assert "model.weight" in said["random"] and "model.bias" in said["random"]
        assert "ranks [0]" in said["random"] and "ranks [1]" in said["random"]
    assert not (worlds.root / "halves-random").exists()


def test_halves_that_were_equal_zeros_at_first_are_refused_once_they_differ(worlds: Worlds) -> None:
    for said in worlds.two.values("hand_written_halves"):
        assert isinstance(said, dict)
        assert "model.bias" in said["later"] and "model.weight" not in said["later"]
        assert "ranks [0]" in said["later"] and "ranks [1]" in said["later"]
        assert said["steps"] == "[1, 3]"


def test_one_name_of_two_shapes_is_refused(worlds: Worlds) -> None:
    for said in worlds.two.values("differing_shapes"):
        assert isinstance(said, str)
        assert "part" in said and "[3]" in said and "[4]" in said
    assert not (worlds.root / "shapes").exists()
