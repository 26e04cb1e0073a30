"""Cases of tensors that carry their coordinates; `test_coordinates.py` runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.errors import InvalidError
from holdfast.integrations import dcp as drop_in
from tests.support.gloo_worlds import World
from tests.support.located_tensors import Piece, carrying, part_of

WHOLE = torch.linspace(-3, 3, 70).reshape(10, 7)
UNEVEN: Mapping[int, tuple[Sequence[int], list[Piece]]] = {
    0: ((4, 7), [((0, 0), (0, 0), (3, 7)), ((7, 0), (3, 0), (1, 7))]),
    1: ((9, 6), [((3, 0), (0, 2), (4, 3)), ((3, 3), (5, 0), (4, 4))]),
    2: ((3, 8), [((8, 0), (1, 1), (2, 7))]),
}
"""Local shape and pieces by rank: two rank with several pieces, columns, and padding."""


def training(rank: int, steps: int) -> dict[str, Any]:
    """Return this rank's part of a parameter, its optimizer after some steps, and a tensor that only rank 0 has."""
    shape, pieces = UNEVEN[rank]
    weight = nn.Parameter(part_of(WHOLE, shape, pieces) if steps else torch.zeros(tuple(shape)))
    carrying(weight, WHOLE.shape, pieces)
    optimizer = torch.optim.AdamW([weight], lr=0.01)
    for number in range(steps):
        weight.grad = part_of(torch.sin(WHOLE + number), shape, pieces, padding=0)
        optimizer.step()
    owner: list[Piece] = [((0,), (0,), (4,))] if rank == 0 else []
    owned = carrying(torch.arange(4.0) if rank == 0 and steps else torch.zeros(4 if rank == 0 else 0), (4,), owner)
    return {"weight": weight, "optimizer": optimizer, "owned": owned}


def contents(state: dict[str, Any]) -> dict[str, list[float]]:
    """Return the elements of weight and moments that this rank holds, piece by piece; of DTensors all of them."""
    (entries,) = state["optimizer"].state.values()
    tensors = {"weight": state["weight"].detach(), "owned": state["owned"]}
    tensors |= {key: entries[key] for key in ("exp_avg", "exp_avg_sq", "step")}
    found: dict[str, list[float]] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.flatten().tolist()
    return found


def save(world: World, path: str, steps: int = 2, how: str = "save") -> dict[str, list[float]]:
    state = training(world.rank, steps)
    if how == "async":
        holdfast.async_save(path, state).wait()
    elif how == "lazy":
        settings = holdfast.Settings(staging="lazy")
        with holdfast.CheckpointManager(path, settings=settings) as manager:
            manager.save(1, state)
    else:
        holdfast.save(path, state)
    return {}


def load(world: World, path: str) -> list[bool]:
    """Load onto coordinates; return for each tensor whether this rank's elements are those of the training."""
    state, expected = training(world.rank, 0), training(world.rank, 2)
    report = holdfast.load(path, state)
    assert report.missing == report.unexpected == ()
    (entries,), (saved,) = state["optimizer"].state.values(), expected["optimizer"].state.values()
    pairs = [(state["weight"], expected["weight"]), *((entries[key], saved[key]) for key in ("exp_avg", "exp_avg_sq"))]
    pieces = UNEVEN[world.rank][1]
    same = [
        torch.equal(found[slices], other[slices])
        for found, other in pairs
        for _, start, size in pieces
        for slices in [tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]
    ]
    return [*same, torch.equal(state["owned"], expected["owned"]), bool(entries["step"] == 2)]


def load_meshed(world: World, path: str, again: str) -> dict[str, list[float]]:
    """Load onto DTensors of two ranks, and save those."""
    group, mesh = dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1])
    if world.rank == 2:
        return {}
    weight = nn.Parameter(distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0)]))
    state = {"weight": weight, "optimizer": torch.optim.AdamW([weight], lr=0.01), "owned": torch.zeros(4)}
    report = holdfast.load(path, state, process_group=group)
    assert report.missing == report.unexpected == ()
    holdfast.save(again, state, process_group=group)
    return contents(state)


