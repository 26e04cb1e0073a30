"""What ranks do in the tests of exchanging: save on one layout, load on another, count every byte read and given."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.backends.torch.comm import ProcessGroupComm
from holdfast.base.ports.comm import Comm
from holdfast.settings import Settings
from tests.doubles.comm import CommSuite
from tests.support.gloo_worlds import World
from tests.support.tuning import tuned

Buffers = Mapping[int, Sequence[memoryview]]

ROUNDS_OF_32_KIB = tuned(
    Settings(chunk_bytes=4096), window_bytes=8192, read_window_bytes=16384, exchange_bytes_max=128 << 10
)
"""Small enough that a few hundred KiB take many rounds and many chunks."""

SHAPES = {
    "embed": ((300, 64), torch.float32),
    "blocks.0.up": ((96, 257), torch.bfloat16),
    "blocks.0.norm": ((515,), torch.float32),
    "blocks.1.up": ((128, 512), torch.float32),
    "blocks.1.experts": ((5, 24, 48), torch.float64),
    "step": ((), torch.int64),
    "nothing": ((0, 4), torch.float32),
}
STATE_BYTES = sum(torch.empty(shape, dtype=dtype).nbytes for shape, dtype in SHAPES.values())


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randint(-9999, 9999, shape, generator=generator).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def laid_out(whole: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """Rows (FSDP), columns (tensor parallel, what has no columns on every rank), or copies (DDP)."""
    if layout == "copies":
        return {name: tensor.clone() for name, tensor in whole.items()}
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dim = 0 if layout == "rows" else 1
    placed: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        placement = Shard(dim) if tensor.ndim > dim else Replicate()
        placed[name] = distribute_tensor(tensor.clone(), mesh, [placement])
    return placed


def save(world: World, path: str, layout: str) -> None:
    holdfast.save(path, laid_out(whole_state(), layout), settings=ROUNDS_OF_32_KIB)


def load(world: World, path: str, layout: str, exchange: str) -> list[int]:
    """Load, compare every bit, and return bytes read and bytes given by others."""
    settings = replace(ROUNDS_OF_32_KIB, share_reads=exchange)
    target = laid_out({name: torch.zeros_like(tensor) for name, tensor in whole_state().items()}, layout)
    report = holdfast.load(path, target, settings=settings)
    for name, expected in laid_out(whole_state(), layout).items():
        ours, theirs = (each.to_local() if isinstance(each, DTensor) else each for each in (target[name], expected))
        assert torch.equal(ours, theirs), name
    return [report.bytes, report.exchanged_bytes]


COMPRESSED = replace(ROUNDS_OF_32_KIB, compression="on")


def trained_state() -> dict[str, object]:
    """Weights in 16 bits, the masters that they were rounded from, and moments."""
    masters = torch.randn(512, 129, generator=torch.Generator().manual_seed(3)) * 0.02
    return {
        "model": {"up": masters.to(torch.bfloat16)},
        "masters": {"up": masters},
        "moments": {"up.exp_avg_sq": masters.square()},
    }


def sharded(world: World, state: dict[str, object]) -> dict[str, dict[str, torch.Tensor]]:
    """The rows of every tensor in even shards."""
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        group: {name: distribute_tensor(tensor.clone(), mesh, [Shard(0)]) for name, tensor in tensors.items()}
        for group, tensors in state.items()
        if isinstance(tensors, dict)
    }


def save_compressed(world: World, path: str) -> None:
    holdfast.save(path, sharded(world, trained_state()), settings=COMPRESSED)


def load_compressed(world: World, path: str) -> list[int]:
    """Load with an exchange, compare every bit, return bytes read, bytes given by others and bytes stored."""
    target = sharded(world, trained_state())
    for tensors in target.values():
        for tensor in tensors.values():
            tensor.zero_()
    report = holdfast.load(path, target, settings=replace(COMPRESSED, share_reads="always"))
    for group, tensors in sharded(world, trained_state()).items():
        for name, expected in tensors.items():
            found = target[group][name]
            assert isinstance(found, DTensor) and isinstance(expected, DTensor)
            assert torch.equal(found.to_local(), expected.to_local()), name
    checkpoint = holdfast.open_checkpoint(path)
    pieces = [piece for fqn in checkpoint.tensors for piece in checkpoint.pieces(fqn)]
    assert all(piece.coding is not None for piece in pieces)
    assert any(piece.coding is not None and piece.coding.pair_fqn == "model.up" for piece in pieces)
    return [report.bytes, report.exchanged_bytes, sum(piece.stored_bytes for piece in pieces)]


def load_damaged(world: World, path: str, layout: str, exchange: str) -> list[int]:
    """Load after rank 0 has flipped one bit in the middle of a pack."""
    if world.rank == 0:
        pack = sorted(Path(path).rglob("r*.safetensors"))[0]
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    dist.barrier()
    return load(world, path, layout, exchange)


def load_views(world: World, path: str) -> list[list[int]]:
    """Load a file of another system in which one tensor is a part of another, then the file as a step of a run.

    Return bytes read and bytes given by others, of each load.
    """
    folder = Path(path)
    whole = torch.arange(1 << 17, dtype=torch.float32)
    expected = {"whole": whole, "part": whole[5000:9000]}
    if world.rank == 0:
        folder.mkdir()
        torch.save(expected, folder / "model.pt")  # noqa: TID251 - as another system does
        holdfast.import_checkpoint(folder / "model.pt", folder / "run", step=1)
    dist.barrier()
    settings = replace(ROUNDS_OF_32_KIB, share_reads="always", allowed_roots=(path,))
    states = [{name: torch.zeros_like(tensor) for name, tensor in expected.items()} for _ in range(2)]
    reports = [holdfast.load(str(folder / "model.pt"), {"model": states[0]}, settings=settings)]
    with holdfast.CheckpointManager(str(folder / "run"), settings=settings) as manager:
        assert manager.load({"model": states[1]}) == 1
        assert manager.load_report is not None
        assert manager.load_report.passed_over == ()
        reports.append(manager.load_report)
    for state in states:
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    return [[report.bytes, report.exchanged_bytes] for report in reports]


class OverGloo(CommSuite):
    """The suite that every comm must pass, on the processes of this world or on the first few of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups = {size: dist.new_group(list(range(size))) for size in range(1, world.size + 1)}

    def run(self, world_size: int, function: Callable[[Comm], object]) -> list[object]:
        own = None
        if self._world.rank < world_size:
            own = function(ProcessGroupComm(self._groups[world_size]))
        everything: list[object] = [None] * self._world.size
        dist.all_gather_object(everything, own)
        return everything[:world_size]


