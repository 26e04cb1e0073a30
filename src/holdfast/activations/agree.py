"""The ranks of a fit: a failure of one rank is raised on every rank, and all ranks take the same decisions.

A fit is a row of phases, the same on every rank. A rank that fails may be in any of them, and the others may wait for
this rank in a collective of the step: so failures go through the job's key-value store, and values through collectives
that begin only where every rank has come. States of a phase, and who moves the phase:

    open -> agreed   the rank that completes the count
    open -> failed   the first rank that fails, in this phase or while the rank waits for its end
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from holdfast.backends.torch.comm import comm_of
from holdfast.base.clock import SystemClock
from holdfast.base.types.inspected import inspected
from holdfast.errors import BY_NAME, CheckpointError, UnavailableError, first_three, translated

T = TypeVar("T")

_AGREED = b"agreed"

_STORE_SECONDS = 60.0
"""Limit of a call of the key-value store that waits for no rank."""

_WAIT_SECONDS = 1800.0
"""Limit of a wait for another rank, where the process group states none."""


class FitRanks:
    """The ranks that fit one model together. A context manager: an error that leaves the context fails every rank."""

    def __init__(self, process_group: object) -> None:
        """Meet the other ranks.

        Args:
            process_group: None for the default group (or one process), False for this process alone, or a group.
        Raises:
            InvalidError: The group is no group, or this rank is not a member.
            UnavailableError: A rank does not call `fit`.
        """
        self._comm = comm_of(process_group)
        self._store = self._comm.key_value_store
        self._name = f"holdfast/activations/{self._comm.broadcast(SystemClock().random_bytes(8)).hex()}"
        self._phase = 0

    def agree(self) -> None:
        """Return once every rank has come this far.

        Raises:
            CheckpointError: Another rank failed: the error of that rank.
            UnavailableError: A rank has not come in time.
        """
        if self._comm.world_size == 1:
            return
        store, key, seconds = self._store, self._key(self._phase), self._comm.timeout_seconds or _WAIT_SECONDS
        store.set(self._mark(self._comm.rank), str(self._phase).encode(), _STORE_SECONDS)
        if store.add(f"{key}/count", 1, _STORE_SECONDS) == self._comm.world_size:
            store.compare_set(key, b"", _AGREED, _STORE_SECONDS)
        try:
            (verdict,) = store.get_many([key], seconds)
        except TimeoutError as error:
            raise UnavailableError(
                f"fit: ranks {first_three(self._absent())} of {self._comm.world_size} did not come to phase "
                f"{self._phase} within {seconds:.0f} s; expected every rank to run the same fit. Look at the logs of "
                "these ranks"
            ) from error
        if verdict != _AGREED:
            raise _error_in(verdict)
        self._phase += 1

    def gather(self, own: T, kind: type[T]) -> Iterator[T]:
        """Return the values of all ranks, by rank; a collective.

        Args:
            own: The value of this rank: numbers, texts, and frozen values of these.
            kind: The value's type.
        """
        self.agree()
        gathered = self._comm.all_gather(zlib.compress(msgspec.json.encode(own)))
        return (_decoded(zlib.decompress(each), kind) for each in gathered)

    def from_first(self, make: Callable[[], T], kind: type[T]) -> T:
        """Return the value that rank 0 makes, on every rank; a collective. Arguments as for `gather`."""
        made = msgspec.json.encode(make()) if self._comm.rank == 0 else None
        self.agree()
        return _decoded(self._comm.broadcast(made), kind)

    def __enter__(self) -> FitRanks:
        """Return this object."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Fail every rank if this rank failed.

        Raises:
            CheckpointError: This rank failed in a collective because another rank had failed: the error of that rank.
        """
        if error is None or self._comm.world_size == 1:
            return
        failure = translated(error)
        told = {"rank": self._comm.rank, "kind": type(failure).__name__, "message": str(failure)}
        own, verdict = json.dumps(told).encode(), _AGREED
        # The other ranks may have agreed while this rank waited: they look again in the next phase.
        with suppress(CheckpointError, TimeoutError):
            for phase in (self._phase, self._phase + 1):
                if verdict == _AGREED:
                    verdict = self._store.compare_set(self._key(phase), b"", own, _STORE_SECONDS)
        if verdict not in (own, _AGREED) and isinstance(error, RuntimeError | UnavailableError):
            raise _error_in(verdict) from error

    def _key(self, phase: int) -> str:
        return f"{self._name}/{phase}"

    def _mark(self, rank: int) -> str:
        return f"{self._name}/rank/{rank}"

    def _absent(self) -> list[int]:
        """Return the ranks that have not come to this phase."""
        phase = [str(self._phase).encode()]
        marks = [self._mark(rank) for rank in range(self._comm.world_size)]
        came = {each for each in marks if self._store.present(each)}
        came = {each for each in came if self._store.get_many([each], _STORE_SECONDS) == phase}
        return [rank for rank, mark in enumerate(marks) if mark not in came]


def _decoded(data: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(data, type=inspected(kind, msgspec.json.Decoder))


def _error_in(verdict: bytes) -> CheckpointError:
    told = json.loads(verdict)
    return BY_NAME[told["kind"]](f"rank {told['rank']}: {told['message']}")
