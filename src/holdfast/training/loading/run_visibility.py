"""Finds out whether a root without a run is empty, or whether rank 0 alone does not see the run."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from holdfast.base.ports.store import Store
from holdfast.core.format.names import RUN_FILE
from holdfast.errors import CheckpointError, UnavailableError, first_three
from holdfast.stored.repository.catalog import exists, runs_below
from holdfast.training.coordination.job import Job, error_text, raise_together
from holdfast.training.coordination.message_codec import decode_message, encode_message

_RANK_0_SEES, _OTHER_FINDING = 2, 1
"""Bits that ranks join: rank 0 sees the run, which has no step; a rank sees the run, or cannot look."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """What one rank finds at the root."""

    host: str
    """Name of its host."""

    sees_run: bool
    """Whether `holdfast.json` is there."""

    error: str | None
    """Why it cannot look, as an `error_text`."""


def new_run_line(root: Store) -> str:
    """Return what the log says of a root without a committed step. A misspelt root looks like a new run."""
    return f"starting a new run at {root.url}: it has no committed step{runs_below(root)}"


def require_no_run_elsewhere(job: Job, root: Store) -> None:
    """Refuse to start from scratch while another rank sees a run that rank 0 does not see; a collective.

    Rank 0 with an unmounted file system would otherwise have the whole job begin anew.

    Args:
        job: The ranks.
        root: The root of the run, as this rank sees it.
    Raises:
        UnavailableError: On every rank: a rank sees a run, or cannot look.
    """
    if job.comm.world_size == 1:
        return
    sees_run, own = False, None
    try:
        sees_run = exists(root, RUN_FILE)
    except CheckpointError as error:
        own = error
    bits = _OTHER_FINDING if sees_run or own is not None else 0
    if sees_run and job.comm.rank == 0:
        bits = _RANK_0_SEES
    # One byte a rank travels where a new run starts.
    (joined,) = job.comm.bitwise_or(bytes([bits]))
    if not joined or joined & _RANK_0_SEES:
        return
    sight = _Sight(platform.node(), sees_run, None if own is None else error_text(own))
    sights = [decode_message(data, _Sight) for data in job.comm.all_gather(encode_message(sight))]
    raise_together([each.error for each in sights], job.comm.rank, own)
    seeing = [rank for rank, each in enumerate(sights) if each.sees_run]
    hosts = sorted({sights[rank].host for rank in seeing})
    raise UnavailableError(
        f"{root.url}: rank 0 on host {sights[0].host} finds no run, but ranks [{first_three(seeing)}] on hosts "
        f"[{first_three(hosts)}] find one; expected one root for all ranks. Nothing was loaded. Check the mount on "
        f"host {sights[0].host}, and that every rank passes the same root"
    )
