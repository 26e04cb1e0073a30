"""What compression is compared with: zipnn, zstd at level 3, and PyTorch DCP with its ZStandard extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save as dcp_sync_save

from bench.report import version_of

State = dict[str, torch.Tensor]

PACKAGES = ("zipnn", "zstandard")
THREADS = (1, 2)
"""Threads of DCP's writer; the rival of a round is the faster of them."""

ZIPNN_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [package for package in PACKAGES if version_of(package) is None]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class ZipNn:
    """zipnn on one whole tensor at a time, on one thread. It changes what it compresses, so it gets copies."""

    def __init__(self) -> None:
        from zipnn import ZipNN

        self._coders: dict[torch.dtype, Any] = {
            dtype: ZipNN(input_format="byte", bytearray_dtype=name, threads=1) for dtype, name in ZIPNN_DTYPES.items()
        }
        self._copy = bytearray()

    def encode(self, tensor: torch.Tensor) -> bytes:
        """Return the compressed tensor. The copy goes to memory that is used again and again."""
        raw = raw_bytes(tensor)
        if len(self._copy) < len(raw):
            self._copy = bytearray(len(raw))
        copy = memoryview(self._copy)[: len(raw)]
        copy[:] = raw
        return self._coders[tensor.dtype].compress(copy)  # type: ignore[no-any-return]

    def decode(self, stored: bytes, dtype: torch.dtype) -> bytes:
        """Return the bytes of a tensor."""
        return self._coders[dtype].decompress(stored)  # type: ignore[no-any-return]

    def encoded_bytes(self, state: State) -> int:
        """Return the bytes of a state, every tensor compressed, checked, and counted raw if that is less."""
        total = 0
        for name, tensor in state.items():
            stored = self.encode(tensor)
            assert self.decode(stored, tensor.dtype) == raw_bytes(tensor), name
            total += min(len(stored), tensor.nbytes)
        return total


def zstd_encoder() -> Callable[[memoryview], bytes]:
    """Return what DCP's extension does with a stream: zstd at its default level, 3."""
    import zstandard

    compressor = zstandard.ZstdCompressor()
    return compressor.compress  # type: ignore[no-any-return]


def dcp_zstd_save(state: State, folder: Path, threads: int, *, no_dist: bool = False) -> None:
    """Save with DCP and its ZStandard extension, durably."""
    from torch.distributed.checkpoint._extension import ZStandard

    writer = dcp.FileSystemWriter(folder, thread_count=threads, sync_files=True, _extensions=[ZStandard()])
    dcp_sync_save(state, storage_writer=writer, no_dist=no_dist)


def dcp_zstd_load(state: State, folder: Path, *, no_dist: bool = False) -> None:
    """Load with DCP; its reader finds the extension in the metadata."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=no_dist)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
