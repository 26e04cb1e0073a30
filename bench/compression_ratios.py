"""How much smaller checkpoints are: of one process, of jobs that keep the state in several ways, and beside rivals.

A ratio is the bytes of the state ÷ the bytes of all files below the checkpoint's folder: manifest, index and reports
count. Every checkpoint is loaded again and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import holdfast
from bench import compression_rivals as rivals
from bench import conditions
from bench.compression_rivals import folder_bytes
from bench.compression_state import KINDS, Gpt, State, bytes_of, snapshots, split
from bench.part import Measured, Params, Part, Round, Spread, present, spread_of, spreads_of
from bench.settings import settings


def folder_ratio(state: State, target: State, folder: Path, *, skip: tuple[str, ...] = ()) -> float:
    """Save a state compressed, load it again into `target`, compare, remove the folder; return the ratio."""
    chosen = settings(compression="on", compression_skip=skip)
    conditions.removed(folder)
    holdfast.save(folder, state, settings=chosen)
    holdfast.load(folder, target)
    conditions.require_equal(state, target)
    stored = folder_bytes(folder)
    conditions.barrier()
    conditions.removed(folder)
    return whole_bytes(state) / stored


def whole_bytes(state: State) -> int:
    """Return the bytes of a state, every element once, however many ranks have it."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def zeros_like(state: State) -> State:
    """Return a state of the same tensors, all zero."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


# ------------------------------------------------------------------------------- one process, and the rivals


def measure(root: Path, params: Params) -> Measured:
    """Save every snapshot with each contender."""
    rounds: list[Round] = []
    zipnn = rivals.ZipNn()
    for state in snapshots():
        whole, target = bytes_of(state), zeros_like(state)
        each: Round = {
            "ours": folder_ratio(state, target, root / "ours"),
            "plain_weights": folder_ratio(state, target, root / "plain", skip=("model.*",)),
            "zipnn": whole / zipnn.encoded_bytes(state),
        }
        rivals.dcp_zstd_save(state, root / "dcp", 1, no_dist=True)
        each["dcp_zstd"] = whole / folder_bytes(root / "dcp")
        conditions.removed(root / "dcp")
        rounds.append(each)
        conditions.say(", ".join(f"{name} {ratio:.3f}" for name, ratio in each.items()))
    return Measured(rounds, [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the ratios, and ours over those of the rivals; a round is a snapshot."""
    return spreads_of(
        {
            "ratio_state": [each["ours"] for each in rounds],
            "ratio_state_plain_weights": [each["plain_weights"] for each in rounds],
            "ratio_vs_zipnn": [each["ours"] / each["zipnn"] for each in rounds],
            "ratio_vs_dcp_zstd": [each["ours"] / each["dcp_zstd"] for each in rounds],
        }
    )


RATIOS = Part(
    name="ratios",
    question="How much smaller is a checkpoint of the state, in one process and beside rivals?",
    ranks=1,
    full={},
    quick={},
    measure=measure,
    keys=keys,
)

# ------------------------------------------------------------------------------- layouts of jobs


def distributed(state: State, mesh: DeviceMesh, placements: Sequence[Placement]) -> State:
    """Return a state as DTensors: by rows, vectors too."""
    return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in state.items()}


def measure_ddp(root: Path, params: Params) -> Measured:
    """Save whole tensors that every rank has, as under DDP."""
    return _measured_states(root, "ddp2", [(state, zeros_like(state)) for state in snapshots()])


def measure_hsdp(root: Path, params: Params) -> Measured:
    """Save tensors that are sharded over two ranks and replicated on two more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    states = [distributed(state, mesh, (Replicate(), Shard(0))) for state in snapshots()]
    return _measured_states(root, "hsdp", [(state, zeros_like(state)) for state in states])


def _measured_states(root: Path, name: str, states: Sequence[tuple[State, State]]) -> Measured:
    rounds: list[Round] = []
    for state, target in states:
        rounds.append({name: folder_ratio(state, target, root / name)})
        conditions.say(f"{name} {rounds[-1][name]:.3f}")
    return Measured(rounds, [])


def measure_fsdp(root: Path, params: Params) -> Measured:
    """Save an fp32 model under FSDP2, and its AdamW: 12 bytes a parameter."""
    rounds: list[Round] = []
    for state in snapshots():
        saved, target = ({"model": model, "optimizer": optimizer} for model, optimizer in (_fsdp(state), _fsdp(None)))
        folder = root / "fsdp"
        conditions.removed(folder)
        holdfast.save(folder, saved, settings=settings(compression="on"))
        holdfast.load(folder, target)
        saved_tensors, loaded = _tensors_of(saved), _tensors_of(target)
        conditions.require_equal(saved_tensors, loaded)
        ratio = whole_bytes(saved_tensors) / folder_bytes(folder)
        conditions.barrier()
        conditions.removed(folder)
        rounds.append({"fsdp": ratio})
        conditions.say(f"fp32 under FSDP2 {ratio:.3f}")
    return Measured(rounds, [])


def _fsdp(state: State | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under FSDP2 and its optimizer, filled from a snapshot; as they are at first for None."""
    from torch.distributed.fsdp import fully_shard

    model = Gpt()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in (state or {}).items():
        kind, parameter_name = split(name)
        parameter = model.get_parameter(parameter_name)
        targets = {"master": parameter, **optimizer.state[parameter]}
        if kind in targets:
            filled = targets[kind]
            assert isinstance(filled, DTensor)
            with torch.no_grad():
                filled.copy_(distribute_tensor(tensor, filled.device_mesh, filled.placements))
    return model, optimizer


def _tensors_of(state: dict[str, object]) -> State:
    """Return the parameters and moments of a model and its optimizer."""
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    found: State = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        tensors = {"master": parameter.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
        found |= {KINDS[kind].format(name): tensor for kind, tensor in tensors.items()}
    return found


def keys_of_layouts(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the ratio of the layout that was measured."""
    names = {"ddp2": "ratio_ddp2", "hsdp": "ratio_hsdp", "fsdp": "ratio_fp32_fsdp2"}
    return {
        key: spread_of([each[name] for each in rounds if name in each])
        for name, key in names.items()
        if present(rounds, name)
    }


DDP = Part(
    name="ddp2",
    question="How much smaller is a checkpoint of two DDP replicas?",
    ranks=2,
    full={},
    quick={},
    measure=measure_ddp,
    keys=keys_of_layouts,
)
HSDP = Part(
    name="hsdp",
    question="How much smaller is a checkpoint of a job sharded over 2 × 2 ranks under HSDP?",
    ranks=4,
    full={},
    quick={},
    measure=measure_hsdp,
    keys=keys_of_layouts,
)
FSDP = Part(
    name="fp32_fsdp2",
    question="How much smaller is a checkpoint of an fp32 model under FSDP2?",
    ranks=2,
    full={},
    quick={},
    measure=measure_fsdp,
    keys=keys_of_layouts,
)
