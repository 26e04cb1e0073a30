"""Trainings that are not all alike, on real gloo processes: ties, frozen parts, other optimizers, several jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.matrix import accumulating, optimizers, ties, wrapped
from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.distributed.matrix"
LAYOUTS = ["ddp", "fsdp1", "fsdp2"]
OPTIMIZERS = [("adafactor", "ddp"), ("factored", "ddp"), ("factored", "fsdp2"), ("muon", "ddp"), ("muon", "fsdp2")]


def case(function: str, name: str = "", **arguments: object) -> Case:
    return Case(f"{CASES}.{function}", arguments, name or function.rpartition(":")[2])


@dataclass(frozen=True)
class Worlds:
    root: Path
    two: Results
    three: Results
    four: Results
    one: dict[str, object]
    """What one process said of what it saved, by kind."""

    def at(self, name: str) -> str:
        return str(self.root / name)

    def same(self, results: Results, name: str) -> object:
        values = results.values(name)
        assert all(value == values[0] for value in values), f"{name}: ranks disagree"
        return values[0]

    def joined(self, results: Results, name: str, part: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for value in results.values(name):
            assert isinstance(value, dict)
            for key, said in (value[part] if part else value).items():
                assert found.setdefault(key, said) == said, f"{name}: ranks disagree about {key}"
        return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    root = tmp_path_factory.mktemp("trainings")

    def at(name: str) -> str:
        return str(root / name)

    one = {
        "tied": ties.save_tied(None, at("tied-one"), "one"),
        "frozen": optimizers.save_frozen(None, at("frozen-one"), "one", [1, 2]),
        "counting": wrapped.save_counting(None, at("counting-one"), "one"),
        "gradients": accumulating.save_gradients(None, at("grads-one"), "one"),
        **{
            kind: optimizers.save_optimizer(None, at(f"{kind}-one"), kind, "one")
            for kind in ("adafactor", "factored", "muon")
        },
    }
    two = run_world(
        2,
        [
            *(case("ties:save_tied", f"save_tied_{each}", path=at(f"tied-{each}"), layout=each) for each in LAYOUTS),
            *(case("ties:load_tied", f"load_tied_{each}", path=at("tied-one"), layout=each) for each in LAYOUTS),
            case("ties:load_tied", "load_tied_2", path=at("tied-fsdp1"), layout="fsdp2"),
            case("ties:save_tied_stages", path=at("stages")),
            case("ties:load_tied_stages", path=at("stages")),
            case("ties:load_tied_stages", "load_tied_stages_one", path=at("tied-one")),
            case("ties:save_untied_stages", path=at("untied")),
            *(
                case(
                    "optimizers:save_frozen",
                    f"save_frozen_{each}",
                    path=at(f"frozen-{each}"),
                    layout=each,
                    steps=[1, 2],
                )
                for each in LAYOUTS
            ),
            *(
                case("optimizers:load_frozen", f"load_frozen_{each}", path=at("frozen-one"), layout=each)
                for each in LAYOUTS
            ),
            *(
                case(
                    "optimizers:save_frozen",
                    f"save_unstepped_{each}",
                    path=at(f"unstepped-{each}"),
                    layout=each,
                    steps=[],
                )
                for each in LAYOUTS
            ),
            case("optimizers:load_frozen", "load_unstepped", path=at("unstepped-fsdp1"), layout="fsdp2"),
            *(
                case(
                    "optimizers:save_optimizer",
                    f"save_{kind}_{each}",
                    path=at(f"{kind}-{each}"),
                    kind=kind,
                    layout=each,
                )
                for kind, each in OPTIMIZERS
            ),
            *(
                case(
                    "optimizers:load_optimizer",
                    f"load_{kind}_{each}_{stepped}",
                    path=at(f"{kind}-one"),
                    kind=kind,
                    layout=each,
                    stepped=stepped,
                )
                for kind, each in OPTIMIZERS
                for stepped in (False, True)
            ),
            case("optimizers:refuse_local_rows", path=at("rows")),
            case("optimizers:save_scheduled", path=at("scheduled"), layout="ddp"),
            case("optimizers:load_scheduled", path=at("scheduled"), layout="fsdp2"),
            case("wrapped:save_counting", path=at("counting"), layout="fsdp1"),
            case("wrapped:load_counting", "load_counting_one", path=at("counting-one"), layout="fsdp1"),
            case("wrapped:save_adamw_again", path=at("adamw")),
            case("wrapped:fsdp1_refusals", path=at("refusals")),
            case("wrapped:fsdp1_whole", path=at("whole")),
            case("jobs:sharded_tensors", path=at("boxes")),
            case("jobs:save_own", path=at("own")),
            case("jobs:load_own", path=at("own")),
            *(
                case("accumulating:save_gradients", f"save_gradients_{each}", path=at(f"grads-{each}"), layout=each)
                for each in ("ddp", "fsdp2")
            ),
            case("accumulating:load_gradients", "load_gradients_one", path=at("grads-one"), layout="fsdp2"),
            case("accumulating:refuse_unreduced", path=at("unreduced")),
        ],
        root / "world-2",
        deadline_seconds=150.0,
    )
    three = run_world(
        3,
        [
            case("jobs:load_own_resized", path=at("own")),
            case("wrapped:load_counting", path=at("counting"), layout="fsdp1"),
            case("accumulating:load_gradients", path=at("grads-fsdp2"), layout="fsdp2"),
        ],
        root / "world-3",
    )
    four = run_world(
        4,
        [
            case("jobs:actor_and_critic", path=at("jobs")),
            case("jobs:stages_that_reuse_a_name", path=at("reused-names")),
            case("jobs:refuse_unrelated_meshes", path=at("meshes")),
        ],
        root / "world-4",
    )
    return Worlds(root, two, three, four, one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_parameters_are_stored_once_and_load_anywhere(worlds: Worlds, layout: str) -> None:
    saved = worlds.same(worlds.two, f"save_tied_{layout}")
    assert isinstance(saved, dict)
    assert [name for name in saved["names"] if name.startswith("model.")] == [
        "model.embed.weight",
        "model.middle.bias",
        "model.middle.weight",
    ]
    assert ties.load_tied(None, worlds.at(f"tied-{layout}"), "one")["model"] == saved["model"]
    one = worlds.one["tied"]
    assert isinstance(one, dict)
    loaded = worlds.same(worlds.two, f"load_tied_{layout}")
    assert isinstance(loaded, dict)
    assert loaded["model"] == one["model"]


def test_tied_parameters_from_fsdp1_to_fsdp2(worlds: Worlds) -> None:
    saved, loaded = (worlds.same(worlds.two, name) for name in ("save_tied_fsdp1", "load_tied_2"))
    assert isinstance(saved, dict)
    assert isinstance(loaded, dict)
    assert loaded["model"] == saved["model"]


def test_embeddings_tied_across_stages_are_two_names_of_equal_content(worlds: Worlds) -> None:
    saved = worlds.joined(worlds.two, "save_tied_stages")
    assert saved["embed.weight"] == saved["head.weight"]
    assert worlds.joined(worlds.two, "load_tied_stages") == saved
    loaded = ties.load_tied(None, worlds.at("stages"), "one")["model"]
    assert isinstance(loaded, dict)
    assert loaded == {name: said for name, said in saved.items() if "/" not in name}


def test_a_tied_model_of_one_process_loads_into_stages(worlds: Worlds) -> None:
    one = worlds.one["tied"]
    assert isinstance(one, dict)
    loaded = worlds.joined(worlds.two, "load_tied_stages_one")
    assert {name: said for name, said in loaded.items() if "/" not in name} == one["model"]
    assert loaded["head.weight/exp_avg"] == loaded["embed.weight/exp_avg"]
    assert loaded["head.weight/group"] == loaded["embed.weight/group"]


def test_stages_whose_copies_came_apart_do_not_load_into_a_tied_model(worlds: Worlds) -> None:
    worlds.two.values("save_untied_stages")
    from holdfast import load
    from holdfast.errors import InvalidError

    with pytest.raises(InvalidError, match=r"model\.head\.weight: shares its memory with model\.embed\.weight"):
        load(worlds.at("untied"), {"model": ties.tied(3)}, process_group=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_backbone(worlds: Worlds, layout: str) -> None:
    saved = worlds.joined(worlds.two, f"save_frozen_{layout}")
    assert "experts.weight/exp_avg" in saved and "blocks.0.up.weight/exp_avg" not in saved
    assert optimizers.load_frozen(None, worlds.at(f"frozen-{layout}"), "one") == saved
    assert worlds.joined(worlds.two, f"load_frozen_{layout}") == worlds.one["frozen"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_that_has_not_stepped(worlds: Worlds, layout: str) -> None:
    saved = worlds.joined(worlds.two, f"save_unstepped_{layout}")
    assert not any("/" in name for name in saved)
    assert optimizers.load_frozen(None, worlds.at(f"unstepped-{layout}"), "one") == saved
    if layout == "fsdp1":
        assert worlds.joined(worlds.two, "load_unstepped") == saved


@pytest.mark.parametrize(("kind", "layout"), OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_state_shaped_unlike_the_parameter(worlds: Worlds, kind: str, layout: str, stepped: bool) -> None:
    saved = worlds.same(worlds.two, f"save_{kind}_{layout}")
    assert optimizers.load_optimizer(None, worlds.at(f"{kind}-{layout}"), kind, "one", stepped) == saved
    assert worlds.same(worlds.two, f"load_{kind}_{layout}_{stepped}") == worlds.one[kind]


def test_state_of_this_ranks_rows_alone_is_refused_never_mixed(worlds: Worlds) -> None:
    for said in worlds.two.values("refuse_local_rows"):
        assert isinstance(said, str)
        assert "optimizer.state." in said and ".rows" in said
    assert not (worlds.root / "rows").exists()


def test_a_scheduler_and_a_scaler_go_from_ddp_to_fsdp2(worlds: Worlds) -> None:
    saved = worlds.same(worlds.two, "save_scheduled")
    assert isinstance(saved, dict)
    assert saved["scaler"]["scale"] == 16.0
    assert worlds.same(worlds.two, "load_scheduled") == saved


def test_fsdp1_with_extra_state_and_ties_loads_on_another_number_of_ranks(worlds: Worlds) -> None:
    one = worlds.one["counting"]
    assert isinstance(one, dict)
    saved = worlds.joined(worlds.two, "save_counting", "digests")
    assert saved.keys() == one["digests"].keys()
    assert worlds.joined(worlds.two, "load_counting_one", "digests") == one["digests"]
    assert worlds.joined(worlds.three, "load_counting", "digests") == saved
    for value in (*worlds.two.values("load_counting_one"), *worlds.three.values("load_counting")):
        assert isinstance(value, dict)
        assert value["calls"] == 1 and value["calls again"] == 2
        assert value["steps again"] in ([2.0], []), "a rank may hold nothing at all"


def test_fsdp1_makes_no_state_where_a_rank_holds_nothing(worlds: Worlds) -> None:
    for value in worlds.two.values("save_adamw_again"):
        assert value == [3.0]


def test_fsdp1_that_cannot_be_kept_is_refused_by_name(worlds: Worlds) -> None:
    for said in worlds.two.values("fsdp1_refusals"):
        assert isinstance(said, dict)
        assert "model.0" in said["flat"] and "use_orig_params=True" in said["flat"]
        assert "p: a FlatParameter" in said["flat parameter"]
        assert "summon_full_params" in said["whole"]
        assert "not in process_group" in said["alone"]
        assert "model.weight" in said["strided"] and "row-major" in said["strided"]


def test_fsdp1_no_shard_is_whole(worlds: Worlds) -> None:
    assert worlds.same(worlds.two, "fsdp1_whole") == {}


def test_sharded_tensors_of_several_boxes(worlds: Worlds) -> None:
    for value in worlds.two.values("sharded_tensors"):
        assert value == {"same": True, "inside": True, "in place": True, "whole": True}


def test_stages_that_reuse_a_name_are_refused_by_name_once_trained_and_the_step_before_is_whole(worlds: Worlds) -> None:
    for value in worlds.four.values("stages_that_reuse_a_name"):
        assert isinstance(value, dict)
        assert "model.bias (mesh [2] of ranks [0, 1] ≠ mesh [2] of ranks [2, 3])" in value["refusal"]
        assert "model.weight" in value["refusal"] and "optimizer" in value["refusal"]
        assert (value["loaded"], value["same"]) == (1, True)


def test_unrelated_meshes_under_one_name_are_refused_before_the_first_byte(worlds: Worlds) -> None:
    for said in worlds.four.values("refuse_unrelated_meshes"):
        assert isinstance(said, str)
        assert "model.bias (mesh [3] of ranks [0, 1, 2] and mesh [1] of ranks [3] have different sizes)" in said
        assert "name of its own" in said
    assert list((worlds.root / "meshes").rglob("*")) == []


def test_two_jobs_in_one_world_keep_apart(worlds: Worlds) -> None:
    values = worlds.four.values("actor_and_critic")
    assert values[0] == values[1] == {"role": "actor", "step": 3, "same": True, "steps": [1, 2, 3]}
    assert values[2] == values[3] == {"role": "critic", "step": 5, "same": True, "steps": [1, 2, 3, 4, 5]}


def test_own_values_come_back_to_their_ranks(worlds: Worlds) -> None:
    drawn = worlds.two.values("save_own")
    assert drawn[0] != drawn[1]
    for rank, value in enumerate(worlds.two.values("load_own")):
        assert value == {"draws": drawn[rank], "position": 100 + rank, "shard": [rank, "text"]}


def test_own_values_on_another_number_of_ranks(worlds: Worlds) -> None:
    drawn = worlds.two.values("save_own")
    values = [value for value in worlds.three.values("load_own_resized") if isinstance(value, dict)]
    assert [value["draws"] for value in values[:2]] == drawn
    assert values[2]["draws"] not in drawn
    for rank, value in enumerate(values):
        assert value["again"] == value["draws"], "a rank that is new is seeded the same each time"
        assert value["first"] == 100
        assert value["made"] == [[[0, "text"], [1, "text"]], rank, 3]
        assert "InvalidError" in value["refused"] and "shard: each of 2 ranks saved a value" in value["refused"]


def test_gradients_load_on_any_layout(worlds: Worlds) -> None:
    assert worlds.same(worlds.two, "load_gradients_one") == worlds.one["gradients"]
    for layout in ("ddp", "fsdp2"):
        saved = worlds.same(worlds.two, f"save_gradients_{layout}")
        assert accumulating.load_gradients(None, worlds.at(f"grads-{layout}"), "one") == saved
    assert worlds.same(worlds.three, "load_gradients") == worlds.same(worlds.two, "save_gradients_fsdp2")


def test_gradients_that_no_rank_holds_reduced_are_refused_by_name(worlds: Worlds) -> None:
    for said in worlds.two.values("refuse_unreduced"):
        assert isinstance(said, dict)
        for kind in ("fsdp2", "fsdp2 asked"):
            assert "model.0.weight.grad" in said[kind] and "set_requires_gradient_sync" in said[kind]
        assert said["stale"] == "same"
        assert "no_sync()" in said["ddp"] and "grads=True" in said["ddp"]
        assert "model.0.weight.grad" in said["ddp asked"] and "rank" in said["ddp asked"]
        assert "no_sync()" in said["fsdp1"]
        assert "FSDP1 keeps gradients" in said["fsdp1 asked"]
    assert not (worlds.root / "unreduced").exists()
