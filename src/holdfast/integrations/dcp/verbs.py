"""The verbs of DCP with its own signatures: a script changes one import."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from holdfast.integrations.dcp.reader import HoldfastReader
from holdfast.integrations.dcp.writer import HoldfastWriter


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save as `torch.distributed.checkpoint.save` does, as a checkpoint of Holdfast.

    As in DCP, a checkpoint at `checkpoint_id` is replaced. It stays whole until the new one is.

    Args:
        state_dict, checkpoint_id, planner, process_group, no_dist, use_collectives: As in DCP.
        storage_writer: None for a `HoldfastWriter`.
    Raises:
        CheckpointException: The save failed on a rank, and so on every one; nothing of it is visible.
    """
    writer = storage_writer or HoldfastWriter(checkpoint_id, overwrite=True)
    try:
        return state_dict_saver.save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    except BaseException:
        _give_up(writer)
        raise


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata] | AsyncSaveResponse:
    """Save in the background as `torch.distributed.checkpoint.async_save` does, as a checkpoint of Holdfast.

    Training is blocked until the state is copied into host memory, which is kept for the next save.

    Args:
        state_dict, checkpoint_id, planner, process_group, async_checkpointer_type, no_dist, use_collectives: As in DCP.
        storage_writer: None for a `HoldfastWriter`.
        async_stager: None for the `HoldfastWriter` itself.
    Returns:
        The future of the save; with a stager of your own that copies in the background, DCP's `AsyncSaveResponse`.
    """
    writer = storage_writer or HoldfastWriter(checkpoint_id, overwrite=True)
    saving = state_dict_saver.async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    if isinstance(saving, AsyncSaveResponse):
        return AsyncSaveResponse(saving.staging_completion, _given_up_first(saving.upload_completion, writer))
    return _given_up_first(saving, writer)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load as `torch.distributed.checkpoint.load` does, from any checkpoint that Holdfast reads.

    Args:
        state_dict, checkpoint_id, planner, process_group, no_dist: As in DCP.
        storage_reader: None for a `HoldfastReader`.
    Raises:
        CheckpointException: The load failed on a rank, and so on every one.
    """
    state_dict_loader.load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader or HoldfastReader(checkpoint_id),
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def _given_up_first(saving: Future[Any], writer: StorageWriter) -> Future[Any]:
    """Return a future that fails only once what the save has left is removed: its caller may save anew by the writer.

    A callback of the future itself runs after those who wait for it have gone on.
    """
    ended: Future[Any] = Future()
    ended.set_running_or_notify_cancel()

    def pass_on(done: Future[Any]) -> None:
        failure = done.exception()
        if failure is None:
            ended.set_result(done.result())
        else:
            _give_up(writer)
            ended.set_exception(failure)

    saving.add_done_callback(pass_on)
    return ended


def _give_up(writer: StorageWriter) -> None:
    """Remove at once what a failed save has left; DCP does not tell its writer that another rank has failed."""
    if isinstance(writer, HoldfastWriter):
        writer.abort()
