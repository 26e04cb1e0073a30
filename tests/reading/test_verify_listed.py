"""Another system's checkpoint held against itself: copies bit for bit, casts in samples or wholly.

The format here is made up, its files and everything that reads them are real.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.events import Progress
from holdfast.base.types.listing import ForeignListing, ListedPiece
from holdfast.base.types.values import Group
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.checkpoint.verify import Damage
from tests.unit.cli.running import holdfast as command

ROWS, COLUMNS = 1500, 1000
"""Of a tensor with 6 MB of master copy: several chunks of every file."""


class Foreign:
    """What somebody's format found."""

    name = ""
    is_file = False

    def __init__(self, folder: Path, listing: ForeignListing) -> None:
        self.files, self._listing = ForeignFiles(folder), listing

    def listing(self) -> ForeignListing:
        return self._listing


def opened(folder: Path, listing: ForeignListing) -> Checkpoint:
    return Checkpoint(
        CheckpointLocation(MemoryStore("verify-listed"), "", None, Foreign(folder, listing)),
        Settings(),
        lambda array, dtype: array,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A master copy in two flat halves, the weight cast from it in two boxes side by side, two further copies of it."""
    master = np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    weight = torch.from_numpy(master).to(torch.bfloat16).view(torch.uint16).numpy()
    half = ROWS * COLUMNS // 2
    (tmp_path / "rank 0").write_bytes(b"head" + master.reshape(-1)[:half].tobytes())
    (tmp_path / "rank 1").write_bytes(b"header" + master.reshape(-1)[half:].tobytes())
    (tmp_path / "left").write_bytes(weight[:, :600].tobytes())
    (tmp_path / "right").write_bytes(b"x" + weight[:, 600:].tobytes())
    (tmp_path / "copies").write_bytes(weight.tobytes() + weight[3:5].tobytes())
    return tmp_path


def listing_of(folder: Path, **changes: object) -> ForeignListing:
    shape, half = (ROWS, COLUMNS), ROWS * COLUMNS // 2
    fields: dict[str, object] = {
        "format": "made up 1.0",
        "tensors": {"w": TensorSpec("w", "bfloat16", shape), "w.master": TensorSpec("w.master", "float32", shape)},
        "pieces": {
            "w": [
                ListedPiece(Box((0, 0), (ROWS, 600)), "left", 0),
                ListedPiece(Box((0, 600), shape), "right", 1),
            ],
            "w.master": [
                ListedPiece(FlatRange(0, half), "rank 0", 4),
                ListedPiece(FlatRange(half, 2 * half), "rank 1", 6),
            ],
        },
        "files": {path.name: path.stat().st_size for path in folder.iterdir()},
        "tree": Group("dict", {}),
        "replicas": {
            "w": [
                ListedPiece(Box.whole(shape), "copies", 0),
                ListedPiece(FlatRange(3 * COLUMNS, 5 * COLUMNS), "copies", 2 * ROWS * COLUMNS),
            ]
        },
        "casts": {"w.master": "w"},
    }
    return ForeignListing(**{**fields, **changes})  # type: ignore[arg-type]


def flipped(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 0x40
    path.write_bytes(data)


def damages(folder: Path, *, deep: bool = False, **changes: object) -> list[Damage]:
    return list(opened(folder, listing_of(folder, **changes)).verify(deep=deep))


@pytest.mark.parametrize("deep", [False, True])
def test_what_agrees_is_sound_and_says_how_closely_it_was_looked_at(folder: Path, deep: bool) -> None:
    heard: list[tuple[int, int]] = []

    class Heard:
        def on_event(self, event: Progress) -> None:
            heard.append((event.done_bytes, event.total_bytes))

    work = opened(folder, listing_of(folder)).verification(Heard(), deep=deep)
    assert list(work.damages()) == []
    assert work.sampled is False, "so small a tensor is in the sample whole"
    copies = 2 * ROWS * COLUMNS + 2 * 2 * COLUMNS
    assert work.total_bytes == copies + 2 * ROWS * COLUMNS
    assert heard[-1] == (work.total_bytes, work.total_bytes)
    assert f"further copies: 2 of 1 tensors compared bit for bit, {copies:,} bytes" in work.notes
    assert "casts of master copies: 1 tensors compared whole" in work.notes


def test_a_copy_that_differs_is_named_with_its_bytes(folder: Path) -> None:
    first, last = 2 * (7 * COLUMNS + 11) + 1, 2 * (1499 * COLUMNS + 999)
    flipped(folder / "copies", first, last)
    (damage,) = damages(folder)
    assert (damage.file, damage.fqn) == ("copies", "w")
    assert (damage.start, damage.stop) == (first - 1, last + 2)
    assert "2 elements differ" in damage.message
    flipped(folder / "copies", first, last, 2 * ROWS * COLUMNS + 8)
    (damage,) = damages(folder)
    assert (damage.start, damage.stop) == (2 * ROWS * COLUMNS + 8, 2 * ROWS * COLUMNS + 10)


@pytest.mark.parametrize("deep", [False, True])
def test_what_is_no_cast_of_its_master_is_named_with_its_bytes(
    folder: Path, deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.stored.checkpoint.verify_foreign.SAMPLED_BYTES", 1)
    ends = 1, 2 * ROWS * 400 - 1
    flipped(folder / "right", *ends)
    found = damages(folder, deep=deep, replicas={})
    (damage,) = found
    assert (damage.file, damage.fqn) == ("right", "w")
    assert (damage.start, damage.stop) == (1, 2 * ROWS * 400 + 1)
    assert "2 elements looked at are not w.master cast to bfloat16" in damage.message


def test_what_a_sample_passes_over_is_found_by_looking_at_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.stored.checkpoint.verify_foreign.SAMPLED_BYTES", 1)
    middle = 2 * (700 * 600 + 300)
    flipped(folder / "left", middle)
    work = opened(folder, listing_of(folder, replicas={})).verification()
    assert work.sampled
    assert work.total_bytes == 4 * 4096
    assert any("1 tensors sampled, 16,384 of 3,000,000 bytes; deep compares all" in note for note in work.notes)
    assert list(work.damages()) == []
    (damage,) = damages(folder, deep=True, replicas={})
    assert (damage.file, damage.start, damage.stop) == ("left", middle, middle + 2)


def test_a_file_that_changed_its_size_since_it_was_listed(folder: Path) -> None:
    checkpoint = opened(folder, listing_of(folder))
    with (folder / "rank 1").open("r+b") as file:
        file.truncate(1000)
    found = list(checkpoint.verify())
    assert found[0].file == "rank 1"
    assert "1000 bytes; expected 3000006" in found[0].message
    assert any(each.fqn == "w" and each.start is not None and "rank 1" in each.message for each in found[1:])


def test_copies_and_casts_that_cannot_be_are_damage(folder: Path) -> None:
    outside = {
        "w": [ListedPiece(Box.whole((ROWS, COLUMNS)), "copies", 10_000)],
        "v": [ListedPiece(Box((), ()), "left", 0)],
    }
    found = damages(folder, replicas=outside)
    assert [(each.file, each.fqn) for each in found] == [("copies", "w"), ("left", "v")]
    assert "has 3004000 bytes" in found[0].message
    listing = listing_of(folder, replicas={})
    tensors = {**listing.tensors, "v": TensorSpec("v", "bfloat16", (2, 2))}
    pieces = {**listing.pieces, "v": [ListedPiece(Box.whole((2, 2)), "left", 0)]}
    (damage,) = damages(folder, replicas={}, tensors=tensors, pieces=pieces, casts={"w.master": "v"})
    assert damage.fqn == "v"
    assert "of shape [2, 2]; its master copy w.master is of shape [1500, 1000]" in damage.message


def test_a_weight_that_is_its_master_copy_is_not_held_against_itself(folder: Path) -> None:
    listing = listing_of(folder)
    tensors = {**listing.tensors, "w": TensorSpec("w", "float32", (ROWS, COLUMNS))}
    pieces = dict.fromkeys(("w", "w.master"), listing.pieces["w.master"])
    work = opened(folder, listing_of(folder, replicas={}, tensors=tensors, pieces=pieces)).verification(deep=True)
    assert list(work.damages()) == []
    assert work.total_bytes == 0
    assert len(work.notes) == 1


def test_a_weight_that_is_no_plain_cast_is_said_not_to_be_compared(folder: Path) -> None:
    listing = listing_of(folder)
    tensors = {**listing.tensors, "q": TensorSpec("q", "int8", (ROWS, COLUMNS))}
    pieces = {**listing.pieces, "q": [ListedPiece(Box.whole((ROWS, COLUMNS)), "copies", 0)]}
    flipped(folder / "copies", 8)
    changes: dict[str, object] = {"tensors": tensors, "pieces": pieces, "casts": {"w.master": "q"}}
    work = opened(folder, listing_of(folder, **changes)).verification()
    (damage,) = work.damages()
    assert (damage.file, damage.start) == ("copies", 8)
    assert "casts of master copies: 1 tensors not comparable, the first q: int8, its master copy float32" in work.notes


DEEPSPEED = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"


@pytest.mark.parametrize("path", sorted(DEEPSPEED.glob("*/*/")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_deepspeed_wrote_agrees_with_itself_but_where_its_converter_errs(path: Path) -> None:
    checkpoint = holdfast.open_checkpoint(path)
    wrong = {each.fqn for each in checkpoint.verify(deep=True)}
    if path.match("zero2rr_dp2/universal"):
        assert len(wrong) == 6, "made by param_slice_mappings, which lie there with round_robin_gradients"
    else:
        assert wrong == set()


@pytest.mark.parametrize("target", ["float16", "float32"])
def test_casts_to_other_types(tmp_path: Path, target: str) -> None:
    master = torch.randn(33, 7, dtype=torch.float64)
    master[0, 0] = torch.nan
    weight = master.to(getattr(torch, target))
    parts: Mapping[str, torch.Tensor] = {"w.master": master, "w": weight}
    for name, tensor in parts.items():
        (tmp_path / name).write_bytes(tensor.numpy().tobytes())
    listing = ForeignListing(
        format="made up",
        tensors={name: TensorSpec(name, str(each.dtype)[6:], (33, 7)) for name, each in parts.items()},
        pieces={name: [ListedPiece(Box.whole((33, 7)), name, 0)] for name in parts},
        files={name: (tmp_path / name).stat().st_size for name in parts},
        tree=Group("dict", {}),
        casts={"w.master": "w"},
    )
    assert list(opened(tmp_path, listing).verify()) == []
    flipped(tmp_path / "w", weight.itemsize * 232 - weight.itemsize * 2)
    (damage,) = opened(tmp_path, listing).verify()
    assert damage.start == weight.itemsize * 230


def test_the_command_says_what_it_could_not_judge(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    ended = command("verify", tmp_path)
    assert ended.status == 0
    assert "they hold no digests" in ended.out
    document = command("verify", tmp_path, "--deep", "--json").json()
    assert (document["whole"], document["sampled"], document["bytes"]) == (True, False, 0)
    assert len(document["notes"]) == 1
    assert list(holdfast.open_checkpoint(tmp_path).verify()) == []
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    ended = command("verify", tmp_path)
    assert ended.status == 1
    assert "model.safetensors: bytes 0–8" in ended.out


def changed_buffer(tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Checkpoint:
    """Return a ZeRO-3 checkpoint of which rank 3 holds another buffer."""
    shutil.copytree(DEEPSPEED / "zero3_dp4" / "ckpt", tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "global_step3" / "zero_pp_rank_3_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)  # noqa: TID251 - what DeepSpeed wrote
    state["module"]["scale"] = change(state["module"]["scale"])
    torch.save(state, path)  # noqa: TID251 - as DeepSpeed does
    return holdfast.open_checkpoint(tmp_path / "ckpt")


def test_a_buffer_that_differs_by_rank_is_found(tmp_path: Path) -> None:
    (damage,) = changed_buffer(tmp_path, lambda scale: scale + 100).verify()
    assert damage.fqn == "model.scale"
    assert "zero_pp_rank_3" in damage.file and "differ from the copy" in damage.message


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda scale: torch.stack([scale, scale])])
def test_a_buffer_of_another_type_or_shape_on_a_rank_is_a_remark(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    checkpoint = changed_buffer(tmp_path, change)
    assert list(checkpoint.verify()) == []
    (remark,) = [each for each in checkpoint.remarks if "scale" in each]
    assert "zero_pp_rank_3" in remark and "data-parallel rank 0" in remark
