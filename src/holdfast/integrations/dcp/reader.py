"""The storage reader of DCP: it offers each tensor whole, and reads the boxes that planners ask for, all at once."""

from __future__ import annotations

import io
import os
import uuid
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.errors import ConflictError, InvalidError
from holdfast.integrations.dcp.framework import require_tested
from holdfast.integrations.host import MARK
from holdfast.pieces import BoxReader, TensorPiece
from holdfast.settings import Settings


class HoldfastReader(StorageReader):
    """Reads any checkpoint that Holdfast knows for `torch.distributed.checkpoint`: pass it as `storage_reader`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int | str | None = None,
        flatten_optimizer_state_dict: bool = False,
        settings: Settings | None = None,
    ) -> None:
        """Look at no storage yet.

        Args:
            path: The checkpoint; `checkpoint_id` of a load takes its place.
            step: A step of the run whose root the path is: its number, a tag, or `"latest"`.
            flatten_optimizer_state_dict: Whether optimizers have flat names, as `StateDictOptions` calls it. It counts
                for checkpoints of `holdfast.save` and of other systems: those of `HoldfastWriter` keep their names.
            settings: How to read; None for the defaults.
        Raises:
            InvalidError: This version of torch was not tested.
        """
        super().__init__()
        require_tested()
        self.path, self.step, self.settings = path, step, settings or Settings()
        self._flatten = flatten_optimizer_state_dict
        self.load_id = str(uuid.uuid4())
        """Id of the load, as in PyTorch's `FileSystemReader`."""
        self._opened: BoxReader | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it may be a path or URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of another path if one is given."""
        self._opened = None
        if checkpoint_id:
            self.path = checkpoint_id
        self.load_id = str(uuid.uuid4())

    def read_metadata(self) -> Metadata:
        """Return what the checkpoint holds. A tensor is one chunk, however it was saved: any box of it can be read.

        Raises:
            MissingError: There is no checkpoint.
            CorruptError: Its manifest or index is damaged.
        """
        if self.path is None:
            raise InvalidError("HoldfastReader: no path; pass one to HoldfastReader, or checkpoint_id to the load")
        opened = BoxReader(self.path, step=self.step, flat_optimizers=self._flatten, settings=self.settings)
        self._opened = opened
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, info in opened.tensors.items():
            size = torch.Size(info.shape)
            chunk = ChunkStorageMetadata(torch.Size((0,) * len(size)), size)
            properties = TensorProperties(dtype=getattr(torch, info.dtype))
            described[name] = TensorStorageMetadata(properties, size, [chunk])
        described.update((name, BytesStorageMetadata()) for name in opened.values)
        described = {name: described[name] for name in opened.paths if name in described} | described
        mark: Any = opened.checkpoint.objects.get(MARK)
        own, save_id = (mark.get("planner_data"), mark.get("save_id")) if isinstance(mark, dict) else (None, None)
        meta = StorageMeta(checkpoint_id=self.path, save_id=save_id, load_id=self.load_id)
        return Metadata(described, planner_data=dict(opened.paths) if own is None else own, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: every rank reads for itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with a note of the checkpoint that this rank has opened."""
        assert self._opened is not None, "the metadata were read"
        found = self._opened.checkpoint
        return replace(plan, storage_data=_Opened(found.url, found.manifest.attempt))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are, once it is sure that all ranks load one checkpoint.

        Each rank opens it for itself. Meanwhile another job may overwrite it, or save the step that is then the latest.

        Raises:
            ConflictError: They load several.
        """
        noted = [(rank, plan.storage_data) for rank, plan in enumerate(plans)]
        # A planner may drop the notes.
        known = [(rank, opened) for rank, opened in noted if isinstance(opened, _Opened)]
        for rank, opened in known:
            first_rank, first = known[0]
            if opened.attempt != first.attempt:
                raise ConflictError(
                    f"rank {rank} loads {opened.url} (attempt {opened.attempt}), and rank {first_rank} {first.url} "
                    f"(attempt {first.attempt}); expected one checkpoint. Another job saved meanwhile: load again, or "
                    "name the number of a step"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of a plan: the tensors together, straight into the planner's memory where it fits.

        Raises:
            InvalidError: A tensor cannot take what is stored.
            CorruptError: Stored bytes are not what was saved.
        """
        opened = self._opened
        assert opened is not None, "the metadata were read"
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        opened.read([_piece_of(item, into, opened) for item, into in zip(tensors, targets, strict=True)])
        for item, into in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, into)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(opened.torch_bytes(item.storage_index.fqn)))
        read: Future[None] = Future()
        read.set_result(None)
        return read


@dataclass(frozen=True, slots=True)
class _Opened:
    """The checkpoint that a rank has opened."""

    url: str
    attempt: str


def _piece_of(item: ReadItem, into: torch.Tensor, opened: BoxReader) -> TensorPiece:
    """Return the box that an item asks for."""
    fqn = item.storage_index.fqn
    first = item.storage_index.offset or (0,) * len(item.storage_offsets)
    start = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
    if tuple(into.shape) != tuple(item.lengths):
        raise InvalidError(
            f"{fqn}: the planner resolves a tensor of shape {list(into.shape)} for a box of {list(item.lengths)}; "
            "expected one shape. Correct resolve_tensor of the planner"
        )
    info = opened.tensors.get(fqn)
    return TensorPiece(fqn, tuple(into.shape) if info is None else info.shape, start, into)
