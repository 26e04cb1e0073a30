"""How many bytes are read of a compressed checkpoint: for a part of the state, and by a job on another layout.

The store counts what is asked of the packs. What it is asked of index and manifest is in the rounds. The bytes that
tensors are stored in are those that the headers of the packs state. Every load is compared bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from bench import conditions
from bench.compression_ratios import zeros_like
from bench.compression_state import State, of_kinds, repeated, snapshots, split
from bench.compression_store import CountingStore, manager_over, pack_bytes
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.settings import settings
from bench.state import MIB
from holdfast.backends.stores.local import LocalStore


def stored_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes in which each tensor is stored, as the headers of all packs below a folder say."""
    found: dict[str, int] = {}
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = found.get(name, 0) + stop - start
    return found


# ------------------------------------------------------------------------------- a part of the state


def measure(root: Path, params: Params) -> Measured:
    """Load weights alone, and masters alone."""
    whole = repeated(snapshots()[-1], params["mib"] * MIB)
    chosen = settings(compression="on")
    with manager_over(LocalStore(root, settings=chosen), chosen, False) as run:
        run.save(0, whole).wait()
    stored = stored_bytes(root)
    each: Round = {}
    for name, loaded, needed in (
        ("weights", ("weight",), ("weight",)),
        # A master is coded against its weight, so both are read.
        ("masters", ("master",), ("master", "weight")),
    ):
        target = zeros_like(of_kinds(whole, *loaded))
        store = CountingStore(root, chosen)
        with manager_over(store, chosen, False) as run:
            run.load(target)
        conditions.require_equal(target, whole)
        needed_bytes = sum(count for fqn, count in stored.items() if split(fqn)[0] in needed)
        each[name] = pack_bytes(store.read_bytes) / needed_bytes
        each[f"{name}_with_index"] = sum(store.read_bytes.values()) / needed_bytes
        with_index = f"{each[f'{name}_with_index']:.4f} with the index"
        conditions.say(f"{name} alone: {each[name]:.4f} of the bytes that they are stored in, {with_index}")
    conditions.removed(root)
    return Measured([each], [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return bytes read ÷ bytes stored."""
    return {f"{name}_only_read": spread_of([each[name] for each in rounds]) for name in ("weights", "masters")}


PARTLY = Part(
    name="reads",
    question="How many bytes are read for weights alone, and for masters alone?",
    ranks=1,
    full={"mib": 256},
    quick={"mib": 48},
    measure=measure,
    keys=keys,
)

# ------------------------------------------------------------------------------- a job on another layout

CASES = {
    "2_to_3": (2, 3, False),
    "4_to_2": (4, 2, False),
    "fsdp_to_tp": (2, 2, True),
}
"""Ranks that save by rows, ranks that load, and whether these hold columns."""


def on(mesh: DeviceMesh, state: State, *, columns: bool) -> State:
    """Return a state as DTensors over a mesh, by rows or by columns."""
    return {
        name: distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1 if columns else 0)])
        for name, tensor in state.items()
    }


def measure_reshard(root: Path, params: Params) -> Measured:
    """Save on some ranks of the job and load on others, reads shared."""
    whole = repeated(snapshots()[-1], params["mib"] * MIB)
    # A collective of all ranks, also of those that take no part in a case.
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (2, 3, 4)}
    each: Round = {}
    for name, (saving, loading, columns) in CASES.items():
        folder = root / name
        if dist.get_rank() < saving:
            chosen, mesh = settings(compression="on"), meshes[saving]
            with manager_over(LocalStore(folder, settings=chosen), chosen, mesh.get_group()) as run:
                run.save(0, on(mesh, whole, columns=False)).wait()
        dist.barrier()
        read = torch.zeros(2, dtype=torch.int64)
        if dist.get_rank() < loading:
            counts = _read_counts(folder, on(meshes[loading], whole, columns=columns), meshes[loading])
            read = torch.tensor([pack_bytes(counts), sum(counts.values())])
        dist.all_reduce(read)
        stored = sum(stored_bytes(folder).values())
        each[name], each[f"{name}_with_index"] = (float(count) / stored for count in read)
        conditions.say(f"{name}: {each[name]:.4f} of the bytes stored, {each[f'{name}_with_index']:.4f} with the index")
        conditions.removed(folder)
    return Measured([each], [])


def _read_counts(folder: Path, expected: State, mesh: DeviceMesh) -> dict[str, int]:
    """Load and compare; return the bytes that this rank read, by file."""
    chosen = settings(share_reads="always")
    store, target = CountingStore(folder, chosen), zeros_like(expected)
    with manager_over(store, chosen, mesh.get_group()) as run:
        run.load(target)
    conditions.require_equal(expected, target)
    return store.read_bytes


def keys_of_reshard(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the worst of the cases."""
    found = [each[name] for each in rounds for name in CASES]
    return {"coded_read_amplification": Spread(max(found), min(found), max(found))}


RESHARD = Part(
    name="reshard",
    question="How many bytes does a job read that loads a compressed checkpoint onto another layout?",
    ranks=4,
    full={"mib": 128},
    quick={"mib": 48},
    measure=measure_reshard,
    keys=keys_of_reshard,
)
