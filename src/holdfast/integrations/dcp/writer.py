"""The storage writer of DCP. What DCP has planned is taken as it is; Holdfast writes packs, and commits once.

Order of the calls of one save, and on which ranks:

    stage                 all, on the training thread, only in an `async_save`: a copy of the state
    set_up, local plan    all; a failed copy is raised here, so that DCP fails the save on every rank
    global plan           coordinator: it claims the path, and gives a ticket to each rank with its plan
    write_data            all: packs, durable; the part goes to the coordinator as a `WriteResult`
    finish                coordinator: proves that the pieces cover every tensor, and publishes the manifest
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.api import open_checkpoint
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.integrations.dcp.framework import HOST, require_tested
from holdfast.pieces import PickledValue, PieceWriter, TensorPiece, stage
from holdfast.settings import Settings

logger = logging.getLogger(__name__)


class PlanTicket:
    """The ticket of one rank, in its plan.

    A planner that caches plans throws away the plan that the coordinator sends, and writes by an earlier one with an
    earlier ticket. So the rank takes note of a ticket when it arrives, in the thread that saves.
    """

    def __init__(self, data: bytes) -> None:
        """Hold a ticket of `PieceWriter.open`."""
        self.data = data

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return _arrived, (self.data,)


_latest = threading.local()


def _arrived(data: bytes) -> PlanTicket:
    ticket = PlanTicket(data)
    _latest.ticket = ticket
    return ticket


_WAIT_SECONDS = 5.0
"""How long a save that comes too early waits for what is about to happen: DCP's thread begins the save before it, or
ends after a failure. DCP does not tell a writer that another rank has failed: until then that save seems to go on."""


@dataclass(frozen=True, slots=True)
class _NotStaged:
    """Stands for a state that was not copied, also in a process that saves for this one: nothing is saved of it."""

    why: CheckpointError


class _SaveOfThread(threading.local):
    """The save that this thread begins; DCP makes all calls of a save in one thread."""

    has_begun = False
    """Whether a call of it has come, and `set_up_storage_writer` has not."""

    failure: CheckpointError | None = None
    """Why it fails."""


class HoldfastWriter(StorageWriter, AsyncStager):
    """Writes checkpoints of Holdfast for `torch.distributed.checkpoint`: pass it as `storage_writer`.

    It is a stager, too: `dcp.async_save` blocks training until it has copied the state into memory that it keeps
    between saves. A save fails on all ranks if it fails on one, and then nothing is visible at the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        settings: Settings | None = None,
    ) -> None:
        """Look at no storage yet.

        Args:
            path: The folder or URL that becomes the checkpoint; `checkpoint_id` of a save takes its place.
            overwrite: Replace the checkpoint at the path, if there is one. It stays whole until the new one is.
            settings: How to save; None for the defaults.
        Raises:
            InvalidError: This version of torch was not tested.
        """
        super().__init__()
        require_tested()
        self.path, self.overwrite, self.settings = path, overwrite, settings or Settings()
        self.save_id = str(uuid.uuid4())
        """Id of the save, as in PyTorch's `FileSystemWriter`; that of rank 0 is stored."""
        self._failure: CheckpointError | None = None
        """Why the save that was just staged fails; `reset` hands it to the thread of that save."""
        self._of_thread = _SaveOfThread()
        self._has_begun = threading.Event()
        """Set unless a state was staged that no thread has begun to save."""
        self._has_begun.set()
        self._saver: threading.Thread | None = None
        """The thread of an `async_save`, until its save has ended as far as this rank knows."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pieces: PieceWriter | None = None
        self._tickets: list[bytes] | None = None
        self._is_writing = False
        self._saver = None

    def __getstate__(self) -> Mapping[str, object]:
        """Keep the arguments alone: a process that saves for this one begins anew."""
        self._has_begun.set()
        return {"path": self.path, "overwrite": self.overwrite, "settings": self.settings}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path or URL is one that Holdfast knows."""
        try:
            PieceWriter(checkpoint_id)
        except CheckpointError:
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return path and id of this save. DCP's first call of a save whose path comes with the writer."""
        self._begin()
        return self._meta()

    def _meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    # ------------------------------------------------------------------------------------------------ staging

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: `stage` returns once the copy is complete."""
        return False

    def stage(self, state_dict: Mapping[str, object]) -> dict[str, object]:
        """Return a copy of a state in host memory, complete: training may change the state.

        An error here would be this rank's alone, and the others would wait for it. It is raised where DCP gathers.
        """
        self._has_begun.wait(_WAIT_SECONDS)
        try:
            self._require_idle()
            # DCP alone refers to it, until the save has ended: then its memory is free for the next one.
            return stage(state_dict, self.settings)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - whatever a value of the state raises when it is copied
            self._failure = InvalidError(
                f"{self.path}: the state cannot be copied: {type(error).__name__}: {error}. Leave out of the "
                "state what cannot be copied"
            )
        finally:
            self._has_begun.clear()
        return {"not staged": _NotStaged(self._failure)}

    def _require_idle(self) -> None:
        """Refuse a save beside another one of this writer.

        Raises:
            ConflictError: An async save is under way.
        """
        if self._goes_on_elsewhere():
            doing = "writing" if self._is_writing else "under way"
            raise ConflictError(
                f"{self.path}: an async save of this HoldfastWriter is still {doing}; expected one at a time. Call "
                "result() of its future first, or make a writer for each save"
            )

    def _goes_on_elsewhere(self) -> bool:
        """Return whether an async save of this writer goes on in another thread."""
        saver = self._saver
        if saver is threading.current_thread():
            saver = self._saver = None  # It asks before it begins, so it is in no save.
        if saver is None:
            return False
        if not self._is_writing:
            saver.join(_WAIT_SECONDS)
        return saver.is_alive() and self._saver is saver

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns once the copy is complete."""

    def close(self) -> None:
        """Give up what an earlier save has left unfinished."""
        self.abort()

    # ------------------------------------------------------------------------------------- the calls of a save

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to another path if one is given; give up an earlier one that was not finished."""
        self._of_thread.has_begun = False
        self._begin(checkpoint_id)

    def _begin(self, path: str | os.PathLike[str] | None = None) -> None:
        """Begin a save in this thread, unless it has begun.

        It raises nothing: an error would be this rank's alone. `set_up_storage_writer` raises it.
        """
        own = self._of_thread
        if own.has_begun:
            return
        own.has_begun = True
        is_async = not self._has_begun.is_set()
        own.failure, self._failure = self._failure, None
        self._has_begun.set()
        if own.failure is None:
            try:
                self._require_idle()
            except ConflictError as error:
                own.failure = error
        if isinstance(own.failure, ConflictError):
            return  # The save beside this one goes on.
        self.abort()
        self._saver = threading.current_thread() if is_async else None
        self.path = path or self.path
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the role in this save.

        Raises:
            CheckpointError: The state could not be copied, or an async save of this writer is under way.
            InvalidError: The ranks save without collectives, or another rank than 0 coordinates.
        """
        self._begin()
        self._of_thread.has_begun = False
        if self._of_thread.failure is not None:
            raise self._of_thread.failure
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not kwargs.get("use_collectives", True) and not is_alone:
            raise InvalidError(
                f"{self.path}: use_collectives=False: each rank would commit a checkpoint of its own; expected one of "
                "all ranks. Leave it out"
            )
        if is_coordinator and kwargs.get("rank", 0) != 0:
            raise InvalidError(
                f"{self.path}: rank {kwargs['rank']} coordinates; expected rank 0. Leave out coordinator_rank"
            )
        self._tickets = None
        self._pieces = self._piece_writer()

    def _piece_writer(self) -> PieceWriter:
        if self.path is None:
            raise InvalidError("HoldfastWriter: no path; pass one to HoldfastWriter, or checkpoint_id to the save")
        return PieceWriter(self.path, overwrite=self.overwrite, settings=self.settings)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the path, and put a ticket into the plan of each rank.

        Raises:
            ConflictError: A checkpoint is there; with `overwrite` one that DCP did not save, or another job is at it.
        """
        assert self._pieces is not None, "it was set up"
        self._require_own_path()
        self._tickets = self._pieces.open(len(plans))
        return [
            replace(plan, storage_data=PlanTicket(ticket)) for plan, ticket in zip(plans, self._tickets, strict=True)
        ]

    def _require_own_path(self) -> None:
        """Refuse to replace a checkpoint that another integration, or none, saved.

        Raises:
            ConflictError: One is there.
        """
        if self.overwrite:
            # What is there and cannot be read is judged by the save itself.
            with suppress(InvalidError, MissingError, CorruptError):
                there = open_checkpoint(str(self.path), settings=self.settings)
                if there.origin is None:
                    HOST.require_own_root(there)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan; the future has the part of this rank.

        Raises:
            InvalidError: An item cannot be saved; the message has its FQN. Nothing of this rank is left.
            CheckpointError: Storage failed. Nothing of this rank is left.
        """
        self._is_writing = True
        try:
            part = self._write(plan, planner)
        finally:
            self._is_writing = False
        if self._tickets is None:
            self._saver = None  # The coordinator does the rest.
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(MetadataIndex("holdfast"), len(part), part)])
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> bytes:
        assert self._pieces is not None, "it was set up"
        pieces: list[TensorPiece] = []
        values: dict[str, object] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                values[item.index.fqn] = _object_of(item, planner)
            else:
                pieces.append(_piece_of(item, planner))
        return self._pieces.write(self._ticket_in(plan), pieces, values)

    def _ticket_in(self, plan: SavePlan) -> bytes:
        if self._tickets is not None:
            return self._tickets[0]
        ticket, _latest.ticket = getattr(_latest, "ticket", None), None
        if not isinstance(ticket, PlanTicket):
            raise InvalidError(
                f"{self.path}: the plan of this rank came without a ticket; expected one from prepare_global_plan of "
                "rank 0. Its planner must return the plans that the storage writer makes"
            )
        return ticket.data

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint.

        Raises:
            InvalidError: The pieces of all ranks do not cover a tensor exactly once. Nothing is visible.
            CheckpointError: Storage failed, or another save published first.
        """
        assert self._pieces is not None, "it was set up"
        parts = [written.storage_data for rank in results for written in rank]
        mark: dict[str, object] = {**HOST.mark(), "save_id": self.save_id}
        paths: dict[str, tuple[str | int, ...]] = {}
        if _are_paths(metadata.planner_data):
            # A planner may add items that it does not flatten.
            names = metadata.state_dict_metadata
            paths = {name: path for name, path in metadata.planner_data.items() if name in names}
        elif metadata.planner_data is not None:
            mark["planner_data"] = metadata.planner_data
        self._is_writing = True
        try:
            self._pieces.finish(parts, paths=paths, mark=mark)
        finally:
            self._is_writing, self._saver = False, None
        metadata.storage_meta = self._meta()

    def abort(self) -> None:
        """Give up a save that DCP did not finish, and remove what the ranks wrote; on the coordinator. Never raises.

        An async save that goes on in another thread is left alone: then it was not the one that failed.
        """
        if self._goes_on_elsewhere():
            return
        if self._pieces is not None:
            self._pieces.abort()
        self._begin_anew()


def _object_of(item: WriteItem, planner: SavePlanner) -> object:
    """Return what is not a tensor: the object itself, unless the planner makes bytes of its own of it."""
    if isinstance(planner, DefaultSavePlanner):
        kind = type(planner)
        if (kind.resolve_data, kind.transform_object) == _PLAIN:
            found = planner.lookup_object(item.index)
            if isinstance(found, _NotStaged):
                raise found.why
            return found
    resolved = planner.resolve_data(item)
    if isinstance(resolved, torch.Tensor):
        return resolved
    return PickledValue(resolved.getbuffer().tobytes())


_PLAIN = (DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object)
"""What leaves an object as it is but for its bytes."""


def _piece_of(item: WriteItem, planner: SavePlanner) -> TensorPiece:
    planned, tensor = item.tensor_data, planner.resolve_data(item)
    assert planned is not None, "an item of a tensor says which part it is"
    if isinstance(tensor, torch.Tensor) and tensor.shape != planned.chunk.sizes:
        raise InvalidError(
            f"{item.index.fqn}: the planner resolves a tensor of shape {list(tensor.shape)} for a chunk of "
            f"{list(planned.chunk.sizes)}; expected one shape. Correct resolve_data of the planner"
        )
    return TensorPiece(item.index.fqn, tuple(planned.size), tuple(planned.chunk.offsets), tensor)


def _are_paths(planner_data: object) -> bool:
    """Return whether a planner's data are the paths that `DefaultSavePlanner` keeps of flattened states."""
    return isinstance(planner_data, dict) and all(
        isinstance(name, str) and isinstance(path, tuple) and all(isinstance(key, str | int) for key in path)
        for name, path in planner_data.items()
    )
