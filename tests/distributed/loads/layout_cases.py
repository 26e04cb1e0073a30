"""The ranks of the tests of layouts: each loads its rows of a Hugging Face model from a checkpoint of Megatron."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import InvalidError
from tests.support.gloo_worlds import World
from tests.unit.test_layouts import CASES


def rows(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor in even shards of rows, as FSDP2 has them."""
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor.clone(), mesh, [Shard(0)]) for name, tensor in tensors.items()}


def load(world: World, fixtures: str, case: str, exchange: str) -> list[int]:
    """Load, compare every bit, and return bytes read and bytes given by others."""
    folder = Path(fixtures) / case
    truth = load_file(folder / "hf" / "model.safetensors")
    state = rows({name: torch.zeros_like(tensor) for name, tensor in truth.items()})
    settings = holdfast.Settings(share_reads=exchange)  # type: ignore[arg-type]
    layouts = ["megatron-dist", CASES[case]]
    report = holdfast.load(folder / "torch_dist" / "iter_0000100", {"model": state}, layout=layouts, settings=settings)
    for name, expected in rows(truth).items():
        assert torch.equal(state[name].to_local(), expected.to_local()), name  # type: ignore[attr-defined]
    back = [holdfast.Layout(each).reversed() for each in reversed(layouts)]
    source = holdfast.open_checkpoint(folder / "torch_dist" / "iter_0000100")
    names = [name for name in source.tensors if "optimizer" not in name]
    whole = {name: torch.as_tensor(source.read(name, framework="torch")) for name in names}
    again = rows({name: torch.full_like(tensor, 7) for name, tensor in whole.items()})
    holdfast.load(folder / "hf", again, layout=back, settings=settings)
    for name, tensor in whole.items():
        if tensor.shape[0] == 40:
            tensor[37:] = 7
        expected = rows({name: tensor})[name].to_local()  # type: ignore[attr-defined]
        assert torch.equal(again[name].to_local(), expected), name  # type: ignore[attr-defined]
    return [report.bytes, report.exchanged_bytes]


def differ(world: World, fixtures: str) -> str:
    """Give one rank another size: every rank refuses."""
    folder = Path(fixtures) / "dense_tp2_pp2"
    state = rows({"lm_head.weight": torch.ones(37, 16)})
    own = holdfast.Layout("megatron-hf-llama", sizes={"vocab": 37} if dist.get_rank() else {})
    try:
        holdfast.load(
            folder / "torch_dist" / "iter_0000100", {"model": state}, layout=["megatron-dist", own], strict=False
        )
    except InvalidError as error:
        assert (state["lm_head.weight"].to_local() == 1).all()  # type: ignore[attr-defined]
        return str(error)
    return ""
