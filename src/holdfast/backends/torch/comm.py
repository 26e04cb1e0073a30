"""The ranks of a process group: c10d's store as the key-value store, collectives on the caller's thread."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from holdfast.backends.alone import AloneComm
from holdfast.backends.torch.descriptor_limit import warn_of_descriptor_limit
from holdfast.backends.torch.key_value_store import TorchKeyValueStore
from holdfast.backends.torch.private_layout import default_store, devices_of, timeouts_of
from holdfast.errors import InvalidError, UnavailableError

P = ParamSpec("P")
T = TypeVar("T")

_TAG = 0x686F6C64
"""Tag that separates these messages from point-to-point messages of the training script."""


def comm_of(process_group: object) -> ProcessGroupComm | SoloComm:
    """Return the `Comm` of a process group.

    Args:
        process_group: None for the default group (or one process, if torch.distributed is not initialised),
            False for this process alone, or a group.
    Raises:
        InvalidError: It is of another type, or this rank is not a member.
    """
    if process_group is False or (process_group is None and not dist.is_initialized()):
        return SoloComm()
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise InvalidError(f"process_group is {type(process_group).__name__}; expected None, False or a ProcessGroup")
    if not dist.is_initialized():
        raise InvalidError("process_group: torch.distributed is not initialised. Call init_process_group, or pass None")
    return ProcessGroupComm(process_group)


def require_default_group_of_one() -> None:
    """Refuse that a process saves as if it were alone although it is one of several ranks.

    Every rank would save its own part as a whole checkpoint, and the ranks would compete for the root.

    Raises:
        InvalidError: The default group has several ranks, or there is none and the launcher states several ranks.
    """
    way_out = (
        "Call init_process_group first. If each rank shall save for itself, pass process_group=False, and a root of "
        "its own on each rank"
    )
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise InvalidError(
                "the manager was made before init_process_group, so it knows this process only; expected the "
                f"{dist.get_world_size()} ranks of the process group. {way_out}"
            )
        return
    # torchrun and most launchers state it. Those that do not are met by the check above, once there is a group.
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1:
        raise InvalidError(
            f"WORLD_SIZE={ranks}: this process is one of {ranks} ranks, but torch.distributed has no process group; "
            f"expected one before a CheckpointManager is made or a state is saved. {way_out}"
        )


def group_of(process_group: object) -> object:
    """Return the object that identifies a group during its life."""
    return dist.group.WORLD if process_group is None else process_group


def _collective(call: Callable[Concatenate[ProcessGroupComm, P], T]) -> Callable[Concatenate[ProcessGroupComm, P], T]:
    """Raise what torch.distributed reports of a dead or absent rank as one of our errors."""

    @wraps(call)
    def typed(self: ProcessGroupComm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(self, *args, **kwargs)
        except RuntimeError as error:  # So are torch's errors of backends, of the network and of time-outs.
            raise UnavailableError(
                f"rank {self.rank}: a collective of Holdfast ({call.__name__}) over {self.world_size} ranks failed: "
                f"{error}; expected every rank to take part. A rank has ended, makes another call, or cannot be "
                "reached: look at the logs of the other ranks, then restart the job"
            ) from error

    return typed


class ProcessGroupComm:
    """The ranks of a torch process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and dist.get_rank(group) < 0:
            raise InvalidError("process_group: this rank is not a member; expected calls by members only")
        # A weak reference: a job by path lives as long as its group, and must not keep the group alive.
        self._given = None if group is None else weakref.ref(group)
        # Read once: a commit may still run when the process group is destroyed. The store is kept for the same reason:
        # on the rank that hosts it, the server stops with the last reference.
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._default_store = default_store()
        self.key_value_store = TorchKeyValueStore(self._default_store)
        """The key-value store of the job."""
        if dist.get_rank() == 0:
            # The ranks of every group connect to the store of the whole job.
            warn_of_descriptor_limit(dist.get_world_size())
        self.timeout_seconds = _timeout_of(group)
        """How long a collective of the training waits."""
        members = dist.get_process_group_ranks(group)
        self._rank_of_global = {member: rank for rank, member in enumerate(members)}
        # Names of groups are internal to torch. The count of restarts: an agent of torchrun keeps the store of the life
        # before. Without that store each life has its own, and agents that came back count restarts from 0.
        has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        identity = repr((members, os.environ.get("TORCHELASTIC_RESTART_COUNT") if has_agent_store else None))
        self.group_id = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        """Names the group among those that use the same key-value store."""

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The group; None for the default group."""
        group = None if self._given is None else self._given()
        if group is None and self._given is not None:
            raise InvalidError("process_group: it was destroyed; expected a group that exists. Make a new one")
        return group

    def rank_of_global(self, rank: int) -> int | None:
        """Return the group's rank of a global rank, or None if it is not a member."""
        return self._rank_of_global.get(rank)

    @_collective
    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's payload on every rank."""
        device = self._device()
        length = torch.tensor([len(payload or b"")], dtype=torch.int64, device=device)
        dist.broadcast(length, group=self._group, group_src=0)
        data = _tensor_of(payload or b"", int(length.item()), device)
        if data.numel():
            dist.broadcast(data, group=self._group, group_src=0)
        return data.cpu().numpy().tobytes()

    @_collective
    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank."""
        device = self._device()
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64, device=device), group=self._group)
        longest = max(int(length.item()) for length in lengths)
        if longest == 0:
            return [b""] * self.world_size
        gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(self.world_size)]
        dist.all_gather(gathered, _tensor_of(payload, longest, device), group=self._group)
        return [
            padded.cpu().numpy()[: int(length.item())].tobytes()
            for padded, length in zip(gathered, lengths, strict=True)
        ]

    @_collective
    def bitwise_or(self, payload: bytes) -> bytes:
        """Return the bitwise OR of the payloads of all ranks, which have one length."""
        if not payload:
            return b""
        device = self._device()
        if device.type == "cpu":
            joined = _tensor_of(payload, len(payload), device)
            dist.all_reduce(joined, op=dist.ReduceOp.BOR, group=self._group)
            return joined.numpy().tobytes()
        # NCCL has no bitwise operation. The maximum of single bits is the same.
        bits = torch.from_numpy(np.unpackbits(np.frombuffer(payload, dtype=np.uint8))).to(device)
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group)
        return np.packbits(bits.cpu().numpy()).tobytes()

    @_collective
    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        """Send bytes to other ranks and receive theirs."""
        device = self._device()
        # By address and length: a buffer for several ranks is copied to the device once.
        staged: dict[tuple[int, int], torch.Tensor] = {}
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        moves = []
        for rank, buffers in sorted(gives.items()):
            for buffer in filter(len, buffers):
                host = torch.frombuffer(buffer, dtype=torch.uint8)
                key = host.data_ptr(), len(buffer)
                if key not in staged:
                    staged[key] = host.to(device)
                moves.append(dist.P2POp(dist.isend, staged[key], group=self._group, tag=_TAG, group_peer=rank))
        for rank, buffers in sorted(takes.items()):
            for buffer in filter(len, buffers):
                host = torch.frombuffer(buffer, dtype=torch.uint8)
                received = host if device.type == "cpu" else torch.empty_like(host, device=device)
                arriving.append((host, received))
                moves.append(dist.P2POp(dist.irecv, received, group=self._group, tag=_TAG, group_peer=rank))
        if not moves:
            return
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        for host, received in arriving:
            if received is not host:
                host.copy_(received)

    def _device(self) -> torch.device:
        group = self._group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialised"
        if torch.device("cpu") in devices_of(group):
            return torch.device("cpu")
        return torch.device(torch.accelerator.current_accelerator() or "cpu")


def _timeout_of(group: dist.ProcessGroup | None) -> float | None:
    """Return the shortest timeout of a group's collectives, in seconds; None if torch does not state it."""
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    try:
        return min(timeouts_of(group))
    except (AttributeError, RuntimeError, ValueError):
        return None  # A backend of another vendor, or a fake one.


class SoloComm(AloneComm):
    """One process alone, even if it is a rank of a process group."""

    def rank_of_global(self, rank: int) -> int | None:
        """Return 0 for this process's own global rank, None for any other."""
        own = dist.get_rank() if dist.is_initialized() else 0
        return 0 if rank == own else None


def _tensor_of(payload: bytes, length: int, device: torch.device) -> torch.Tensor:
    """Return `length` bytes as a tensor that begins with `payload`."""
    return torch.frombuffer(bytearray(payload.ljust(length, b"\0") or b"\0"), dtype=torch.uint8)[:length].to(device)
