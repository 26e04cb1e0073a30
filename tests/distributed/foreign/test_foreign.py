"""Files of safetensors onto FSDP2: rank 0 lists, every rank reads its own part, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.distributed.foreign.foreign_cases import __name__ as CASES
from tests.support.gloo_worlds import Case, Results, run_world
from tests.support.small_networks import adamw, digests, plain, train


def laid_out(folder: Path) -> dict[str, str]:
    """A model of one process in three files with an index; its digests."""
    folder.mkdir()
    net = plain(1)
    train(net, adamw(net))
    names = sorted(net.state_dict())
    weight_map = {}
    for number in range(3):
        key = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: net.state_dict()[name].contiguous() for name in names[number::3]}
        save_file(part, folder / key, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, key)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return digests(net)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    root = tmp_path_factory.mktemp("foreign")
    found = laid_out(root / "model")
    cut = root / "cut"
    laid_out(cut)
    (key, *_) = sorted(cut.glob("*.safetensors"))
    key.write_bytes(key.read_bytes()[:-1])
    lying = root / "lying"
    laid_out(lying)
    index = lying / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "../model/model-00002"))
    return root, found


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest, saved: tuple[Path, dict[str, str]]) -> Results:
    root, _ = saved
    size = request.param
    cases = [
        Case(f"{CASES}:load_weights", {"path": str(root / "model")}),
        Case(f"{CASES}:load_weights", {"path": str(root / "model"), "mesh": [size, 1]}, "as_hsdp"),
        Case(f"{CASES}:load_and_say", {"path": str(root / "cut")}, "cut"),
        Case(f"{CASES}:load_and_say", {"path": str(root / "lying")}, "lying"),
        Case(f"{CASES}:load_and_say", {"path": str(root / "nothing")}, "nothing"),
    ]
    return run_world(size, cases, root / f"world-{size}")


def test_every_rank_holds_what_was_saved(world: Results, saved: tuple[Path, dict[str, str]]) -> None:
    values = world.values("load_weights")
    assert all(value == values[0] for value in values)
    assert values[0]["digests"] == saved[1]  # type: ignore[index]
    assert values[0]["trained"] != saved[1]  # type: ignore[index]


def test_and_so_where_ranks_hold_copies(world: Results, saved: tuple[Path, dict[str, str]]) -> None:
    assert all(value["digests"] == saved[1] for value in world.values("as_hsdp"))  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("cut", "CorruptError", "model-00001-of-00003.safetensors"),
        ("lying", "InvalidError", "../model/model-00002"),
        ("nothing", "MissingError", "nothing"),
    ],
)
def test_what_rank_0_cannot_list_ends_the_load_on_every_rank(world: Results, name: str, error: str, text: str) -> None:
    for value in world.values(name):
        kind, said, unchanged = value  # type: ignore[misc]
        assert (kind, unchanged) == (error, "True")
        assert text in said
