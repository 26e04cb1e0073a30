"""What differs between two checkpoints, of one format or of two, and how little is read to find out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import api
from holdfast.base.types.events import Progress
from holdfast.errors import CorruptError, MissingError
from holdfast.offline.diff import compare as differences
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.stored.checkpoint import tensor_reader as windows
from tests.support.tuning import tuned

SMALL_CHUNKS = tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=PAGE_BYTES)


def state(seed: int = 0) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "wide": torch.randn(700, 900, generator=chance),
            "half": torch.randn(300, 70, generator=chance).to(torch.bfloat16),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
            "mask": torch.rand(999, generator=chance) > 0.5,
            "ids": torch.arange(5000),
        },
        "epoch": 3,
        "names": ["a", "b"],
        "nested": {"rate": 0.5, "best": math.nan},
    }


def saved(path: Path, content: dict[str, Any], settings: Settings = SMALL_CHUNKS) -> Path:
    holdfast.save(path, content, process_group=False, settings=settings)
    return path


def found_of(diff: api.Diff) -> dict[str, api.TensorDiff]:
    return {each.fqn: each for each in diff.tensors}


def test_equal_checkpoints_are_equal_and_nothing_is_read(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", state()), saved(tmp_path / "b", state())
    found = api.diff(a, b)
    assert found.equal
    assert found.read_bytes == 0
    assert found.settled_bytes == api.open_checkpoint(a).manifest.tensor_bytes
    assert all(each.change is None for each in found.tensors)
    full = api.diff(a, b, full=True)
    assert full.equal
    assert full.read_bytes == 2 * found.settled_bytes
    change = found_of(full)["model.wide"].change
    assert change is not None
    norm = torch.linalg.vector_norm(state()["model"]["wide"].double()).item()
    assert change.norm_a == change.norm_b == pytest.approx(norm, rel=1e-12)


def test_one_element_costs_one_chunk(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["wide"][350, 450] += 0.25
    a, b = saved(tmp_path / "a", state()), saved(tmp_path / "b", changed)
    found = api.diff(a, b)
    assert found.read_bytes == 2 * PAGE_BYTES
    wide = found_of(found)["model.wide"]
    assert wide.verdict is api.Verdict.CHANGED
    assert wide.settled_bytes == 700 * 900 * 4 - PAGE_BYTES
    assert wide.change is not None
    assert wide.change.changed == 1
    assert wide.change.max_absolute == wide.change.norm_difference == pytest.approx(0.25, rel=1e-5)
    assert {each.fqn for each in found.tensors if each.verdict is not api.Verdict.EQUAL} == {"model.wide"}


def test_everything_that_can_differ_is_told(tmp_path: Path) -> None:
    changed = state()
    model = changed["model"]
    model["mask"] = ~model["mask"]
    model["ids"][-1] = -1
    model["half"] = model["half"].to(torch.float32)
    model["wide"] = model["wide"].reshape(900, 700)
    model["new"] = model.pop("scalar")
    changed |= {"epoch": 3.0, "names": ["a", "c"], "nested": {"best": math.nan, "worst": 1}}
    found = api.diff(saved(tmp_path / "a", state()), saved(tmp_path / "b", changed))
    assert not found.equal
    verdicts = {name: each.verdict.value for name, each in found_of(found).items()}
    assert verdicts == {
        "model.empty": "equal", "model.half": "dtype", "model.ids": "changed", "model.mask": "changed",
        "model.wide": "shape",
    }  # fmt: skip
    mask, ids = (found_of(found)[name].change for name in ("model.mask", "model.ids"))
    assert mask is not None and ids is not None
    assert (mask.changed, mask.max_absolute) == (999, 1)
    assert (ids.changed, ids.max_absolute) == (1, 5000)
    assert [(each.fqn, each.dtype, each.shape, each.tied_to) for each in found.only_a] == [
        ("model.scalar", "float32", (), None)
    ]
    assert [each.fqn for each in found.only_b] == ["model.new"]
    values = {each.path: (each.in_a, each.a, each.in_b, each.b) for each in found.values}
    assert values == {
        "epoch": (True, 3, True, 3.0),
        "names[1]": (True, "b", True, "c"),
        "nested.rate": (True, 0.5, False, None),
        "nested.worst": (False, None, True, 1),
    }


def test_types_that_differ_are_compared_when_asked(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["half"] = changed["model"]["half"].to(torch.float32)
    changed["model"]["ids"] = changed["model"]["ids"].to(torch.float32)
    a, b = saved(tmp_path / "a", state()), saved(tmp_path / "b", changed)
    assert not api.diff(a, b).equal
    found = found_of(api.diff(a, b, cast=True))
    assert found["model.half"].verdict is api.Verdict.EQUAL
    assert found["model.half"].dtype == ("bfloat16", "float32")
    assert found["model.ids"].verdict is api.Verdict.DTYPE, "no type of numpy holds both exactly"


def test_a_checkpoint_and_the_files_of_another_system(tmp_path: Path) -> None:
    """A large tensor in several batches, cut otherwise in each; nothing is settled, everything is read about once."""
    count = 9_000_000
    content = {"big": torch.arange(count, dtype=torch.int32).reshape(3000, 3000), "w": torch.randn(50, 7)}
    saved(tmp_path / "a", {"model": content}, Settings())
    files = tmp_path / "files"
    files.mkdir()
    save_file({"w": content["w"]}, files / "model-00001-of-00002.safetensors")
    other = content["big"].clone()
    other[2999, 2999] += 5
    save_file({"big": other}, files / "model-00002-of-00002.safetensors")
    for pair in ((tmp_path / "a", files), (files, tmp_path / "a")):
        found = api.diff(*pair)
        big = found_of(found)["model.big"].change
        assert big is not None
        assert (big.changed, big.max_absolute, big.norm_difference) == (1, 5, 5)
        last = count - 1 + 5 * (pair[0] == files)
        squares = (count - 2) * (count - 1) * (2 * count - 3) // 6 + last * last
        assert big.norm_a == pytest.approx(math.sqrt(squares), rel=1e-12)
        assert found_of(found)["model.w"].verdict is api.Verdict.EQUAL
        assert found.settled_bytes == 0
        total = 2 * (count * 4 + 50 * 7 * 4)
        assert total <= found.read_bytes < total + 4 * MIB
    assert api.diff(files, files).equal


def test_tied_names_are_compared_once_and_told_where_they_differ(tmp_path: Path) -> None:
    shared = torch.randn(40, 5)
    a = saved(tmp_path / "a", {"model": {"emb": shared, "head": shared}})
    b = saved(tmp_path / "b", {"model": {"emb": shared, "head": shared.clone()}})
    assert api.open_checkpoint(a).aliases, "torch's own sharing is what makes a tie"
    found = api.diff(a, b)
    assert found.equal, "they load alike"
    assert {each.name for each in found.ties} == set(api.open_checkpoint(a).aliases)
    assert len(found.tensors) == 2
    assert api.diff(a, a).ties == ()
    assert len(api.diff(a, a).tensors) == 1
    lone = saved(tmp_path / "c", {"model": {"emb": shared}})
    only = api.diff(a, lone).only_a
    assert [(each.fqn, each.tied_to) for each in only] == [("model.head", "model.emb")]


@pytest.mark.parametrize(
    ("a", "b"), [({1: "x"}, {True: "x"}), ({1: "x"}, {1.0: "x"}), ({0.0: "x"}, {-0.0: "x"}), ({1: "x"}, {"1": "x"})]
)
def test_keys_of_different_types_are_different_keys(tmp_path: Path, a: dict[Any, str], b: dict[Any, str]) -> None:
    paths = [saved(tmp_path / name, {"tags": tags}) for name, tags in (("a", a), ("b", b), ("c", b))]
    found = api.diff(*paths[:2])
    assert [(each.in_a, each.in_b) for each in found.values] == [(True, False), (False, True)]
    assert api.diff(*paths[1:]).equal


def test_keys_that_are_nan_are_one_key(tmp_path: Path) -> None:
    tags: list[dict[Any, str]] = [{float("nan"): "x"}, {float("nan"): "x"}, {float("nan"): "y"}]
    a, b, c = (saved(tmp_path / str(number), {"tags": each}) for number, each in enumerate(tags))
    assert api.diff(a, b).equal
    (value,) = api.diff(a, c).values
    assert (value.path, value.a, value.b) == ("tags[nan]", "x", "y")


def test_what_ranks_kept_as_their_own_is_compared(tmp_path: Path) -> None:
    paths = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(seed)
        own = {"seen": holdfast.PerRank({"files": seed}), "chance": holdfast.RngState()}
        paths.append(saved(tmp_path / str(number), {**state(), "own": own}))
    a, b, c = paths
    # Python's and numpy's generators were not seeded, and nothing drew from them meanwhile.
    assert api.diff(a, b).equal
    found = {each.path: each for each in api.diff(a, c).values}
    files = found.pop("own.seen[rank 0].files")
    assert (files.a, files.b) == (1, 2)
    assert found and all(path.startswith("own.chance[rank 0]") for path in found)


def test_batches_are_sized_by_the_wider_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_max = 64 * PAGE_BYTES
    monkeypatch.setattr(differences, "BATCH_BYTES", bytes_max)
    narrow = torch.arange(200 * PAGE_BYTES).to(torch.uint8)
    a = saved(tmp_path / "a", {"w": narrow})
    b = saved(tmp_path / "b", {"w": narrow.to(torch.float64)})
    read: list[int] = []
    execute = windows.execute

    def counted(plan: Any, packs: Any, targets: Any, settings: Settings, codecs: Any) -> None:
        read.append(sum(target.array.nbytes for target in targets))
        execute(plan, packs, targets, settings, codecs)

    monkeypatch.setattr(windows, "execute", counted)
    for pair in ((a, b), (b, a)):
        read.clear()
        assert api.diff(*pair, cast=True).equal
        assert sum(read) == 9 * narrow.nbytes
        assert max(read) <= bytes_max


def test_chosen_tensors_and_no_values(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["ids"] += 1
    changed["epoch"] = 4
    a, b = saved(tmp_path / "a", state()), saved(tmp_path / "b", changed)
    assert api.diff(a, b, tensors=["*.wide", "*.mask"]).equal
    assert not api.diff(a, b, tensors="*.ids").equal
    assert api.diff(a, b, tensors="*.ids").values == ()


def test_damage_is_found_and_never_taken_for_a_difference(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["wide"] += 1
    a, b = saved(tmp_path / "a", state()), saved(tmp_path / "b", changed)
    (pack,) = b.glob("*/r00000.safetensors")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptError, match="hash to"):
        api.diff(a, b)
    with pytest.raises(MissingError):
        api.diff(a, tmp_path / "nothing")


class Heard:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def on_event(self, event: Progress) -> None:
        self.heard.append((event.done_bytes, event.total_bytes))


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["wide"] += 1
    a, b = saved(tmp_path / "a", state()), saved(tmp_path / "b", changed)
    heard = Heard()
    api.diff(api.open_checkpoint(a), api.open_checkpoint(b), observer=heard)
    assert heard.heard[-1] == (700 * 900 * 4, 700 * 900 * 4)
