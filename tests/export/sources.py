"""Checkpoints to be exported, and exports through windows far smaller than real ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from holdfast._face import export_wiring, wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.local_place import LocalPlace
from holdfast.backends.torch.framework import TorchFramework
from holdfast.backends.torch.local_shards import Ranks
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.ports.foreign import Writer
from holdfast.base.types.export import ExportOptions
from holdfast.offline.export.export import Export
from holdfast.offline.export.request import ExportReport, ExportRequest
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, run_ranks
from tests.support.tuning import tuned

SMALL = tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=2 * PAGE_BYTES, windows_in_flight=2)
REQUEST = ExportRequest(memory_bytes=64 * MIB, workers=1, window_bytes_max=PAGE_BYTES)

SAFE_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
"""Types that safetensors has and torch too."""


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return every bit pattern that the type has, as far as the shape goes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return what two tensors have in common if they are the same to the last bit."""
    data = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), data.view(torch.uint8).numpy().tobytes() if data.numel() else b""


def small_model() -> torch.nn.Module:
    """Return a model with tied weights and a buffer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(61, 97), torch.nn.Linear(97, 61), torch.nn.Linear(61, 97, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("counted", torch.arange(13))
    return model


def trained_state() -> dict[str, object]:
    """Return a model, an AdamW that has stepped once, and a value."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 61)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": "plain"}


def saved_by_ranks(path: Path, whole: Mapping[str, torch.Tensor], ranks: int) -> Path:
    """Save tensors of which each rank holds columns, or a run of what is flattened, as several ranks do."""

    def work(comm: ThreadComm) -> None:
        framework = TorchFramework(Ranks(comm.rank, comm.world_size, lambda rank: rank))
        run = CheckpointManager.over(LocalStore(path, settings=SMALL), Job(comm, SystemClock(), SMALL, framework))
        state: dict[str, object] = {}
        for name, tensor in whole.items():
            if name.startswith("flat"):
                bounds = [tensor.numel() * each // ranks for each in (comm.rank, comm.rank + 1)]
                part = tensor.reshape(-1)[bounds[0] : bounds[1]].clone()
                state[name] = Sharded(part, tuple(tensor.shape), flat_start=bounds[0])
            else:
                bounds = [tensor.shape[1] * each // ranks for each in (comm.rank, comm.rank + 1)]
                part = tensor[:, bounds[0] : bounds[1]].clone()
                state[name] = Sharded(part, tuple(tensor.shape), start=(0, bounds[0], *(0,) * (tensor.dim() - 2)))
        run.save(1, {"model": state}).wait(timeout=25.0)
        run.close()

    run_ranks(ranks, work)
    return path / "step-000000000001"


def exported(
    source: Path, target: Path, options: ExportOptions | None = None, request: ExportRequest = REQUEST
) -> ExportReport:
    """Export to safetensors through windows of one page."""
    return export_wiring.export_of(source, target, "safetensors", options or ExportOptions(), SMALL).run(request)


def export_by(
    writer: Writer, source: Path, target: Path, request: ExportRequest = REQUEST, options: ExportOptions | None = None
) -> ExportReport:
    """Export with a writer that nobody has registered."""
    checkpoint: Checkpoint = wiring.checkpoint_at(source, SMALL)
    files = writer.files(checkpoint.content, options or ExportOptions())
    return Export(checkpoint, LocalPlace(target), writer.name, files, SystemClock()).run(request)