def comm_suite(world: World) -> list[str]:
    """Run every test of the suite; return their names."""
    suite = OverGloo(world)
    sizes = range(1, world.size + 1)
    for size in sizes:
        suite.test_ranks_and_size(size)
        suite.test_all_gather_gives_every_payload_by_rank(size)
        suite.test_bitwise_or_joins_the_bits_of_all_ranks(size)
        suite.test_exchange_gives_every_rank_what_is_meant_for_it(size)
        for payload in (b"", b"\0", bytes(range(256)) * 300):
            suite.test_broadcast_gives_the_payload_of_rank_0(size, payload)
    plain = [
        name for name in dir(suite) if name.startswith("test_") and not hasattr(getattr(suite, name), "pytestmark")
    ]
    for name in plain:
        getattr(suite, name)()
    return plain


def die_while_passing_on(world: World, path: str) -> list[int]:
    """Rank 1 is gone at its third exchange; what the others then meet is this case's outcome."""
    save(world, path, "rows")
    if world.rank == 1:
        inner, calls = ProcessGroupComm.exchange, itertools.count()

        def exchange(comm: ProcessGroupComm, gives: Buffers, takes: Buffers) -> None:
            if next(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            inner(comm, gives, takes)

        ProcessGroupComm.exchange = exchange  # type: ignore[method-assign]
    return load(world, path, "copies", "always")
