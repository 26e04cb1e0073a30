"""float8_e8m0fnu and float4_e2m1fn_x2: files of other systems, conversions, values, compression, other layouts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.errors import InvalidError
from tests.support.tuning import tuned

CODES = torch.arange(240, dtype=torch.uint8).reshape(6, 40)
SCALES, PAIRS = CODES.view(torch.float8_e8m0fnu), CODES.flip(0).contiguous().view(torch.float4_e2m1fn_x2)


def fresh() -> dict[str, Any]:
    return {"scales": torch.zeros_like(SCALES), "pairs": torch.zeros_like(PAIRS)}


def require_equal(found: dict[str, Any]) -> None:
    for tensor, expected in ((found["scales"], SCALES), (found["pairs"], PAIRS)):
        assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("system", ["safetensors", "torch", "dcp"])
def test_files_of_other_systems_load_and_copy(tmp_path: Path, system: str) -> None:
    state, path = {"scales": SCALES.clone(), "pairs": PAIRS.clone()}, tmp_path / "other"
    if system == "safetensors":
        path = tmp_path / "other.safetensors"
        save_file(state, path)
    elif system == "torch":
        path = tmp_path / "other.pt"
        torch.save(state, path)  # noqa: TID251 - a file of another system
    else:
        with warnings.catch_warnings(action="ignore"):  # It warns of a single process.
            dcp.save(state, checkpoint_id=path, no_dist=True)
    require_equal(loaded_from(path, system))
    for copy in (True, False):
        run = tmp_path / f"run-{copy}"
        holdfast.import_checkpoint(path, run, step=1, copy=copy)
        require_equal(loaded_from(run / "step-000000000001", system, tmp_path))
        manifest = json.loads((run / "step-000000000001" / "manifest.json").read_text())
        assert manifest["holdfast"]["format"] == [1, 5]


def loaded_from(path: Path, system: str, *roots: Path) -> dict[str, Any]:
    found = fresh()
    settings = holdfast.Settings(allowed_roots=tuple(map(str, roots)))
    state = found if system == "dcp" else {"model": found}
    holdfast.load(path, state, process_group=False, settings=settings)
    return found


@pytest.mark.parametrize("system", ["safetensors", "torch", "dcp"])
def test_exports_are_read_by_their_own_system(tmp_path: Path, system: str) -> None:
    holdfast.save(tmp_path / "c", {"model": {"scales": SCALES, "pairs": PAIRS}}, process_group=False)
    holdfast.export(tmp_path / "c", tmp_path / "out", to=system)
    if system == "safetensors":
        found: dict[str, Any] = load_file(tmp_path / "out" / "model.safetensors")
    elif system == "torch":
        loaded = torch.load(tmp_path / "out")  # noqa: TID251 - read by its own system
        found = loaded.get("model", loaded)
    else:
        found = {f"model.{name}": tensor for name, tensor in fresh().items()}
        with warnings.catch_warnings(action="ignore"):
            dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
        found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    require_equal(found)


def test_pairs_that_rows_cut_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(InvalidError, match=r"w: dtype F4 of shape \[2, 3\]; expected .*even last dimension"):
        holdfast.load(tmp_path / "odd.safetensors", {"model": {"w": torch.zeros(2, 2)}}, process_group=False)


@pytest.mark.parametrize("other", [torch.float32, torch.uint8, torch.float8_e8m0fnu])
def test_pairs_are_never_converted(tmp_path: Path, other: torch.dtype) -> None:
    plain = torch.zeros(6, 40, dtype=other)
    for number, (saved, target) in enumerate(((PAIRS, plain), (plain, torch.zeros_like(PAIRS)))):
        first = torch.zeros(2)
        holdfast.save(tmp_path / str(number), {"a": torch.ones(2), "w": saved}, process_group=False)
        with pytest.raises(InvalidError, match=r"w \((float4_e2m1fn_x2 saved|.* saved, float4_e2m1fn_x2 wanted)"):
            holdfast.load(tmp_path / str(number), {"a": first, "w": target}, process_group=False, cast=True)
        assert not first.any()


def test_scales_are_converted_as_torch_does(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": SCALES}, process_group=False)
    target = torch.zeros(6, 40)
    holdfast.load(tmp_path / "c", {"w": target}, process_group=False, cast=True)
    assert torch.equal(target, SCALES.float())


@pytest.mark.parametrize("tensor", [SCALES[0, :1], PAIRS[0, :1]])
def test_a_value_of_them_is_refused_with_the_way_out(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidError, match=r"as a value; expected another type\. Put it into a dict of the state"):
        holdfast.save(tmp_path / "c", {"own": holdfast.PerRank({"t": tensor})}, process_group=False)


def test_compression_gives_the_same_bytes(tmp_path: Path) -> None:
    settings = tuned(holdfast.Settings(compression="on", chunk_bytes=4096), coded_bytes_min=4096)
    scales = (torch.arange(40_000) % 7 + 120).to(torch.uint8).view(torch.float8_e8m0fnu)
    pairs = torch.zeros(20_000, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    holdfast.save(tmp_path / "c", {"scales": scales, "pairs": pairs}, process_group=False, settings=settings)
    checkpoint = holdfast.open_checkpoint(tmp_path / "c")
    assert any("coded/" in pack.name for pack in checkpoint.manifest.packs)
    assert checkpoint.read("scales").tobytes() == scales.view(torch.uint8).numpy().tobytes()
    assert checkpoint.read("pairs").tobytes() == bytes(20_000)
    assert list(checkpoint.verify()) == []


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_views_in_any_order(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(210, dtype=torch.uint8).reshape(10, 21)
    views = {"t": whole.t().view(dtype), "inner": whole.view(dtype)[2:5, 3:9], "rows": whole.view(dtype)[::3]}
    holdfast.save(tmp_path / "c", views, process_group=False)
    room = torch.zeros(10, 42, dtype=torch.uint8).view(dtype)
    targets = {
        "t": torch.zeros(10, 21, dtype=torch.uint8).t().view(dtype),
        "inner": room[1:4, 20:26],
        "rows": torch.zeros(4, 21, dtype=torch.uint8).view(dtype),
    }
    holdfast.load(tmp_path / "c", targets, process_group=False)
    for name, view in views.items():
        assert torch.equal(targets[name].view(torch.uint8), view.view(torch.uint8)), name


def test_one_pair_in_a_list_is_made_and_filled(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"list": [PAIRS[0, :1].clone(), PAIRS[1, 2].clone()]}, process_group=False)
    state: dict[str, Any] = {"list": []}
    holdfast.load(tmp_path / "c", state, process_group=False)
    assert [tensor.view(torch.uint8).flatten().tolist() for tensor in state["list"]] == [[200], [162]]