def through_dcp(world: World, path: str) -> list[bool]:
    """Save and load such tensors by PyTorch's planners, with its own storage and with Holdfast's."""
    saved, blank = (training(world.rank, steps) for steps in (2, 0))
    kind = dcp.CheckpointableTensor  # type: ignore[attr-defined]
    results = [isinstance(saved[name], kind) for name in ("weight", "owned")]

    def state(of: dict[str, Any]) -> dict[str, Any]:
        pieces = UNEVEN[world.rank][1]
        return {"weight": carrying(of["weight"].detach(), WHOLE.shape, pieces), "owned": of["owned"]}

    def is_filled() -> bool:
        pairs = [
            (blank["weight"][place], saved["weight"][place])
            for _, start, size in UNEVEN[world.rank][1]
            for place in [tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]
        ]
        same = all(torch.equal(*pair) for pair in pairs) and torch.equal(blank["owned"], saved["owned"])
        with torch.no_grad():
            blank["weight"].zero_(), blank["owned"].zero_()
        return same

    dcp.save(state(saved), storage_writer=dcp.FileSystemWriter(f"{path}/torch"))
    holdfast.load(f"{path}/torch", state(blank))
    results.append(is_filled())
    dcp.save(state(saved), storage_writer=drop_in.HoldfastWriter(f"{path}/written"))
    holdfast.load(f"{path}/written", state(blank))
    results.append(is_filled())
    dcp.load(state(blank), storage_reader=drop_in.HoldfastReader(f"{path}/written"))
    results.append(is_filled())
    dcp.load(state(blank), storage_reader=drop_in.HoldfastReader(f"{path}/torch"))
    results.append(is_filled())
    drop_in.save(state(saved), checkpoint_id=f"{path}/dropped")
    drop_in.load(state(blank), checkpoint_id=f"{path}/dropped")
    results.append(is_filled())
    return results


HALVES = [[((0, 0), (0, 0), (5, 7))], [((5, 0), (0, 0), (5, 7))]]


def replicated(world: World, path: str, everywhere: bool, differs: str = "", twice: bool = False) -> object:
    """Save halves that ranks 0 and 2 share, and perhaps a tensor that all ranks share; return pieces and a load."""
    number = world.rank % 2
    state = {"halves": part_of(WHOLE, (5, 7), HALVES[number])}
    if everywhere:
        state["all"] = carrying(torch.arange(6.0), (6,), [((0,), (0,), (6,))])
        thirds: list[Piece] = [((2 * world.rank,), (0,), (2,))]
        state["thirds"] = part_of(torch.arange(6.0), (2,), thirds)
    if differs and world.rank == 2:
        if differs == "cut":
            pieces: list[Piece] = [((0, 0), (0, 0), (2, 7)), ((2, 0), (2, 0), (3, 7))]
            carrying(state["halves"], (10, 7), pieces)
        else:
            state[differs][-1] = 99
    try:
        for _ in range(2 if twice else 1):
            holdfast.save(path, state, overwrite=True)
    except InvalidError as error:
        return str(error)
    target = {name: torch.zeros(holdfast.open_checkpoint(path).tensors[name].shape) for name in state}
    holdfast.load(path, target)
    return [
        torch.equal(target["halves"], WHOLE),
        all(torch.equal(target[name], torch.arange(6.0)) for name in ("all", "thirds") if name in target),
        sum(sum(piece.bytes for piece in holdfast.open_checkpoint(path).pieces(name)) for name in state),
    ]


WRONG: dict[str, Mapping[int, tuple[tuple[int, ...], tuple[int, ...], list[Piece]]]] = {
    "overlap": {1: ((10, 7), (4, 7), [((2, 0), (0, 0), (4, 7))])},
    "hole": {1: ((10, 7), (2, 7), [((4, 0), (0, 0), (2, 7))])},
    "overlap as large as a hole": {1: ((10, 7), (3, 7), [((4, 0), (0, 0), (3, 7))])},
    "nothing": {1: ((10, 7), (0, 7), [])},
    "twice": {1: ((10, 7), (6, 7), [((3, 0), (0, 0), (3, 7)), ((5, 0), (3, 0), (1, 7))])},
    "another shape": {1: ((11, 7), (3, 7), [((3, 0), (0, 0), (3, 7))])},
    "outside": {1: ((10, 7), (3, 7), [((8, 0), (0, 0), (3, 7))])},
}
"""By name, what rank 1 has in place of rows 3 to 5: whole shape, local shape, pieces."""


def refused(world: World, path: str, wrong: str) -> str:
    thirds: list[list[Piece]] = [[((0, 0), (0, 0), (3, 7))], [((3, 0), (0, 0), (3, 7))], [((6, 0), (0, 0), (4, 7))]]
    shape, local, pieces = WRONG[wrong].get(world.rank, ((10, 7), (4 if world.rank == 2 else 3, 7), thirds[world.rank]))
    state = {"fine": part_of(WHOLE, (4 if world.rank == 2 else 3, 7), thirds[world.rank])}
    try:
        holdfast.save(path, state | {"w": carrying(torch.ones(local), shape, pieces)})
    except InvalidError as error:
        return str(error)
    return "saved"


def beside_declared(world: World, path: str) -> str:
    """Save one name as `Sharded` on rank 0, and with coordinates on the others."""
    piece: list[Piece] = [((2 * world.rank,), (0,), (2,))]
    tensor: object = carrying(torch.ones(2), (6,), piece)
    if world.rank == 0:
        tensor = holdfast.Sharded(torch.ones(2), global_shape=(6,), start=(0,))
    try:
        holdfast.save(path, {"w": tensor})
    except InvalidError as error:
        return str(error)
    return "saved"
